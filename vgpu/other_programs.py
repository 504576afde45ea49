"""The share of this process's CPU cores that other programs take.

They make measured times longer. Linux counts the time of each core and of each process; the time of
the cores minus that of this process and its descendants is that of others. There is no result on
other systems; in a container with a CPU quota below its cores; in a rank, which would count the
other ranks; and for less than 0.2 s, because the counters advance in ticks of 10 ms.
"""

import contextlib
import functools
import os
import sys
import time
from typing import NamedTuple

from vgpu import cores_of_this_process

NOTICEABLE = 1 - 1 / 1.15  # without this share, a program on all cores takes 15 % longer
MIN_SECONDS = 0.2  # of a period with a result
TICK = 0.01
PROC = "/proc"


class CpuReading(NamedTuple):
    """A reading of the counters, in seconds of one core."""

    time: float  # of the wall clock
    cores: frozenset  # usable by this process
    others: float  # up to a constant
    stolen: float  # by the hypervisor, for other machines


class CpuShares:
    """The shares of the cores that others took, over the added periods of time."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.seconds = self.others = self.stolen = 0.0

    def add(self, before):
        """Add the period since `before`, a `CpuReading` or None; return the one at its end."""
        after = before and read_cpu_times()
        if after and after.cores == before.cores:
            self.seconds += after.time - before.time
            self.others += (after.others - before.others) / len(after.cores)
            self.stolen += (after.stolen - before.stolen) / len(after.cores)
        return after

    def shares(self):
        """Return the shares of other programs and of the hypervisor; 0 if unknown."""
        if self.seconds < MIN_SECONDS:
            return 0.0, 0.0
        return tuple(min(max(0.0, x / self.seconds), 1.0) for x in (self.others, self.stolen))

    def sentences(self, limit=NOTICEABLE):
        """Return a sentence for each share above `limit`: "other programs took 60 % of ..."."""
        shares = zip(("other programs", "the hypervisor"), self.shares(), strict=True)
        return [f"{who} took {100 * x:.0f} % of the cores" for who, x in shares if x > limit]


while_timed = CpuShares()  # during timers and timelines since the last `compare`, which reports it


def measure_cpu_shares(seconds=MIN_SECONDS):
    """Measure for some seconds; return a `CpuShares`."""
    taken, before = CpuShares(), read_cpu_times()
    if before:
        time.sleep(seconds)
    taken.add(before)
    return taken


_last = None


def read_cpu_times():
    """Return a reading of the counters, or None where they cannot be used.

    It takes a fraction of a millisecond; within a tick, the last one is returned again.
    """
    global _last
    if sys.platform != "linux" or "RANK" in os.environ:
        return None
    cores, now = frozenset(os.sched_getaffinity(0)), time.monotonic()
    if not can_tell(len(cores)):
        return None
    if _last is None or now - _last.time >= TICK:
        busy, stolen = _ticks_of_cores(cores)
        _last = CpuReading(now, cores, TICK * (busy - ticks_of_process(os.getpid())), TICK * stolen)
    return _last


@functools.cache
def can_tell(num_cores):
    """Return whether Linux lists the children of threads, and no CPU quota applies."""
    listed = os.path.exists(f"{PROC}/self/task/{os.getpid()}/children")
    return listed and cores_of_this_process() == num_cores


def _ticks_of_cores(cores):
    """Return the ticks that programs ran on some cores, and those that the hypervisor took."""
    busy = stolen = 0
    for line in _read(f"{PROC}/stat").splitlines()[1:]:  # the first has sums of all cores
        name, *ticks = line.split()
        if not name.startswith(b"cpu"):
            break
        if int(name[3:]) in cores:
            busy += sum(map(int, ticks[:3]))  # user, nice, system
            stolen += sum(map(int, ticks[7:8]))
    return busy, stolen


def ticks_of_process(pid):
    """Return the ticks of a process, its reaped children and its descendants."""
    ticks = sum(map(int, _read(f"{PROC}/{pid}/stat").rpartition(b")")[2].split()[11:15]))
    folder = f"{PROC}/{pid}/task"
    with contextlib.suppress(OSError):  # the process has ended
        for task in os.listdir(folder):
            for child in _read(f"{folder}/{task}/children").split():
                ticks += ticks_of_process(int(child))
    return ticks


def _read(path):
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:  # the process or thread has ended
        return b""
