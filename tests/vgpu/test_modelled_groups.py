"""torch.distributed on modelled GPUs: times by hand, by a naive reference, and who waits for whom.

Each test runs in every rank of a job; see `ranks.in_ranks`. Kernels take the seconds that a test
says, a link moves a byte a second, and launches take no time unless a test says so.
"""

import contextlib
import gc
import os
import pickle
import random
import signal
import socket
import struct
import threading
import time
import warnings
from collections import Counter
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, answer_challenge, deliver_challenge
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist
from gates import awaited_by, frame_in, in_thread
from modelling import BYTE_A_SECOND, Fixed, fixed_gpus, member_of, room, seconds_of, sleep
from ranks import PATIENCE, a_group, everywhere, failure_of, hear, in_group, in_ranks, job_of, tell
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from waiting import wait_until

from vgpu import Link, clock, equal_ranks, host_takes, start_recording, stop_recording, virtual_gpus
from vgpu.distributed import timekeeper
from vgpu.distributed.routes import Route
from vgpu.distributed.timekeeper import NEVER, Keeper, KeeperConnection, Post
from vgpu.modelled import simulation
from vgpu.modelled.hardware import Machine
from vgpu.runtime import scheduler

pytestmark = pytest.mark.waits


def set_up(timeout=PATIENCE, peer_link=BYTE_A_SECOND, values=True, **figures):
    """Return this rank's number, its modelled GPU and a group of all ranks.

    Where `values` is None, the GPU is a virtual one, by the wall clock.
    """
    if values is None:
        return ranks.set_up(timeout)
    return ranks.set_up(timeout, fixed_gpus, peer_link=peer_link, values=values, **figures)


def end():
    torch.vgpu.synchronize()
    return clock()


def with_and_without_values(*sizes, values=(True, False), **figures):
    """Let a test run in every rank, with each of some `values`; give it what `set_up` returns."""

    def decorate(function):
        @pytest.mark.parametrize("values", values)
        @pytest.mark.parametrize("size", sizes)
        def test(size, values):
            job_of(size).run(lambda: function(*set_up(values=values, **figures)))

        test.__name__ = function.__name__
        return test

    return decorate


# For what does not depend on values, such as time-outs
in_modelled_group = partial(in_group, make=fixed_gpus, peer_link=BYTE_A_SECOND)


# -- times by hand


@with_and_without_values(2)
def test_a_collective_overlaps_what_does_not_wait_for_it(rank, device, group):
    sleep(device, 1 + rank)
    work = dist.all_reduce(room(10, device), group=group, async_op=True)  # 2 to 12
    sleep(device, 4)
    torch.vgpu.current_stream().synchronize()
    assert clock() == 5 + rank
    work.wait()
    sleep(device, 1)
    assert end() == 13


@with_and_without_values(2, launch=1, peer_link=Link(1.0, latency=0.25))
def test_launches_and_latency_count(rank, device, group):
    x = room(8, device)
    begun = clock()
    host_takes(5 * rank)
    dist.all_reduce(x, group=group)
    assert end() - begun == 5 + 1 + 2 * 0.25 + 8


@with_and_without_values(2)
def test_messages_both_ways_overlap_though_receives_are_posted_early(rank, device, group):
    x, y = room(10, device), room(10, device)
    got = dist.irecv(y, 1 - rank, group=group)
    sleep(device, 3 + 2 * rank)
    sent = dist.isend(x, 1 - rank, group=group)
    got.wait(), sent.wait()
    both = everywhere(end())
    assert both == [15, 15]


@with_and_without_values(3)
def test_a_link_is_free_when_the_last_of_its_collectives_has_ended(rank, device, group):
    """Two of other groups that were waited for meet meanwhile; the next one finds the link busy."""
    pairs = {other: a_group([0, other]) for other in (1, 2)}
    side = torch.vgpu.Stream(device)
    if rank:
        sleep(device, 4 + rank)  # until 5 and 6
    if rank < 2:
        dist.all_reduce(room(40, device), group=pairs[1], async_op=True)  # 5 to 45
    if rank != 1:
        with torch.vgpu.stream(side if rank == 0 else torch.vgpu.current_stream()):
            dist.all_reduce(room(2, device), group=pairs[2], async_op=True)  # 6 to 8
            dist.all_reduce(room(2, device), group=pairs[2], async_op=True)  # 45 to 47
    assert end() == (45 if rank == 1 else 47)


@with_and_without_values(2)
def test_a_barrier_takes_the_host_along(rank, device, group):
    sleep(device, 3 * rank)
    dist.barrier(group=group)  # NCCL's is a sum of 4 bytes
    assert clock() == 3 + 4


# -- against a reference


def calls(seed, size, groups):
    """Yield random calls that all ranks draw alike: (kind, number of a group, bytes, message)."""
    choices = random.Random(seed)
    for _ in range(12):
        kind = choices.choice(["all_reduce", "broadcast", "message", "kernel"])
        group = choices.randrange(len(groups))
        yield kind, group, choices.randint(1, 9) * 6, choices.sample(range(size), 2)


def program(rank, seed, subsets, groups, device, hosts_sleep=False):
    """Issue a random program; return the host's time after each of its calls, and its end.

    All ranks draw the same calls, and each its own kernels and whether its host waits.
    """
    own, ends = random.Random(seed * 100 + rank), []
    for kind, number, num_bytes, (first, second) in calls(seed, 3, groups):
        members, group = subsets[number], groups[number]
        seconds, waits = own.randint(0, 5), own.random() < 0.3
        among = group if {first, second} <= {*members} else groups[0]
        if hosts_sleep and random.random() < 0.3:
            time.sleep(random.random() * 0.1)
        sleep(device, seconds)
        if kind == "all_reduce" and rank in members:
            dist.all_reduce(room(num_bytes, device), group=group)
        elif kind == "broadcast" and rank in members:
            dist.broadcast(room(num_bytes, device), members[0], group=group)
        elif kind == "message" and rank == first:
            dist.send(room(num_bytes, device), second, group=among)
        elif kind == "message" and rank == second:
            dist.recv(room(num_bytes, device), first, group=among)
        if waits:
            torch.vgpu.synchronize()
        ends.append(clock())
    return [*ends, end()]


