"""Whose time on the cores is whose: by the counters of Linux, and by made-up ones."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from gates import in_threads

from vgpu import other_programs
from vgpu.other_programs import CpuReading, CpuShares, measure_cpu_shares, read_cpu_times

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these counters")


@pytest.fixture(autouse=True)
def can_tell(monkeypatch):
    """Let it look also where the machine of the tests has a quota, and anew in every test."""
    monkeypatch.setattr(other_programs, "can_tell", lambda num_cores: True)
    monkeypatch.setattr(other_programs, "_last", None)


# The counters of Linux. Other programs run beside the tests, so that only one side can be asserted.

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
SECONDS = 0.2


def test_a_program_of_another_session_is_noticed():
    start = read_cpu_times()
    orphan = f"import os, sys\nif os.fork(): sys.exit()\nos.setsid()\n{BURN.format(SECONDS)}"
    with subprocess.Popen([sys.executable, "-c", orphan], stdout=subprocess.PIPE) as process:
        assert process.wait() == 0  # of its parent: it is not our descendant any more
        process.stdout.read()  # until it has ended, too
    end = read_cpu_times()
    assert end.others - start.others > 0.7 * SECONDS


def seconds_of_others():
    """Return the seconds that our descendants have had."""
    return other_programs.ticks_of_process(os.getpid()) / 100 - time.process_time()


def test_descendants_of_any_thread_are_ours_also_once_they_have_ended():
    start, found = seconds_of_others(), []
    child = [sys.executable, "-c", BURN.format(SECONDS)]
    code = f"import subprocess; subprocess.run({child!r}); print(flush=True); input()"

    def work():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
            process.stdout.readline()  # the child has burnt them, and its parent stays
            found.append(seconds_of_others() - start)
            process.communicate(b"\n")

    in_threads([work])
    found.append(seconds_of_others() - start)
    assert min(found) > 0.9 * SECONDS


# Made-up counters, in which nothing happens by chance.


@pytest.fixture
def counters(monkeypatch, tmp_path):
    """Three cores, of which we may use two, and ticks that a test sets."""

    class Counters:
        now = 100.0
        user, nice, system, steal = 1000, 0, 0, 0  # of core 2
        own = 0

        def go_on(self, seconds, **ticks):
            """Let time pass and add ticks to some counters."""
            self.now += seconds
            for name, more in ticks.items():
                setattr(self, name, getattr(self, name) + more)
            noise = int(1000 * self.now)
            core = f"{self.user} {self.nice} {self.system} {noise} {noise} {noise} {noise}"
            lines = [
                f"cpu  {noise} 0 0 0 0 0 0 0 0 0",
                "cpu0 50 0 0 9 0 0 0 0 0 0",
                f"cpu1 {noise} 0 0 0 0 0 0 {noise} 0 0",
                f"cpu2 {core} {self.steal} {noise} 0",
                f"intr {noise} {noise}",
            ]
            (tmp_path / "stat").write_text("\n".join(lines))
            self.process(os.getpid(), f"{self.own} 0 0 0", "7 8")

        def process(self, pid, ticks, children=""):
            """Write the files of a process with two threads; the second has the children."""
            for task, text in ((pid, ""), (pid + 1, children)):
                folder = tmp_path / f"{pid}" / "task" / f"{task}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "children").write_text(text)
            stat = f"{pid} (a) b 1 (c) S 1 2 3 4 5 6 7 8 9 10 {ticks} 20 0 1 0 99"
            (tmp_path / f"{pid}" / "stat").write_text(stat)

    counters = Counters()
    monkeypatch.setattr(other_programs, "PROC", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    fake = SimpleNamespace(monotonic=lambda: counters.now, sleep=counters.go_on)
    monkeypatch.setattr(other_programs, "time", fake)
    counters.process(7, "1 2 3 4", "9")  # 8 has ended meanwhile
    counters.process(9, "0 0 0 0")
    counters.go_on(0)
    return counters


def test_what_is_not_ours_is_of_other_programs(counters):
    taken, before = CpuShares(), read_cpu_times()
    counters.process(9, "10 20 30 40")
    counters.go_on(2.0, user=100, nice=40, system=60, steal=32, own=20)
    taken.add(before)
    # 200 ticks ran, 120 of them ours; 2 s of two cores have 400 ticks
    assert taken.shares() == pytest.approx((0.2, 0.08))
    assert taken.sentences() == ["other programs took 20 % of the cores"]
    assert taken.sentences(0.05)[1:] == ["the hypervisor took 8 % of the cores"]
    counters.go_on(2.0, own=1000)  # ticks of ours that the cores count later
    taken.add(before)
    assert taken.shares()[0] == 0.0


def test_a_quarter_more_time_is_noticed_and_a_tenth_is_not(counters):
    """A program with all cores takes 1 / (1 - share) times as long: 1.11 and 1.25 times."""
    before = read_cpu_times()
    for ticks, noticed in ((40, False), (80, True)):
        taken = CpuShares()
        counters.go_on(2.0, user=ticks)
        before = taken.add(before)
        assert bool(taken.sentences()) is noticed


def test_nothing_is_said_of_less_than_a_fifth_of_a_second(counters):
    taken, before = CpuShares(), read_cpu_times()
    for said in (False, False, True):
        counters.go_on(0.08, user=16)
        before = taken.add(before)
        assert bool(taken.sentences()) is said
    taken.clear()
    assert taken.sentences() == []


def test_a_look_within_a_tick_costs_nothing(counters):
    first = read_cpu_times()
    counters.go_on(0.005, user=100)
    assert read_cpu_times() is first
    counters.go_on(0.006)
    assert read_cpu_times().others == pytest.approx(first.others + 1.0)


def test_other_cores_than_before_say_nothing(counters, monkeypatch):
    taken, before = CpuShares(), read_cpu_times()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    counters.go_on(2.0)
    after = taken.add(before)
    assert after.cores == {1} and taken.seconds == 0


def test_a_short_look_at_what_others_take_now(counters):
    fake = other_programs.time
    fake.sleep = lambda seconds: counters.go_on(seconds, user=24)
    assert measure_cpu_shares().sentences() == ["other programs took 60 % of the cores"]
    assert counters.now == pytest.approx(100.2)
    fake.sleep = lambda seconds: counters.go_on(seconds, user=41)  # ticks are rough
    assert measure_cpu_shares().sentences() == ["other programs took 100 % of the cores"]
    fake.sleep = lambda seconds: counters.go_on(seconds, own=2)
    assert measure_cpu_shares().shares() == (0, 0)


@pytest.mark.parametrize("where", ["another system", "a rank"])
def test_where_the_counters_do_not_tell(where, monkeypatch):
    if where == "another system":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(other_programs, "time", SimpleNamespace(sleep=pytest.fail))
    assert read_cpu_times() is None
    assert measure_cpu_shares().sentences(0) == []
    taken = CpuShares()
    assert taken.add(CpuReading(0.0, frozenset({0}), 0.0, 0.0)) is None and taken.seconds == 0


def test_a_quota_below_the_cores_and_a_kernel_without_lists_of_children(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(other_programs, "PROC", str(tmp_path))
    children = tmp_path / "self" / "task" / f"{os.getpid()}" / "children"
    for cores, listed, known in ((4, False, False), (4, True, True), (3, True, False)):
        monkeypatch.setattr(other_programs, "cores_of_this_process", lambda cores=cores: cores)
        if listed:
            children.parent.mkdir(parents=True, exist_ok=True)
            children.touch()
        other_programs.can_tell.cache_clear()
        assert other_programs.can_tell(4) is known
    other_programs.can_tell.cache_clear()
