"""Many processes: launching them, one rank of a process group, DistributedDataParallel."""