def reference(size, seed, groups):
    """Return what `program` returns in each rank: each op begins when all it needs is free.

    As every call waits for the one before it on its rank, there is one time for each rank: that
    of its stream. A collective sets those of its ranks to its end.
    """
    owns = [random.Random(seed * 100 + rank) for rank in range(size)]
    now, hosts, ends = [0.0] * size, [0.0] * size, [[] for _ in range(size)]
    for kind, number, num_bytes, message in calls(seed, size, groups):
        drawn = [(own.randint(0, 5), own.random() < 0.3) for own in owns]
        for rank, (seconds, _) in enumerate(drawn):
            now[rank] += seconds
        members, seconds = groups[number], num_bytes
        if kind == "all_reduce":
            seconds = 2 * (len(members) - 1) * num_bytes / len(members)
        elif kind != "broadcast":
            members = message if kind == "message" else []
        end = max((now[rank] for rank in members), default=0) + seconds
        for rank in members:
            now[rank] = end
        for rank, (_, waits) in enumerate(drawn):
            if waits:
                hosts[rank] = now[rank]
            ends[rank].append(hosts[rank])
    return [[*ends[rank], now[rank]] for rank in range(size)]


@with_and_without_values(3)
def test_random_programs_take_the_time_of_a_naive_reference(*_):
    subsets, values = [[0, 1, 2], [0, 1], [1, 2]], scheduler.clock.values
    for seed in range(6):
        rank, device, group = set_up(values=values)
        groups = [group, a_group([0, 1]), a_group([1, 2])]
        found = program(rank, seed, subsets, groups, device)
        expected = reference(3, seed, subsets)[rank]
        assert found == expected, (seed, found, expected)


# -- values


@with_and_without_values(2)
def test_ranks_do_not_wait_for_values_where_one_has_none(rank, device, group):
    """Small tensors that follow from small ones have values in any case, others have not."""
    x = torch.zeros(4, device=device)
    dist.scatter(x, [torch.ones(4, device=device)] * 2 if rank == 0 else None, 0, group=group)
    dist.recv(x, 0, group=group) if rank else dist.send(x, 1, group=group)
    dist.gather(x, [torch.ones_like(x) for _ in range(2)] if rank == 0 else None, 0, group=group)
    known, zeros = torch.tensor([1, 2]), torch.zeros(2**18, dtype=torch.int64, device=device)[:2]
    y = known.to(device) + zeros if rank else known.to(device) + 0
    dist.all_reduce(y, group=group)
    torch.vgpu.synchronize()
    told = known.to(device) + zeros if rank else known.to(device)
    dist.broadcast(told, 0, group=group)
    assert told.tolist() == [1, 2]
    z = known.to(device) * rank + zeros
    (dist.recv if rank == 0 else dist.send)(z, 1 - rank, group=group)
    torch.vgpu.synchronize()
    no_values = [-(2**63)] * 2  # as of any whole numbers that nothing was computed for
    values = scheduler.clock.values
    assert y.tolist() == ([2, 4] if values else no_values)
    assert z.tolist() == ([1, 2] if values else no_values)


# -- the same in every run


@in_ranks(3)
def test_three_runs_give_the_same_digits_however_the_hosts_dawdle():
    subsets = [[0, 1, 2], [0, 1], [1, 2]]
    found = []
    for run in range(3):
        rank, device, group = set_up(peer_link=Link(0.3, latency=0.01), launch=1e-5)
        groups = [group, a_group([0, 1]), a_group([1, 2])]
        found.append(program(rank, 99, subsets, groups, device, hosts_sleep=run > 0))
    assert found == found[:1] * 3


# -- hosts that are elsewhere


@with_and_without_values(3)
def test_hosts_that_wait_elsewhere_are_simulated_through_other_groups(rank, device, _):
    """Rank 0 needs rank 1, which needs rank 2 first, and both hosts wait for rank 0."""
    pairs = {pair: a_group(list(pair)) for pair in ((1, 2), (0, 1))}
    sleep(device, 3)
    for pair, group in pairs.items():
        if rank in pair:
            dist.all_reduce(room(4, device), group=group)
    if rank == 0:
        torch.vgpu.synchronize()
        tell("rank 0 is done")
    else:
        sleep(device, 9)
        hear("rank 0 is done")
        sleep(device, 1, torch.vgpu.Stream())  # before the last: they were simulated no further
    assert end() == {0: 11, 1: 11 + 9, 2: 7 + 9}[rank]


@with_and_without_values(2)
def test_a_host_that_works_is_not_overtaken(*_):
    """What rank 0 issues after it was asked to go on is ready before its second kernel."""
    with pytest.MonkeyPatch.context() as patch:
        is_busy, answers = KeeperConnection.is_busy, []
        a_core = {**vars(time), "process_time": time.perf_counter}  # as if it had one to itself
        patch.setattr(timekeeper, "time", SimpleNamespace(**a_core))
        patch.setattr(
            KeeperConnection,
            "is_busy",
            lambda member: answers.append(is_busy(member)) or answers[-1],
        )
        rank, device, group = set_up(values=scheduler.clock.values)
        x = room(4, device)
        if rank == 0:
            side = torch.vgpu.Stream(device)
            sleep(device, 2)
            sleep(device, 2)
            dist.all_reduce(x, group=group, async_op=True)
            wait_until(lambda: len(answers) > 1)
            with side:
                sleep(device, 1)  # 2 to 3
        else:
            dist.all_reduce(x, group=group)
        assert end() == 5 + 4


@in_ranks(2)
def test_a_host_that_works_for_long_is_overtaken_in_the_end():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timekeeper, "_PATIENCE_IF_BUSY", 1.0)
        rank, device, group = set_up()
        dist.all_reduce(room(4, device), group=group)
        if rank == 0:
            torch.vgpu.synchronize()
            tell("rank 0 is done")
        else:
            with in_thread(lambda: hear("rank 0 is done")) as heard:
                while heard.is_alive():
                    pass
        assert end() == 4


# -- errors


@with_and_without_values(2)
def test_ranks_that_disagree_are_told_so(rank, device, group):
    text = failure_of(lambda: dist.all_reduce(room(3 + rank, device), group=group))
    assert "rank 0: all_reduce(uint8[3], sum)" in text, text
    assert "rank 1: all_reduce(uint8[4], sum)" in text, text
    again = failure_of(lambda: dist.all_reduce(room(3, device), group=group))
    assert "failed before" in again
    x = room(4, device)
    dist.all_reduce(x, group=a_group())
    assert end() == 4


