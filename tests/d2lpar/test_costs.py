"""The closed forms against message schedules, bytes that were counted, and published figures."""

import math

import pytest

from d2lpar import collectives
from d2lpar.chapters.scaling import allreduce_seconds, two_level_seconds
from vgpu import PRESETS, Link
from vgpu.distributed import collective_costs
from vgpu.distributed.routes import Route

LINK = Link(bandwidth=1e9, latency=1e-3)


def played(rounds, k, chunk_bytes, link):
    """Let messages go out over links: in a round, the busiest link decides."""
    seconds = 0.0
    for messages in rounds:
        out_of, into = [0.0] * k, [0.0] * k
        for source, target in messages:
            out_of[source] += link.seconds(chunk_bytes)
            into[target] += link.seconds(chunk_bytes)
        seconds += max(out_of + into)
    return seconds


@pytest.mark.parametrize("algorithm", ["star", "tree", "ring"])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 8, 13, 16])
def test_closed_forms_are_what_the_messages_of_allreduce_take(algorithm, k):
    rounds, num_chunks = collectives._schedule(algorithm, k)
    pairs = [[(transfer.source, transfer.target) for transfer in each] for each in rounds]
    expected = played(pairs, k, 1e6 / num_chunks, LINK)
    assert allreduce_seconds(algorithm, k, 1e6, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 4, 16])
def test_halving_has_the_bytes_of_the_ring_and_the_messages_of_the_tree(k):
    sizes = [1e6 / 2 ** (i + 1) for i in range(int(math.log2(k)))]
    expected = 2 * sum(LINK.seconds(size) for size in sizes)
    assert allreduce_seconds("halving", k, 1e6, LINK) == pytest.approx(expected)


def test_four_gpus_of_d2l():
    """d2l 13.7: 160 MB over 16 GB/s take 60 ms over one of four GPUs, 15 ms spread over them."""
    link = Link(16e9)
    assert allreduce_seconds("star", 4, 160e6, link) == pytest.approx(60e-3)
    assert allreduce_seconds("ring", 4, 160e6, link) == pytest.approx(15e-3)


@pytest.mark.parametrize("k", [2, 4, 8])
def test_the_ring_is_that_of_process_groups(k):
    """Both packages have the formula: vgpu imports nothing of d2lpar, and keeps its own private."""
    route = Route(LINK.bandwidth, LINK.latency)
    theirs = collective_costs.all_reduce(k, 1_000_000_000, route).seconds(route)
    assert allreduce_seconds("ring", k, 1_000_000_000, LINK) == pytest.approx(theirs)


def test_two_levels():
    inside, between = PRESETS["nvlink2"], PRESETS["10gbe"]
    both = two_level_seconds(3, 8, 1e8, inside, between)
    rings = [allreduce_seconds("ring", 8, 1e8, inside), allreduce_seconds("ring", 3, 1e8, between)]
    assert both == pytest.approx(sum(rings))
    assert two_level_seconds(1, 8, 1e8, inside, between) == rings[0]
    assert two_level_seconds(3, 1, 1e8, inside, between) == rings[1]


def test_errors_give_values():
    with pytest.raises(ValueError, match="'mesh': choose one of star, tree, ring, halving"):
        allreduce_seconds("mesh", 2, 1, LINK)
    with pytest.raises(ValueError, match="power of two for halving: got k = 6"):
        allreduce_seconds("halving", 6, 1, LINK)
    for k in (0, 2.5):
        with pytest.raises(ValueError, match=f"k must be a positive integer: got {k}"):
            allreduce_seconds("ring", k, 1, LINK)
    with pytest.raises(ValueError, match="positive integer: got -1"):
        two_level_seconds(2, -1, 1, LINK, LINK)
    with pytest.raises(ValueError, match="num_bytes must not be negative: got -5"):
        allreduce_seconds("ring", 2, -5, LINK)
