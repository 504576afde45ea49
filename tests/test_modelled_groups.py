"""torch.distributed on modelled GPUs: times by hand, by a naive reference, and who waits for whom.

Each test runs in every rank of a job; see `ranks.in_ranks`. Kernels take the seconds that a test
says, a link moves a byte a second, and launches take no time unless a test says so.
"""

import functools
import gc
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from modelling import BYTE_A_SECOND, fixed_gpus, sleep
from ranks import PATIENCE, a_group, end_jobs, everywhere, hear, in_ranks, job_of, tell
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from d2lpar.virtual import Link, clock, host_takes, scheduler, start_recording, virtual_gpus
from d2lpar.virtual.distributed import timekeeper


@pytest.fixture(scope="module", autouse=True)
def jobs():
    yield
    end_jobs()


def set_up(timeout=PATIENCE, peer_link=BYTE_A_SECOND, **figures):
    """Return this rank's number, its modelled GPU and a group of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = fixed_gpus(size, peer_link=peer_link, **figures)[rank]
    torch.vgpu.set_device(rank)
    return rank, device, a_group(timeout=timeout)


def room(num_bytes, device):
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def end():
    """Return when this rank has done all that it was given."""
    torch.vgpu.synchronize()
    return clock()


def failure_of(function):
    try:
        function()
        torch.vgpu.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def with_and_without_values(*sizes):
    """Let a test run in every rank, with values and without: its argument."""

    def decorate(function):
        @pytest.mark.parametrize("values", [True, False])
        @pytest.mark.parametrize("size", sizes)
        def test(size, values):
            job_of(size).run(function, values)

        test.__name__ = function.__name__
        return test

    return decorate


# -- times by hand


@with_and_without_values(2, 3)
def test_a_collective_begins_when_the_last_rank_is_ready(values):
    rank, device, group = set_up(values=values)
    k = dist.get_world_size()
    sleep(device, 2 + 3 * rank)
    dist.all_reduce(room(12, device), group=group)
    assert clock() == 0  # the host has waited for nothing
    assert end() == 2 + 3 * (k - 1) + 2 * (k - 1) * 12 / k


@with_and_without_values(2)
def test_a_collective_overlaps_what_does_not_wait_for_it(values):
    rank, device, group = set_up(values=values)
    sleep(device, 1 + rank)
    work = dist.all_reduce(room(10, device), group=group, async_op=True)  # 2 to 12
    sleep(device, 4)
    torch.vgpu.current_stream().synchronize()
    assert clock() == 5 + rank
    work.wait()
    sleep(device, 1)
    assert end() == 13


@with_and_without_values(2)
def test_launches_and_latency_count(values):
    rank, device, group = set_up(launch=1, peer_link=Link(1.0, latency=0.25), values=values)
    x = room(8, device)
    begun = clock()
    host_takes(5 * rank)
    dist.all_reduce(x, group=group)
    assert end() - begun == 5 + 1 + 2 * 0.25 + 8


@with_and_without_values(2)
def test_messages_both_ways_run_at_the_same_time_though_receives_are_posted_early(values):
    rank, device, group = set_up(values=values)
    x, y = room(10, device), room(10, device)
    got = dist.irecv(y, 1 - rank, group=group)
    sleep(device, 3 + 2 * rank)
    sent = dist.isend(x, 1 - rank, group=group)
    got.wait(), sent.wait()
    both = everywhere(end())
    # rank 0 sends from 3 to 13; its link is then busy for what rank 1 sends at 5
    assert both in ([15, 15], [23, 23]), both


@with_and_without_values(3)
def test_a_pipeline_over_three_ranks(values):
    """Rank 0 computes 2 s, sends 1 s; each next rank the same; three micro-batches."""
    rank, device, group = set_up(values=values)
    ends = []
    for _ in range(3):
        x = room(1, device)
        if rank > 0:
            dist.recv(x, rank - 1, group=group)
        sleep(device, 2)
        event = torch.vgpu.Event(enable_timing=True)
        event.record()
        if rank < 2:
            dist.isend(x, rank + 1, group=group)
        event.synchronize()
        ends.append(clock())
    torch.vgpu.synchronize()
    assert ends[0] == 2 + 3 * rank
    assert ends == sorted(ends) and len({*ends}) == 3


@with_and_without_values(3)
def test_two_groups_share_a_link_one_after_the_other(values):
    """Both wait for their last rank; rank 0's link is free until then."""
    rank, device, group = set_up(values=values)
    pairs = {other: a_group([0, other]) for other in (1, 2)}
    side = torch.vgpu.Stream(device)
    if rank:
        sleep(device, 4 + rank)  # until 5 and 6
    works = []
    for other, pair in pairs.items():
        if rank in (0, other):
            with torch.vgpu.stream(side if other == 2 else torch.vgpu.current_stream()):
                num_bytes = 40 if other == 1 else 2
                works.append(dist.all_reduce(room(num_bytes, device), group=pair, async_op=True))
    for work in works:
        work.wait()
    torch.vgpu.synchronize()  # 5 to 45, and 6 to 8
    dist.barrier()
    if rank == 0:
        other = dist.get_rank()
        assert clock() == 45
        resources = scheduler_model(device).needs(_any_collective(device))[1:]
        assert [each.free_at for each in resources] == [45, 45], other


