"""Ways to split the work of a training step over the devices of one process."""