@in_modelled_group(2, timeout=6)
def test_a_rank_that_ends_before_a_collective_is_named(rank, device, group):
    if rank == 1:
        sleep(device, 1)
        dist.destroy_process_group(group)
        return
    text = failure_of(lambda: dist.all_reduce(room(3, device), group=group))
    assert "rank 1 ended before all_reduce(uint8[3], sum)" in text, text


@in_modelled_group(2)
def test_a_rank_that_leaves_a_group_of_some_stays_in_the_job(rank, device, group):
    some = a_group([0])
    if rank == 0:
        dist.destroy_process_group(some)
    dist.all_reduce(room(4, device), group=group)
    assert end() == 4
    work = dist.all_reduce(room(4, device), group=a_group(), async_op=True)
    dist.destroy_process_group(group)  # it leaves the job once all that it has issued has run
    work.wait()
    assert end() == 8


@in_modelled_group(3, timeout=5)
def test_a_rank_that_comes_too_late_is_named_and_the_others_go_on_without_it(rank, device, group):
    pair = a_group([0, 2])
    if rank == 1:
        hear("rank 0 is done"), hear("rank 2 is done")
    text = failure_of(lambda: dist.all_reduce(room(3, device), group=group))
    assert "waited 5 s in all_reduce(uint8[3], sum)" in text and "rank 1 did not join" in text, text
    assert ("rank 1 joined after that" in text) == (rank == 1), text
    if rank == 1:
        return tell("rank 1 came")
    sleep(device, rank)
    work = dist.all_reduce(room(4, device), group=pair, async_op=True)  # 2 to 6
    sleep(device, 9)
    torch.vgpu.current_stream().synchronize()
    work.wait()
    assert end() == 9 + rank
    tell(f"rank {rank} is done")
    hear("rank 1 came")  # which all ranks are told
    dist.all_reduce(room(4, device), group=pair)
    torch.vgpu.synchronize()


@in_modelled_group(2, timeout=5)  # a rank may be a second late
def test_ranks_that_wait_in_other_groups_are_told_where_each_is(rank, device, group):
    groups = group, a_group(timeout=5)
    text = failure_of(lambda: dist.all_reduce(room(3 + rank, device), group=groups[rank]))
    texts, other = everywhere(text), f"all_reduce(uint8[{4 - rank}], sum)"
    assert f"rank {rank} waited 5 s in all_reduce(uint8[{3 + rank}], sum)" in text, text
    assert (f"rank {1 - rank} waits in {other} of group" in text) != ("did not join" in text), text
    # Who gives up half a second before the other waits no longer where it did.
    assert not all("did not join" in text for text in texts), texts


@with_and_without_values(2, values=(True, False, None))
def test_an_interrupt_while_waiting_leaves_the_process_usable(rank, device, group):
    x = torch.ones(3, device=device)
    if rank == 1:
        hear("interrupted")
    dist.all_reduce(x, group=group)
    if rank == 0:
        main = threading.main_thread().ident

        def interrupt():
            wait = simulation.Simulation.call_and_wait
            wait_until(lambda: awaited_by(main) or frame_in(main, wait))
            signal.pthread_kill(main, signal.SIGINT)

        with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
            torch.vgpu.synchronize()
        tell("interrupted")
    assert x.tolist() == [2, 2, 2]
    dist.all_reduce(x, group=group)
    assert x.tolist() == [4, 4, 4]


@with_and_without_values(2)
def test_a_collective_that_another_issues_later_holds_up_no_kernel(rank, device, group):
    """Rank 0 goes on with its kernels; only then does rank 1's host issue the collective."""
    if rank == 0:
        work = dist.all_reduce(room(4, device), group=group, async_op=True)
        sleep(device, 3), sleep(device, 3)
        torch.vgpu.current_stream().synchronize()
        assert clock() == 6
        tell("rank 0 has computed")
    else:
        hear("rank 0 has computed")
        work = dist.all_reduce(room(4, device), group=group, async_op=True)
    work.wait()
    torch.vgpu.synchronize()


@with_and_without_values(2, values=(True, False, None))
def test_a_data_loader_forks_while_a_collective_is_under_way(rank, device, group):
    x = torch.ones(3, device=device)
    if rank == 1:
        hear("loaded")
    work = dist.all_reduce(x, group=group, async_op=True)
    if rank == 0:
        loader = DataLoader(list(range(4)), batch_size=2, num_workers=1)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
        tell("loaded")
    work.wait()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("values", [True, None])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_noticed_by_the_others(killed, values):
    def check():
        rank, device, group = set_up(timeout=5, values=values)
        x = torch.ones(4, device=device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2] * 4
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        text = failure_of(lambda: dist.all_reduce(x, group=group))
        if values is None:
            named = "rank 0", "rank 1", "all_reduce(float32[4], sum)"
            assert all(words in text for words in named), text
        else:
            lost = "lost the connection", f"rank {killed} ended before all_reduce(float32[4], sum)"
            assert any(words in text for words in lost), text
        (left,) = virtual_gpus(1)
        assert torch.ones(3, device=left).sum().item() == 3

    job_of(2).run(check, may_die=(killed,))


# -- the keeper of the simulated clock


class Told:
    """What stands for the connection of a rank: it keeps what the keeper says."""

    def __init__(self):
        self.messages = []

    def send(self, message):
        self.messages.append(message)


@pytest.fixture
def keeper(monkeypatch):
    """No time passes: a host that is silent for half a second would be told to run."""
    monkeypatch.setattr(timekeeper, "time", SimpleNamespace(monotonic=float, sleep=time.sleep))
    keeper = Keeper(3, timeout=1000)
    for number in range(3):
        keeper.join(number, Told())
    yield keeper
    for number in range(3):
        keeper.receive(number, "end")


def post(keeper, number, key, members, now, text="all_reduce"):
    link = 1.0, 0.0, 0.0
    keeper.receive(number, "post", now, key, members, (text, now, "here", link, link, True))


def heard(keeper, number):
    """Return what a rank was told since the last call."""
    messages = keeper.ranks[number].connection.messages
    found, messages[:] = list(messages), []
    return found


