"""torch.distributed on virtual GPUs: the backend "vccl", which behaves like NCCL.

process_group.py  what torch calls: a collective becomes an op on a stream of its own
collective.py     the op: its tensors, cost, ranks, and the text on which ranks must agree
work.py           what it returns: waiting makes the current stream wait, not the host
exchange.py       what moves the values, in an engine's thread, through gloo
agreement.py      ranks compare their calls before each exchange, and agree when it begins
meetings.py       the same on modelled GPUs: when ranks meet on the simulated clock
timekeeper.py     the process that keeps that clock for ranks in several processes
equal_ranks.py    one modelled GPU that stands for many equal ones
routes.py         what the messages of a group go over, inside a machine and between machines
collective_costs.py  how long it takes on its route, and the bytes that a rank sends
functional.py     the collectives of torch.ops._c10d_functional, which DTensor uses
"""

BACKEND = "vccl"
