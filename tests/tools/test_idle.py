"""When a machine counts as idle, what is told of one that does not, and that waiting ends."""

from types import SimpleNamespace

import idle
import pytest

from vgpu.other_programs import CpuShares


@pytest.mark.parametrize(
    ("others", "stolen", "reasons"),
    [
        (0.04, 0.04, []),
        (0.06, 0, ["other programs took 6 % of the cores"]),
        (0, 0.06, ["the hypervisor took 6 % of the cores"]),
    ],
)
def test_when_a_machine_is_idle(monkeypatch, others, stolen, reasons):
    taken = CpuShares()
    taken.seconds, taken.others, taken.stolen = 1.0, others, stolen
    monkeypatch.setattr(idle, "measure_cpu_shares", lambda seconds: taken)
    monkeypatch.setattr(idle, "PATIENCE", -1.0)
    assert idle.wait(print).partition(": ")[2] == "; ".join(reasons)


@pytest.fixture
def waiting(monkeypatch):
    """A clock that goes on with each look at the machine; return what will be seen, and said."""
    now, seen, said = [0.0], [], []

    def measure_cpu_shares(seconds):
        now[0] += seconds
        found = seen.pop(0) if len(seen) > 1 else seen[0]
        return SimpleNamespace(sentences=lambda share: found)

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(idle, "measure_cpu_shares", measure_cpu_shares)
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