def test_a_rank_has_leave_once_no_rank_that_it_waits_for_can_come_earlier(keeper):
    post(keeper, 0, "a", (0, 1), 1.0)
    keeper.receive(0, "ask", 5.0, 0)
    assert heard(keeper, 0) == []  # rank 1 runs, and may do anything from 0 on
    post(keeper, 1, "b", (1, 2), 2.0)
    keeper.receive(1, "ask", 4.0, 0)  # rank 2 runs
    assert heard(keeper, 0) == heard(keeper, 1) == []
    post(keeper, 2, "c", (0, 2), 6.0)  # it does nothing before 6 any more
    assert heard(keeper, 1) == [("go", 4.0)]
    assert heard(keeper, 0) == []  # now rank 1 runs, from 4 on
    keeper.receive(1, "ask", 5.0, 0)
    assert heard(keeper, 0) == heard(keeper, 1) == [("go", 5.0)]


def test_a_rank_waits_for_others_through_others(keeper):
    post(keeper, 0, "a", (0, 1), 1.0)
    post(keeper, 1, "b", (1, 2), 1.0)
    keeper.receive(1, "ask", NEVER, 0)
    keeper.receive(0, "ask", 5.0, 0)
    assert heard(keeper, 0) == []  # rank 2 may wake rank 1 at 1, and this one post "a" before 5
    post(keeper, 2, "c", (1, 2), 5.0)
    assert heard(keeper, 0) == [("go", 5.0)]


def test_ranks_that_wait_for_each_other_go_in_the_order_of_their_times(keeper):
    post(keeper, 0, "a", (0, 1), 1.0)
    post(keeper, 1, "b", (0, 1), 1.0)
    for seconds in (NEVER, 7.0):  # who has nothing to do waits for what its host issues
        keeper.receive(0, "ask", seconds, 0)
        keeper.receive(1, "ask", seconds, 0)
    assert heard(keeper, 0) == heard(keeper, 1) == [("go", 7.0)]
    keeper.receive(0, "ask", 9.0, 0)
    keeper.receive(1, "ask", 8.0, 0)
    assert (heard(keeper, 0), heard(keeper, 1)) == ([], [("go", 8.0)])


def test_a_rank_that_waits_for_values_holds_up_nobody_before_their_time(keeper):
    post(keeper, 1, "a", (0, 1), 1.0)
    post(keeper, 0, "b", (0, 1), 1.0)
    post(keeper, 0, "a", (0, 1), 5.0)  # they meet at 5
    keeper.receive(1, "at", 5.0, "a")
    keeper.receive(0, "ask", 5.0, 1)
    assert heard(keeper, 0)[1:] == [("go", 5.0)]


def test_a_question_that_has_crossed_with_news_has_no_answer(keeper):
    post(keeper, 0, "a", (0, 1), 1.0)
    post(keeper, 0, "b", (0, 2), 1.0)
    post(keeper, 1, "a", (0, 1), 3.0)
    assert heard(keeper, 0) == [("meet", "a", 3.0, Route(1.0, 0.0), True)]
    post(keeper, 2, "x", (1, 2), 9.0)
    keeper.receive(0, "ask", 5.0, 0)  # it does not know yet that it has something to do at 3
    assert heard(keeper, 0) == []
    keeper.receive(0, "ask", 3.0, 1)
    assert heard(keeper, 0) == [("go", 3.0)]


def test_what_has_failed_holds_nobody_up_and_fails_for_who_comes_later(keeper):
    post(keeper, 0, "a", (0, 1, 2), 1.0)
    post(keeper, 1, "a", (0, 1, 2), 1.0, text="broadcast")
    ((kind, key, text),) = heard(keeper, 0)
    assert (kind, key) == ("failed", "a")
    assert "rank 0: all_reduce" in text and "rank 1: broadcast" in text
    post(keeper, 0, "b", (0, 1), 1.0)
    post(keeper, 1, "c", (0, 1), 9.0)
    keeper.receive(0, "ask", 5.0, 1)
    assert heard(keeper, 0) == [("go", 5.0)]  # though rank 2 has never come
    post(keeper, 2, "a", (0, 1, 2), 20.0)
    assert heard(keeper, 2)[0][:2] == ("failed", "a")
    post(keeper, 0, "d", (0, 2), 20.0)
    keeper.receive(2, "end")
    post(keeper, 1, "e", (1, 2), 20.0)
    told = [heard(keeper, number)[-1] for number in (0, 1)]
    assert told == [("failed", key, "rank 2 ended before all_reduce") for key in "de"]


def test_an_error_of_the_keeper_fails_what_waits_for_it(keeper, monkeypatch):
    monkeypatch.setattr(timekeeper, "route", lambda *ways: {}["no such way"])
    post(keeper, 0, "a", (0, 1), 1.0)
    with pytest.raises(KeyError):
        post(keeper, 1, "a", (0, 1), 1.0)
    for number in (0, 1):
        ((kind, key, text),) = heard(keeper, number)
        assert (kind, key) == ("failed", "a") and "KeyError: 'no such way'" in text, text


# -- one rank for many, and training


