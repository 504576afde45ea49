"""Check whether the machine is idle, before a chapter is executed."""

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from vgpu import cores_of_this_process, set_thread_count
from vgpu.other_programs import measure_cpu_shares

SHARE = 0.05  # maximum share of CPU time of other programs or the hypervisor
GAIN = 1.8  # minimum speed-up of two threads
PATIENCE = 600.0  # maximum wait, in seconds
LOOK = 3.0  # duration of a measurement, in seconds


def disturbances(taken, gain):
    """List the reasons why the machine is not idle, as sentences.

    `taken`: a `vgpu.other_programs.CpuShares`; `gain`: the speed-up of two threads.
    """
    found = taken.sentences(SHARE)
    if gain < GAIN:
        found.append(f"two threads do {gain:.2f} times the work of one, and not {GAIN} or more")
    return found


def wait(say, stopped=lambda: False):
    """Wait until the machine is idle.

    Args:
        say: a function that receives a progress message, every 30 s.
        stopped: a function that returns whether to wait no longer.

    Returns:
        "" if the machine is idle, otherwise the reasons why it is not.
    """
    start, said = time.monotonic(), float("-inf")
    while found := disturbances(measure_cpu_shares(LOOK), gain_of_two_threads()):
        now = time.monotonic()
        if stopped() or now - start > PATIENCE:
            return f"after {(now - start) / 60:.0f} minutes: {'; '.join(found)}"
        if now - said > 30:
            say(f"waiting for an idle machine: {'; '.join(found)}")
            said = now
    return ""


def gain_of_two_threads(seconds=0.3, rounds=3):
    """Return the speed-up of two threads in matrix products, nan on a single core.

    It is the median of several rounds, each with one thread and then with two.
    """
    if cores_of_this_process() < 2:
        return math.nan
    gains = []
    with ThreadPoolExecutor(2, initializer=set_thread_count, initargs=(1,)) as pool:
        for _ in range(rounds):
            alone = pool.submit(_products, seconds).result()
            gains.append(sum(pool.map(_products, [seconds, seconds])) / alone)
    return statistics.median(gains)


def _products(seconds):
    """Return the number of products of one thread in some seconds."""
    X = torch.rand(500, 500)
    count, end, Y = 0, time.perf_counter() + seconds, torch.empty_like(X)
    while time.perf_counter() < end:
        torch.mm(X, X, out=Y)  # allocating new memory would make threads wait for Linux
        count += 1
    return count
