"""Bytes that each rank sends in a collective, and its duration.

Every rank has one full-duplex link. An all-reduce takes the faster of a ring and NCCL's double
binary tree, which sends whole tensors in fewer steps; all others but all-to-all take the ring
(https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4,
Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). Across machines, most steps of
the ring stay inside one; the tree is a chain inside each machine and a tree between them, as in
NCCL's model of its times (src/graph/tuning.cc in https://github.com/NVIDIA/nccl).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CollectiveCost:
    """What a collective costs one rank."""

    steps: int  # consecutive messages, each of which pays the latency of the link
    num_bytes: int  # that the rank sends or, if it sends none, receives
    between: int = 0  # number of steps from one machine to another
    leaving: int = 0  # bytes to other machines, sent by all ranks at the same time

    def seconds(self, route):
        """Return the duration on a `Route` in seconds; 0 without steps."""
        if not self.steps:
            return 0.0
        steps = (self.steps - self.between) * route.latency + self.between * route.between
        sending = max(self.num_bytes / route.bandwidth, self.leaving / route.part)
        return route.startup + steps + sending


def all_reduce(k, num_bytes, route):
    """Return the `CollectiveCost` of a sum of `num_bytes` over `k` ranks, by ring or tree."""
    if k == 1:
        return CollectiveCost(0, 0)
    machines = route.machines
    ring = CollectiveCost(2 * (k - 1), 2 * (k - 1) * num_bytes // k, 2 * (machines - 1))
    rounds = 2 * (machines - 1).bit_length()
    inside = -(-k // machines)  # ranks in each machine
    chain = (inside - 1).bit_length() if machines == 1 else inside - 1
    tree = CollectiveCost(2 * chain + rounds, 2 * num_bytes, rounds)
    return min(ring, tree, key=lambda cost: cost.seconds(route))


def all_gather(k, num_bytes, route):
    """Return the `CollectiveCost` of all_gather and reduce_scatter, `num_bytes` for all parts."""
    return CollectiveCost(k - 1, (k - 1) * num_bytes // k, route.machines - 1)


def all_to_all(k, num_bytes, route):
    """Return the `CollectiveCost` of all_to_all, `num_bytes` for all parts of a rank.

    No ring: each rank's parts for other machines go through its share of the network cards.
    """
    leaving = (k - k // route.machines) * num_bytes // k  # none in one machine
    return replace(all_gather(k, num_bytes, route), leaving=leaving)


def broadcast(k, num_bytes, route):
    """Return the `CollectiveCost` of broadcast and reduce, in a pipeline along the ring."""
    return CollectiveCost(k - 1, num_bytes if k > 1 else 0, route.machines - 1)


def gather(k, num_bytes, route):
    """Return the `CollectiveCost` of gather and scatter: `num_bytes` a rank on the root's link."""
    return CollectiveCost(k - 1, (k - 1) * num_bytes, route.machines - 1)


def send(k, num_bytes, route):
    """Return the `CollectiveCost` of a message from one rank to another."""
    return CollectiveCost(1, num_bytes, route.machines - 1)


reduce_scatter, reduce, scatter, recv, barrier = all_gather, broadcast, gather, send, all_reduce