def times_of_steps(device, group=None):
    """Return when three steps of DDP end, one after the other."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(device)
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.02)
    X = torch.ones(8, 64, device=device) * (1 + dist.get_rank(group))
    torch.vgpu.synchronize()
    begun, times = clock(), []
    for _ in range(3):
        net.zero_grad()
        ddp(X).square().sum().backward()
        torch.vgpu.synchronize()
        times.append(clock() - begun)
    return times


@pytest.mark.parametrize("model", ["dgx1", "p3.16xlarge"])
def test_one_rank_of_equal_ones_takes_the_time_of_all(model):
    def real(values):
        _, device, group = ranks.set_up(model=model, values=values)
        return times_of_steps(device, group)

    for values in (True, False):
        for size in (2, 3, 1024):
            (device,) = virtual_gpus(1, model=model, values=values)
            with equal_ranks(size):
                alone = times_of_steps(device)
            assert size > 3 or job_of(size).run(real, values) == [alone] * size


# -- which way a group goes


NETWORKED = {"gpus": 8, "peer_link": Link(100.0), "network": Link(1.0)}


def seconds_of_sum(group=None, num_bytes=8):
    """Return how long a sum of so many bytes takes, on an idle GPU."""
    x = room(num_bytes, "vgpu")
    return seconds_of(lambda: dist.all_reduce(x, group=group))


@pytest.mark.parametrize(
    ("k", "gpus", "peer_link", "network", "seconds"),
    [
        (2, 1, None, Link(0.5, latency=0.5), 17),
        (2, 1, Link(1.0), Link(0.5, latency=0.5), 17),
        (2, 1, Link(0.25), Link(0.5, latency=0.5), 33),
        (2, 2, Link(1.0), Link(0.5, latency=0.25), 8),  # they fill a machine
        (4, 2, Link(1.0), Link(0.5, latency=0.25), 24.5),  # 12 bytes, 2 of 6 steps between them
    ],
)
def test_equal_ranks_use_the_slower_of_link_and_network(k, gpus, peer_link, network, seconds):
    fixed_gpus(1, gpus=gpus, peer_link=peer_link, network=network)
    with equal_ranks(k):
        assert seconds_of_sum() == seconds


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_a_group_gets_its_ranks_parts_of_their_machines_cards(cards):
    """Each of 8 ranks of a machine has an eighth of what its cards move, a byte a second each."""
    fixed_gpus(1, network_cards=cards, **NETWORKED)
    with equal_ranks(16):
        across, inside, two = (dist.new_group(ranks) for ranks in ([0, 8], range(8), [0, 1, 8, 9]))
        assert seconds_of_sum(across) == 8 / (cards / 8)  # 2 (k - 1) / k of 8 bytes
        assert seconds_of_sum(inside) == pytest.approx(14 / 100)
        assert seconds_of_sum(two) == 12 / (2 * cards / 8)
        assert seconds_of_sum() == 15 / cards
        x, groups = room(8, "vgpu"), (across, two)
        sums = seconds_of(lambda: [dist.all_reduce(x, group=g, async_op=True) for g in groups])
        assert sums == pytest.approx(8 / (cards / 8) + 12 / (2 * cards / 8))  # they share the link
        whole = dist.new_group(range(16))
        dist.all_reduce(x, group=two, async_op=True), dist.destroy_process_group(whole)
        torch.vgpu.synchronize()
        assert dist.new_group(range(8, 16)) == dist.GroupMember.NON_GROUP_MEMBER
        assert seconds_of(lambda: dist.send(x, 8)) == 8  # a message has a card to itself
        fixed_gpus(1, network_cards=cards, **NETWORKED)  # on whose clock `across` is the first
        assert seconds_of_sum(across) == 8 / (cards / 8)


@pytest.mark.parametrize("by", ["equal_ranks", "FakeStore()"])
def test_a_mesh_of_two_dimensions_uses_the_network_and_machines(by):
    """torch's store for fake groups is in Python, and nothing but the group keeps it."""
    fixed_gpus(1, **NETWORKED)
    with contextlib.ExitStack() as stack:
        if by == "equal_ranks":
            stack.enter_context(equal_ranks(16))
        else:
            dist.init_process_group("vccl", store=FakeStore(), rank=0, world_size=16)
            stack.callback(dist.destroy_process_group)
        gc.collect()
        mesh = init_device_mesh("vgpu", (2, 8), mesh_dim_names=("across", "inside"))
        assert seconds_of_sum(mesh.get_group("across")) == 64
        assert seconds_of_sum(mesh.get_group("inside")) == pytest.approx(14 / 100)
        assert mesh["across"].size() == 2 and mesh.get_local_rank("inside") == 0


def test_hybrid_sharding_gathers_inside_machines_and_sums_between():
    """Two layers of 256 bytes among 8 ranks that shard and 2 that replicate: bytes by hand."""
    (device,) = fixed_gpus(1, seconds=0.0, values=False, **NETWORKED)
    with equal_ranks(16):
        mesh = init_device_mesh("vgpu", (2, 8), mesh_dim_names=("replicate", "shard"))
        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
        net.to(device)
        for each in (*net, net):
            fully_shard(each, mesh=mesh)
        spans = start_recording()
        net(torch.ones(4, 8, device=device)).sum().backward()
        end()
        stop_recording(spans)
    found = Counter(
        (span.name, span.num_bytes, round(span.end - span.start, 9))
        for span in spans
        if span.kind == "collective"
    )
    moved = 7 * 256 // 8  # of a gather and of a scattered sum, over the links of a machine
    assert {(num_bytes, seconds) for _, num_bytes, seconds in found} == {
        (moved, moved / 100),
        (32, 32 * 8.0),  # a shard's gradients, by the eighth of a card
    }
    names = Counter(span.name for span in spans if span.kind == "collective")
    assert names == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 2, "all_reduce": 2}


def sums_of_ranks(size, groups, **figures):
    """Return how long a sum takes in each group, for one equal rank; assert: for real ones, too."""

    def real():
        set_up(**figures)
        mine, found = [a_group(members) for members in groups], []
        for members, group in zip(groups, mine, strict=True):
            dist.barrier(a_group())
            found.append(seconds_of_sum(group) if dist.get_rank() in members else None)
        return found

    fixed_gpus(1, **figures)
    with equal_ranks(size):
        alone = [seconds_of_sum(dist.new_group(members)) for members in groups]
    assert job_of(size).run(real)[0] == pytest.approx(alone)
    return alone


@pytest.mark.parametrize("cards", [1, 2])
def test_real_ranks_go_the_ways_of_equal_ranks(cards):
    machine = {"gpus": 2, "network_cards": cards}
    machine["network"] = Link(0.5, latency=0.25, startup=3.0)
    machine["peer_link"] = Link(4.0, latency=0.5, startup=2.0)
    part = cards * 0.5 / 2
    assert sums_of_ranks(4, ([0, 1], [0, 2], [0, 1, 2, 3]), **machine) == [
        2 + 2 * 0.5 + 8 / 4,
        3 + 2 * 0.25 + 8 / part,
        3 + 2 * 0.25 + 4 * 0.5 + 12 / (2 * part),  # 2 of the 6 steps are between machines
    ]


@pytest.mark.parametrize("cards", [1, 2])
def test_ranks_of_a_machine_that_is_not_full_share_its_cards_among_fewer(cards):
    """Of 3 ranks on machines of 2 the third has all cards, a byte a second each, to itself."""
    machine = {"gpus": 2, "network_cards": cards, "network": Link(1.0), "peer_link": Link(100.0)}
    assert sums_of_ranks(3, ([0, 2], [0, 1, 2]), **machine) == [
        8 / (cards / 2),  # the half of the first decides
        10 / cards,  # 2 halves, and a whole
    ]
    with equal_ranks(5):
        assert seconds_of_sum(dist.new_group([0, 1, 4])) == 10 / cards
        assert seconds_of_sum(dist.new_group([0, 1, 2, 4])) == 12 / (cards / 2)
    fixed_gpus(1, **{**machine, "gpus": 4})
    with equal_ranks(7):
        assert seconds_of_sum(dist.new_group([0, 1, 4])) == pytest.approx(10 / (cards / 3))


