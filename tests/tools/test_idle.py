"""When a machine counts as idle, what is told of one that does not, and that waiting ends."""

import itertools
import math
import threading
from types import SimpleNamespace

import idle
import pytest
import torch

from vgpu.other_programs import CpuShares


@pytest.mark.parametrize(
    ("others", "stolen", "gain", "reasons"),
    [
        (0.04, 0.04, 1.8, []),
        (0.06, 0, 2, ["other programs took 6 % of the cores"]),
        (0, 0.06, 2, ["the hypervisor took 6 % of the cores"]),
        (0, 0, 1.7, ["two threads do 1.70 times the work of one, and not 1.8 or more"]),
    ],
)
def test_when_a_machine_is_idle(others, stolen, gain, reasons):
    taken = CpuShares()
    taken.seconds, taken.others, taken.stolen = 1.0, others, stolen
    assert idle.disturbances(taken, gain) == reasons


def test_one_core_has_no_two_threads(monkeypatch):
    monkeypatch.setattr(idle, "cores_of_this_process", lambda: 1)
    monkeypatch.setattr(idle, "_products", pytest.fail)
    gain = idle.gain_of_two_threads()
    assert math.isnan(gain) and idle.disturbances(CpuShares(), gain) == []


@pytest.fixture
def waiting(monkeypatch):
    """A clock that goes on with each look at the machine; return what will be seen, and said."""
    now, seen, said = [0.0], [], []

    def measure_cpu_shares(seconds):
        now[0] += seconds

    def disturbances(taken, gain):
        return seen.pop(0) if len(seen) > 1 else seen[0]

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(idle, "measure_cpu_shares", measure_cpu_shares)
    monkeypatch.setattr(idle, "gain_of_two_threads", lambda: 2.0)
    monkeypatch.setattr(idle, "disturbances", disturbances)
    return seen, said


def test_waiting_ends_when_the_machine_is_idle(waiting):
    seen, said = waiting
    seen += 15 * [["A computes"]] + [[]]
    assert idle.wait(said.append) == ""
    assert said == 2 * ["waiting for an idle machine: A computes"]  # in 45 s


def test_waiting_ends_after_ten_minutes(waiting):
    seen, said = waiting
    seen += [["A computes", "B computes"]]
    assert idle.wait(said.append) == "after 10 minutes: A computes; B computes"
    assert len(said) < 25


def test_the_gain_of_two_threads_is_that_of_the_median_round(monkeypatch):
    counts = [10, 10, 10, 10, 9, 9, 10, 1, 1]  # one alone, then two: they gain 2, 1.8 and 0.2
    monkeypatch.setattr(idle, "cores_of_this_process", lambda: 2)
    monkeypatch.setattr(idle, "_products", lambda seconds: counts.pop(0))
    assert idle.gain_of_two_threads() == 1.8
    monkeypatch.undo()
    monkeypatch.setattr(idle, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert idle._products(3) == 2  # at 1 and at 2; at 3 the time is over


def test_both_threads_compute_at_the_same_time(monkeypatch):
    calls, both = itertools.count(), threading.Barrier(2)

    def products(seconds):
        if next(calls):  # the first one computes alone
            both.wait(timeout=60)  # broken unless the other one is under way
        return 3

    monkeypatch.setattr(idle, "_products", products)
    monkeypatch.setattr(idle, "cores_of_this_process", lambda: 2)
    assert idle.gain_of_two_threads(rounds=1) == 2


def test_each_of_the_two_threads_computes_on_one_core(monkeypatch):
    """Otherwise one thread alone takes both cores, and two gain nothing."""
    product, seen = torch.mm, set()

    def mm(*args, **kwargs):
        seen.add(torch.get_num_threads())
        return product(*args, **kwargs)

    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(idle, "cores_of_this_process", lambda: 2)  # one core has no gain
    idle.gain_of_two_threads(seconds=0.01, rounds=1)
    assert seen == {1} and torch.get_num_threads() == before
