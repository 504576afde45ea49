"""An idle machine, as far as it can be told: before a chapter is executed, and afterwards."""

import math
import statistics
import time

import torch

from d2lpar.chapters.scaling.workloads import in_plain_threads
from vgpu import cores_of_this_process
from vgpu.other_programs import Taken, look, taken_now

SHARE = 0.05  # of the cores, that other programs or the hypervisor may take
GAIN = 1.8  # of two threads over one
PATIENCE = 600.0  # seconds
LOOK = 3.0


def disturbances(taken, gain):
    """List what keeps the machine from being idle, as sentences; none if it is.

    Args:
        taken: what others take of the cores, a `vgpu.other_programs.Taken`.
        gain: of two threads over one.
    """
    found = taken.sentences(SHARE)
    if gain < GAIN:
        found.append(f"two threads do {gain:.2f} times the work of one, and not {GAIN} or more")
    return found


def wait(say, patience=PATIENCE):
    """Wait until the machine is idle.

    Args:
        say: a function that gets a sentence for the one who waits, twice a minute.
        patience: seconds.

    Returns:
        "" when it is, otherwise what still disturbs it after so long.
    """
    start, said = time.monotonic(), float("-inf")
    while found := disturbances(taken_now(LOOK), gain_of_two_threads()):
        now = time.monotonic()
        if now - start > patience:
            return f"after {patience / 60:.0f} minutes: {'; '.join(found)}"
        if now - said > 30:
            say(f"waiting for an idle machine: {'; '.join(found)}")
            said = now
    return ""


def gain_of_two_threads(seconds=0.3, rounds=3):
    """Return how many matrix products two threads do in the time in which one thread does one.

    It is the median of rounds in which one thread and two take turns, and nan on a single core.
    """
    if cores_of_this_process() < 2:
        return math.nan
    matrices, gains = [torch.rand(500, 500) for _ in range(2)], []
    for _ in range(rounds):
        alone = _products_of_threads(matrices[:1], seconds)
        gains.append(_products_of_threads(matrices, seconds) / alone)
    return statistics.median(gains)


def _products_of_threads(matrices, seconds):
    """Return how many products threads do together, one thread for each matrix."""
    counts = []
    works = [lambda X=X: counts.append(_products(X, seconds)) for X in matrices]
    in_plain_threads(*works)
    return sum(counts)


def _products(X, seconds):
    """Return how many products a thread does in some seconds."""
    count, end, Y = 0, time.perf_counter() + seconds, torch.empty_like(X)
    while time.perf_counter() < end:
        torch.mm(X, X, out=Y)  # new memory for each product would make threads wait for Linux
        count += 1
    return count


class Watch:
    """What disturbs a chapter while it runs."""

    def __init__(self):
        self._taken, self._look = Taken(), look()

    def note(self):
        """Take account of what has passed; before its kernel, and what that started, ends."""
        self._look = self._taken.add(self._look)

    def verdict(self):
        """Return a phrase on what others took, what two threads gain, and what that means."""
        others, stolen = (100 * share for share in self._taken.shares())
        gain = gain_of_two_threads()
        machine = "a busy machine" if disturbances(self._taken, gain) else "an idle machine"
        return (
            f"on {machine} (others took {others:.0f} % of the cores, the hypervisor "
            f"{stolen:.0f} %; two threads gained {gain:.2f})"
        )