@pytest.mark.parametrize(("gpus", "cards", "seconds"), [(4, 1, 16), (4, 4, 4), (8, 1, 0.07)])
def test_all_to_all_sends_the_parts_for_other_machines_through_the_cards(gpus, cards, seconds):
    """Of 8 bytes a rank of 8, 4 go to the other of two machines: 16 from each. A ring sends 7."""
    fixed_gpus(1, gpus=gpus, peer_link=Link(100.0), network_cards=cards, network=Link(1.0))
    x, y = room(8, "vgpu"), room(8, "vgpu")
    with equal_ranks(8):
        assert seconds_of(lambda: dist.all_to_all_single(y, x)) == pytest.approx(seconds)


def test_ranks_in_another_order_share_the_cards_of_full_machines():
    """Four ranks on the third and fourth of machines of 2 have half of a card each."""

    def program():
        fixed_gpus(8, gpus=2, peer_link=Link(100.0), network=Link(1.0))
        torch.vgpu.set_device(4 + dist.get_rank())
        return seconds_of_sum(a_group())

    assert job_of(4).run(program) == [12] * 4


# -- kernels beside a collective: NCCL keeps a multiprocessor for each 20 GB/s


def of_four_multiprocessors(seconds, rate):
    """Model a GPU whose kernels take so many seconds, and a link with so many bytes a second."""
    gpu = Fixed(seconds, peer_link=Link(rate), multiprocessors=4)
    virtual_gpus(1, model=Machine(gpu, host=0), values=False)
    return gpu


def beside(seconds, rate, number=1):
    """Return when kernels end of which the first begins at 1, beside a sum over two ranks to 8."""
    x = torch.empty(int(8 * rate), dtype=torch.uint8, device="vgpu")
    y = torch.empty(1, device="vgpu")
    begun, ends = end(), []
    with equal_ranks(2):
        work = dist.all_reduce(x, async_op=True)
        host_takes(1.0)
        for _ in range(number):
            y.sin()
            torch.vgpu.current_stream().synchronize()
            ends.append(clock() - begun)
        work.wait()
        assert end() - begun == max(8, *ends)
    return ends


@pytest.mark.parametrize(
    ("seconds", "rate", "ends"),
    [
        (3.0, 20e9, [5.0, 8.75, 11.75]),  # one of 4 is kept: 3/4 of the second is done at 8
        (6.0, 20e9, [8.75, 14.75]),  # 7 times 3/4 done at 8, and 3/4 of a second more
        (3.0, 10e9, [5.0, 8.75, 11.75]),  # a multiprocessor is not kept by halves
        (3.0, 21e9, [7.0, 10.5, 13.5]),  # two of 4
        (3.0, 80e9, [7.0, 10.5, 13.5]),  # never more than half
    ],
)
def test_a_kernel_that_begins_beside_a_collective_takes_longer(seconds, rate, ends):
    of_four_multiprocessors(seconds, rate)
    assert beside(seconds, rate, len(ends)) == pytest.approx(ends, rel=1e-9)


def test_a_kernel_that_began_before_a_collective_goes_on_as_it_was():
    of_four_multiprocessors(3.0, 20e9)
    x = torch.empty(int(160e9), dtype=torch.uint8, device="vgpu")
    with equal_ranks(2):
        torch.empty(1, device="vgpu").sin()
        with torch.vgpu.stream(torch.vgpu.Stream()):
            host_takes(1.0)
            work = dist.all_reduce(x, async_op=True)
        torch.vgpu.current_stream().synchronize()
        assert clock() == 3
        work.wait()
        assert end() == 9


def test_a_gpu_of_endless_multiprocessors_keeps_none_for_a_collective():
    virtual_gpus(1, model=Machine(Fixed(3.0, peer_link=Link(20e9)), host=0), values=False)
    assert beside(3.0, 20e9, 3) == [4, 7, 10]


# -- what a collective takes before its first step, and rings of several links


def test_a_collective_takes_the_startup_once_and_a_copy_does_not():
    link = Link(1.0, latency=0.25, startup=5.0)
    devices = fixed_gpus(2, peer_link=link, link=link)
    with equal_ranks(2):
        assert seconds_of_sum() == 5 + 2 * 0.25 + 8
        devices = fixed_gpus(2, peer_link=link, link=link)  # by a new clock
        with warnings.catch_warnings(action="error"):  # no other GPU than before
            assert seconds_of_sum() == 5 + 2 * 0.25 + 8
        x, begun = room(8, devices[0]), clock()
        with torch.vgpu.stream(torch.vgpu.Stream()):
            x.copy_(room(8), non_blocking=True)  # the other direction of the same link
        dist.send(x, 1)
        assert end() - begun == 5 + 0.25 + 8
    with equal_ranks(1):
        assert seconds_of_sum() == 0
    for move in (lambda: x.to(devices[1]), x.cpu):
        begun = end()
        move()
        torch.vgpu.synchronize(devices[1])
        assert end() - begun == 0.25 + 8


@pytest.mark.parametrize(("k", "seconds"), [(2, 2 + 2 * 0.5 + 8), (4, 2 + 6 * 0.5 + 12 / 3)])
def test_a_group_uses_the_links_to_its_other_ranks_at_the_same_time(k, seconds):
    """A byte a second to each of the others, 3 at most; the ring has 2 (k - 1) steps."""
    rings = Link(3.0, latency=0.5, startup=2.0)
    gpu = Fixed(peer_link=BYTE_A_SECOND, collective_link=rings)
    virtual_gpus(1, model=Machine(gpu, host=0))
    with equal_ranks(k):
        assert seconds_of_sum() == seconds
        assert seconds_of(lambda: dist.send(room(8, "vgpu"), 1)) == 8  # over one link
    for given in BYTE_A_SECOND, Link(2.0):  # who says so gets this one, even if it is the GPU's
        virtual_gpus(1, model=Machine(gpu, host=0), peer_link=given)
        with equal_ranks(2):
            assert seconds_of_sum() == 8 / given.bandwidth