def scheduler_model(device):
    from d2lpar.virtual import device as registry

    return registry.find(device).model


def _any_collective(device):
    class Op:
        kind, engine = "collective", None

    return Op


@with_and_without_values(2)
def test_ranks_in_two_machines_use_the_network(values):
    network = Link(0.5, latency=1)
    rank, device, group = set_up(values=values, gpus=1, network=network)
    dist.all_reduce(room(8, device), group=group)
    assert end() == 2 * 1 + 8 / 0.5


@with_and_without_values(2)
def test_a_barrier_takes_the_host_along(values):
    rank, device, group = set_up(values=values, peer_link=None)
    sleep(device, 3 * rank)
    dist.barrier(group=group)
    assert clock() == 3


# -- the same in every run


def program(rank, seed, subsets, groups, device, hosts_sleep=False):
    """Issue a random program; return the host's time after each of its calls, and its end.

    All ranks draw the same calls, and each its own kernels and whether its host waits.
    """
    choices, own = random.Random(seed), random.Random(seed * 100 + rank)
    ends = []
    for _ in range(12):
        kind = choices.choice(["all_reduce", "broadcast", "message", "kernel"])
        members = choices.choice(subsets)
        group = groups[subsets.index(members)]
        num_bytes = choices.randint(1, 9) * 6
        seconds, waits = own.randint(0, 5), own.random() < 0.3
        first, second = choices.sample(range(3), 2)
        if hosts_sleep and random.random() < 0.3:
            time.sleep(random.random() * 0.1)
        sleep(device, seconds)
        if kind in ("all_reduce", "broadcast") and rank in members:
            x = room(num_bytes, device)
            if kind == "all_reduce":
                dist.all_reduce(x, group=group)
            else:
                dist.broadcast(x, members[0], group=group)
        elif kind == "message" and rank == first:
            dist.send(room(num_bytes, device), second, group=groups[0])
        elif kind == "message" and rank == second:
            dist.recv(room(num_bytes, device), first, group=groups[0])
        if waits:
            torch.vgpu.synchronize()
        ends.append(clock())
    torch.vgpu.synchronize()
    return [*ends, clock()]


def reference(size, seed, groups):
    """Return what `program` returns in each rank: each op begins when all it needs is free.

    As every call waits for the one before it on its rank, there is one time for each rank: that
    of its stream. A collective sets those of its ranks to its end.
    """
    choices = random.Random(seed)
    owns = [random.Random(seed * 100 + rank) for rank in range(size)]
    now, hosts, ends = [0.0] * size, [0.0] * size, [[] for _ in range(size)]
    for _ in range(12):
        kind = choices.choice(["all_reduce", "broadcast", "message", "kernel"])
        group = choices.choice(groups)
        num_bytes = choices.randint(1, 9) * 6
        drawn = [(own.randint(0, 5), own.random() < 0.3) for own in owns]
        first, second = choices.sample(range(size), 2)
        for rank, (seconds, _) in enumerate(drawn):
            now[rank] += seconds
        ranks, seconds = [], 0
        if kind == "all_reduce":
            k, ranks = len(group), group
            seconds = 2 * (k - 1) * num_bytes / k
        elif kind == "broadcast":
            ranks, seconds = group, num_bytes
        elif kind == "message":
            ranks, seconds = [first, second], num_bytes
        if ranks:
            end = max(now[rank] for rank in ranks) + seconds
            for rank in ranks:
                now[rank] = end
        for rank, (_, waits) in enumerate(drawn):
            if waits:
                hosts[rank] = now[rank]
            ends[rank].append(hosts[rank])
    for rank in range(size):
        ends[rank].append(now[rank])
    return ends


@with_and_without_values(3)
def test_random_programs_take_the_time_of_a_naive_reference(values):
    subsets = [[0, 1, 2], [0, 1], [1, 2]]
    for seed in range(12):
        rank, device, group = set_up(values=values)
        groups = [group, a_group([0, 1]), a_group([1, 2])]
        found = program(rank, seed, subsets, groups, device)
        expected = reference(3, seed, subsets)[rank]
        assert found == expected, (seed, found, expected)


# -- values


@with_and_without_values(2)
def test_a_rank_without_values_does_not_wait_for_them_nor_does_another_for_its(values):
    """Whole numbers that come from the CPU have values in any case, what is computed has not."""
    rank, device, group = set_up(values=values)
    x = torch.zeros(4, device=device)
    dist.scatter(x, [torch.ones(4, device=device)] * 2 if rank == 0 else None, 0, group=group)
    dist.recv(x, 0, group=group) if rank else dist.send(x, 1, group=group)
    dist.gather(x, [torch.ones_like(x) for _ in range(2)] if rank == 0 else None, 0, group=group)
    known = torch.tensor([1, 2])
    y = known.to(device) + 0 if rank else known.to(device)
    dist.all_reduce(y, group=group)
    torch.vgpu.synchronize()
    told = known.to(device) if rank == 0 else torch.empty(2, dtype=torch.int64, device=device)
    dist.broadcast(told, 0, group=group)
    assert told.tolist() == [1, 2]
    z = known.to(device) * rank
    (dist.recv if rank == 0 else dist.send)(z, 1 - rank, group=group)
    torch.vgpu.synchronize()
    if values:
        assert (y.tolist(), z.tolist()) == ([2, 4], [1, 2])
