"""torch.distributed on virtual GPUs: the backend "vccl", which behaves like NCCL.

process_group.py     the process group that torch calls; a collective is an op on its own stream
collective.py        the op: tensors, cost, ranks, and the text on which all ranks must agree
work.py              the Work that a collective returns: waiting blocks the stream, not the host
exchange.py          moves the values through gloo, in an engine's thread
agreement.py         over gloo, ranks compare calls and agree on the start, or CollectiveTimeout
meetings.py          the same on modelled GPUs: when ranks meet on the simulated clock
timekeeper.py        one simulated clock for ranks in several processes
equal_ranks.py       one modelled GPU in place of many equal ones
routes.py            links inside a machine, and network cards between machines
collective_costs.py  seconds of a collective on its route, and bytes that each rank sends
collective_bytes.py  counts the bytes that a rank hands to collectives
functional.py        collectives of torch.ops._c10d_functional, which DTensor uses
"""

BACKEND = "vccl"