def test_what_has_failed_fails_the_collectives_of_equal_ranks():
    fixed_gpus(1)
    with equal_ranks(2):
        x = torch.ones(4, device="vgpu")[torch.tensor([9], device="vgpu")]
        dist.all_reduce(x)
        for read in (torch.vgpu.synchronize, x.cpu):
            with pytest.raises(torch.AcceleratorError, match="index 9 is out of bounds"):
                read()
    with pytest.raises(KeyError), equal_ranks(2):
        raise KeyError
    assert not dist.is_initialized()


def equals(k, **figures):
    """Return a modelled GPU that stands for `k` equal ones, and the block in which it does."""
    (device,) = fixed_gpus(1, peer_link=BYTE_A_SECOND, **figures)
    return device, equal_ranks(k)


def test_a_wait_with_a_timeout_counts_from_its_call_and_a_loop_of_questions_ends():
    device, block = equals(2, launch=1.0)
    with block:
        work = dist.all_reduce(torch.ones(3, device=device), async_op=True)  # from 2 to 14 s
        host_takes(8)
        assert work.wait(timedelta(seconds=6)) and clock() == 14
        work = dist.all_reduce(room(1000, device), async_op=True)
        asked = next(i for i in range(3000) if work.is_completed())
    assert 500 < asked < 1100  # each question takes a launch, and the sum 1000 s


def collectives_of_equal_inputs(device, group=None):
    """Return what each collective gives a rank whose inputs are those of all others."""
    k, found = dist.get_world_size(group), []
    x, whole = (torch.arange(n) * 1.0 + 2 for n in (3, 3 * k))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX):
        found.append(x.to(device))
        dist.all_reduce(found[-1], op, group=group)
        found.append(x.to(device))
        dist.reduce_scatter(found[-1], list(whole.to(device).split(3)), op, group=group)
    found.append((x > 3).to(device))
    dist.all_reduce(found[-1], group=group)
    for send in (dist.broadcast, dist.reduce):
        found.append(x.to(device))
        send(found[-1], 0, group=group)
    parts = [room(12, device).view(torch.float32) for _ in range(3 * k)]
    dist.all_gather(parts[:k], x.to(device), group=group)
    dist.all_to_all(parts[k : 2 * k], list(whole.to(device).split(3)), group=group)
    is_root = dist.get_rank(group) == 0
    dist.gather(x.to(device), parts[2 * k :] if is_root else None, 0, group=group)
    found += parts if is_root else parts[: 2 * k]
    found.append(room(12, device).view(torch.float32))
    own = list(whole.to(device).split(3)) if is_root else None
    dist.scatter(found[-1], own, 0, group=group)
    return [each.tolist() for each in found]


@pytest.mark.parametrize("k", [2, 3])
def test_one_rank_gets_the_values_of_equal_ranks(k):
    def real():
        _, device, group = set_up()
        return collectives_of_equal_inputs(device, group)

    device, block = equals(k)
    with block:
        found = collectives_of_equal_inputs(device)
    assert found == job_of(k).run(real)[0]


def test_buckets_of_equal_ranks_are_summed_during_backward():
    device, block = equals(2, seconds=1.0, values=False)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(5)))  # 1 MiB
    X = torch.ones(1, 512, device=device)
    with block:
        ddp = DistributedDataParallel(net.to(device), bucket_cap_mb=2)
        for _ in range(2):  # after the first step buckets are built anew
            spans = start_recording()
            ddp(X).sum().backward()
            end()
            stop_recording(spans)
    sums = [span for span in spans if span.name == "all_reduce"]
    assert [span.num_bytes for span in sums] == [2**21, 2**21, 2**20]  # of 2 (k - 1) / k
    products = [span for span in spans if "mm" in span.name]
    assert sums[0].start < products[-1].start and sums[0].end > products[-1].end


def test_a_dropped_module_is_freed_and_the_next_group_may_be_larger():
    for k in (2, 1000):
        device, block = equals(k)
        with block:
            ddp = DistributedDataParallel(torch.nn.Linear(30, 30).to(device))
            ddp(torch.ones(4, 30, device=device)).sum().backward()
        del ddp
        gc.collect()
        assert torch.vgpu.memory_allocated(device) == 0


@pytest.mark.parametrize("k", [0, -1, 1.5, True])
def test_the_number_of_equal_ranks_and_their_clock_are_checked(k):
    _, block = equals(k)
    with pytest.raises(ValueError, match=f"got {k}"), block:
        pass
    virtual_gpus(1)
    with pytest.raises(RuntimeError, match="model=..."), equal_ranks(2):
        pass


# -- what is left behind


@in_ranks(2)
def test_simulations_and_groups_leave_no_threads_or_connections():
    def left():
        dist.barrier()
        gc.collect()
        wait_until(lambda: not keepers())
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def keepers():
        targets = "_welcome", "_serve", "_look_after", "_listen"
        return [t for t in threading.enumerate() if any(name in t.name for name in targets)]

    def use(times, then=lambda: None):
        for _ in range(times):
            _, device, group = set_up()
            dist.all_reduce(room(4, device), group=group)
            assert end() == 4
            then()
            dist.destroy_process_group(group)

    use(2)
    before = left()
    use(5)
    assert left() == before
    use(5, then=lambda: virtual_gpus(1))
    assert left() == before


# -- who may talk to the keeper


