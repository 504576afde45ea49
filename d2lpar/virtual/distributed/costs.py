"""What a collective costs on the links of its ranks: bytes that each sends, and seconds.

Every rank has one link that sends and receives at the same time. Sums go around a ring where that
is faster than NCCL's double binary tree, which sends whole tensors but has fewer steps; all else
goes around the ring (https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4,
Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

Virtual GPUs take these seconds. Chapters predict with the formulas in `parallel/costs.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a collective costs one rank.

    Attributes:
        steps: consecutive messages, each of which pays the latency of the link.
        num_bytes: the bytes that the rank sends or, if it sends none, receives.
    """

    steps: int
    num_bytes: int

    def seconds(self, bandwidth, latency):
        """Return the seconds it takes for a bandwidth (bytes per second) and latency (seconds)."""
        return self.steps * latency + self.num_bytes / bandwidth


def all_reduce(k, num_bytes, bandwidth, latency):
    """Return the `Cost` of a sum of tensors of `num_bytes` over `k` ranks, by ring or tree."""
    if k == 1:
        return Cost(0, 0)
    ring = Cost(2 * (k - 1), 2 * (k - 1) * num_bytes // k)
    tree = Cost(2 * (k - 1).bit_length(), 2 * num_bytes)
    return min(ring, tree, key=lambda cost: cost.seconds(bandwidth, latency))


def in_parts(k, num_bytes, bandwidth, latency):
    """Return the `Cost` of all_gather, reduce_scatter and all_to_all, `num_bytes` for all parts."""
    return Cost(k - 1, (k - 1) * num_bytes // k)


def around(k, num_bytes, bandwidth, latency):
    """Return the `Cost` of broadcast and reduce, in a pipeline along the ring."""
    return Cost(k - 1, num_bytes if k > 1 else 0)


def at_root(k, num_bytes, bandwidth, latency):
    """Return the `Cost` of gather and scatter of `num_bytes` a rank: the root's link decides."""
    return Cost(k - 1, (k - 1) * num_bytes)


def one_message(k, num_bytes, bandwidth, latency):
    """Return the `Cost` of a message from one rank to another."""
    return Cost(1, num_bytes)
