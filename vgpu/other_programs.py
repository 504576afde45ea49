"""What other programs take of the CPU cores that this process may use.

They make measured times longer. Linux counts the time of each core and of each process: that of the
cores, less that of this process and its descendants, is what others took. Nothing is said where the
counters do not tell: on other systems; in a container that may use less time than its cores have;
in a rank, which would count its fellow ranks among the others; and of less than 0.2 s, because the
counters go on in ticks of 10 ms.
"""

import contextlib
import functools
import os
import sys
import time
from typing import NamedTuple

from vgpu import cores_of_this_process

NOTICED = 1 - 1 / 1.15  # a program that could use all cores takes 15 % longer without this share
LEAST = 0.2  # seconds
TICK = 0.01
PROC = "/proc"


class Look(NamedTuple):
    """What had been counted at a moment, in seconds of one core."""

    time: float  # of the wall clock
    cores: frozenset  # that this process may use
    others: float  # less a constant
    stolen: float  # by the hypervisor, for other machines


class Taken:
    """Which shares of the cores others took, over the stretches of time that were added."""

    def __init__(self):
        self.clear()

    def clear(self):
        """Forget what was added."""
        self.seconds = self.others = self.stolen = 0.0

    def add(self, before):
        """Add the time since `before`, a result of `look`, and return the look that ends it."""
        after = before and look()
        if after and after.cores == before.cores:
            self.seconds += after.time - before.time
            self.others += (after.others - before.others) / len(after.cores)
            self.stolen += (after.stolen - before.stolen) / len(after.cores)
        return after

    def shares(self):
        """Return the shares of other programs and of the hypervisor; 0 where it cannot tell."""
        if self.seconds < LEAST:
            return 0.0, 0.0
        return tuple(min(max(0.0, x / self.seconds), 1.0) for x in (self.others, self.stolen))

    def sentences(self, limit=NOTICED):
        """Return one for each share above `limit`: "other programs took 60 % of the cores"."""
        shares = zip(("other programs", "the hypervisor"), self.shares(), strict=True)
        return [f"{who} took {100 * x:.0f} % of the cores" for who, x in shares if x > limit]


while_timed = Taken()  # what `compare` will tell of the timers and timelines before it


def taken_now(seconds=LEAST):
    """Look for some seconds and return what others take, as `Taken`."""
    taken, before = Taken(), look()
    if before:
        time.sleep(seconds)
    taken.add(before)
    return taken


_last = None


def look():
    """Return a `Look` at the counters, or None where they do not tell.

    It takes a fraction of a millisecond, so one that is not older than a tick is returned again.
    """
    global _last
    if sys.platform != "linux" or "RANK" in os.environ:
        return None
    cores, now = frozenset(os.sched_getaffinity(0)), time.monotonic()
    if not _can_tell(len(cores)):
        return None
    if _last is None or now - _last.time >= TICK:
        busy, stolen = _ticks_of_cores(cores)
        _last = Look(now, cores, TICK * (busy - _ticks_of_process(os.getpid())), TICK * stolen)
    return _last


@functools.cache
def _can_tell(num_cores):
    """Return whether Linux lists the children of threads, and no CPU quota applies."""
    listed = os.path.exists(f"{PROC}/self/task/{os.getpid()}/children")
    return listed and cores_of_this_process() == num_cores


def _ticks_of_cores(cores):
    """Return how long programs ran on some cores, and how long the hypervisor kept these."""
    busy = stolen = 0
    for line in _read(f"{PROC}/stat").splitlines()[1:]:  # the first has the sums of all cores
        name, *ticks = line.split()
        if not name.startswith(b"cpu"):
            break
        if int(name[3:]) in cores:
            busy += sum(map(int, ticks[:3]))  # user, nice, system
            stolen += sum(map(int, ticks[7:8]))
    return busy, stolen


def _ticks_of_process(pid):
    """Return how long a process, the children it has waited for and its descendants have run."""
    ticks = sum(map(int, _read(f"{PROC}/{pid}/stat").rpartition(b")")[2].split()[11:15]))
    folder = f"{PROC}/{pid}/task"
    with contextlib.suppress(OSError):  # it has ended
        for task in os.listdir(folder):
            for child in _read(f"{folder}/{task}/children").split():
                ticks += _ticks_of_process(int(child))
    return ticks


def _read(path):
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:  # the process or thread has ended
        return b""