class Executed:
    """What leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_keeper_goes_on_whatever_is_sent_to_it_and_executes_nothing(tmp_path):
    keeper, evil = Keeper(1, timeout=1000), pickle.dumps(Executed(tmp_path / "executed"))
    stay = []  # connections that stay open
    for sent in (b"", b"x" * 1000, struct.pack("!i", 2**31 - 1), framed(evil), framed(b"[0]")):
        stay.append(socket.create_connection(("127.0.0.1", keeper.port)))
        stay[-1].sendall(sent)
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", keeper.port), authkey=b"wrong")
    for sent in (evil, b"{", b"[" * 10_000, b"1", b'"_grant"', b"null", b" " * 2**20 + b"0"):
        with Client(("127.0.0.1", keeper.port), authkey=keeper.secret) as stranger:
            with contextlib.suppress(ConnectionError):  # it may hang up before it has all
                stranger.send_bytes(sent)
            assert stranger.poll(20), sent[:20]
            with pytest.raises((EOFError, OSError)):
                stranger.recv_bytes()
    assert not keeper.ranks
    member = member_of(keeper.port, keeper.secret)
    key, link = ("a group", None, 7), (3.0, 0.1 + 0.2, 0.5)
    post = Post("all_reduce", 0.7, ("here",), link, (1.0, NEVER, 0.0), True)
    member.post(1.0, key, (0,), post)
    assert member.ask(NEVER) == [("meet", key, 0.7, Route(*link), True)]
    for line in member.connection, keeper.ranks[0].connection:
        with socket.socket(fileno=os.dup(line.fileno())) as tcp:  # which else takes 40 ms a message
            assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    member.connection.send_bytes(evil)  # it has lost its mind
    answers = []
    with in_thread(lambda: answers.extend([member.ask(5.0), member.ask(6.0)])):
        pass
    assert answers == [[("lost",)]] * 2
    assert keeper.ranks[0].ended
    assert not list(tmp_path.iterdir())
    for connection in stay:
        connection.close()


def framed(message):
    """Return a message as `multiprocessing.connection` writes it."""
    return struct.pack("!i", len(message)) + message


def test_the_keeper_listens_where_the_ranks_are_only(monkeypatch):
    keeper = Keeper(1, timeout=1000, address="127.0.0.2")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", keeper.port))
    Client(("127.0.0.2", keeper.port), authkey=keeper.secret).close()
    for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert timekeeper.own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert timekeeper.own_address() in ("127.0.0.1", "::1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(RuntimeError, match="MASTER_ADDR=127.0.0.1 .* of the 4 ranks"):
        timekeeper.own_address()
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert timekeeper.own_address() == "127.0.0.1"


def test_who_comes_later_does_not_prolong_the_wait_for_who_never_comes(keeper, monkeypatch):
    now = [0.0]
    clocks = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(timekeeper, "time", clocks)
    for number in (0, 1):
        post(keeper, number, "a", (0, 1, 2), 1.0)
        keeper.receive(number, "ask", 5.0, 0)
        now[0] += 600  # of the 1000 that a rank waits
    wait_until(lambda: keeper.ranks[0].connection.messages, 10)
    assert "rank 2 did not join" in heard(keeper, 0)[0][-1]
    heard(keeper, 1), post(keeper, 1, "b", (0, 1), 1.0), keeper.receive(1, "ask", 5.0, 1)
    now[0] += 1200
    wait_until(lambda: keeper.ranks[1].connection.messages, 10)
    assert "rank 0 did not join" in heard(keeper, 1)[0][-1]  # it waits no longer in what failed


def test_an_idle_rank_holds_up_nobody_before_the_first_time_asked_for(keeper):
    post(keeper, 0, "a", (0, 2), 1.0)
    post(keeper, 1, "b", (1, 2), 1.0)
    keeper.receive(0, "ask", NEVER, 0)
    keeper.receive(2, "idle")
    keeper.receive(0, "ask", 5.0, 0)
    keeper.receive(1, "ask", 9.0, 0)
    keeper.receive(2, "idle")
    assert (heard(keeper, 0), heard(keeper, 1)) == ([("go", 5.0)], [])


def test_the_keeper_stays_until_the_last_rank_has_left(monkeypatch):
    stayed, looks = [], []
    clocks = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: looks.append(time.sleep(s)))
    monkeypatch.setattr(timekeeper, "time", clocks)
    keeper = Keeper(3, timeout=1000)
    for number in (0, 1):
        keeper.join(number, Told())
    post(keeper, 0, "a", (0, 2), 1.0)
    keeper.receive(0, "ask", 5.0, 0)
    assert heard(keeper, 0) == []  # whoever has not come yet may do anything from 0 on
    for number in (0, 1):
        keeper.receive(number, "end")
    with in_thread(lambda: (keeper.wait_for_the_end(), stayed.append(True))):
        wait_until(lambda: stayed or keeper._lock._waiters and len(looks) > 2, 20)
        keeper.join(2, Told())
        keeper.receive(1, "end")
        wait_until(lambda: stayed or keeper._lock._waiters)
        assert not stayed
        keeper.receive(2, "end")
    assert stayed


@pytest.mark.parametrize("says", ["nothing", "no secret"])
def test_a_member_does_not_wait_for_ever_for_a_stopped_keeper(monkeypatch, says):
    """Such as that of a process that was stopped: its connections stay."""
    monkeypatch.setattr(timekeeper, "_PATIENCE_IF_BUSY", 0.1)
    secret, stay = b"known", []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)

        def stand_still():
            line = timekeeper.JsonConnection.over(server.accept()[0])
            if says == "nothing":
                deliver_challenge(line, secret)
                answer_challenge(line, secret)
            stay.append(line)

        keeper = server.getsockname()[1], secret
        with in_thread(stand_still):
            if says == "nothing":
                member = member_of(*keeper)
                member._timeout = 0.2
                assert [member.ask(5.0), member.ask(6.0)] == [[("lost",)]] * 2
            else:
                with pytest.raises(TimeoutError, match="no answer .* within 0.2 s"):
                    member_of(*keeper, seconds=0.2)
        stay[0].close()


def test_nodes_of_torchrun_on_one_machine_are_machines_of_the_model():
    """8 bytes among 2 ranks: 8 s over the link of a machine, 16 s over the network."""

    def work(nodes):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GROUP_RANK", str(dist.get_rank() % nodes))
            patch.setenv("LOCAL_WORLD_SIZE", str(2 // nodes))
            _, device, group = set_up(gpus=2, network=Link(0.5))
            dist.all_reduce(room(8, device), group=group)
            return end()

    assert [job_of(2).run(work, nodes) for nodes in (1, 2)] == [[8, 8], [16, 16]]


def test_a_collective_runs_at_the_least_bandwidth_and_the_longest_latency(keeper):
    for number, (link, network, host) in enumerate(
        [
            ((8.0, 0.1, 0.2), (1.0, 2.0, 5.0), "a"),
            ((4.0, 0.3, 0.1), (3.0, 1.0, 6.0), "a"),
            ((9.0, 0.2, 7.0), (9.0, 0.2, 0.0), "b"),
        ]
    ):
        for members in ((0, 1), (0, 1, 2)):
            if number in members:
                figures = "all_reduce", 1.0, host, link, network, True
                keeper.receive(number, "post", 1.0, members, members, figures)
    met = [message for message in heard(keeper, 1) if message[0] == "meet"]
    assert met == [
        ("meet", (0, 1), 1.0, Route(4.0, 0.3, 0.2), True),
        ("meet", (0, 1, 2), 1.0, Route(2.0, 0.3, 7.0, 2, between=2.0, part=1.0), True),
    ]
