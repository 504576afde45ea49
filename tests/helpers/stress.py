"""Interrupt programs on virtual GPUs at random moments, thousands of times; end at the first harm.

    PYTHONPATH=tests/helpers python -c "from stress import Stress; Stress().run(1500, seed=0)"

A round repeats one of the workloads of `stress_workloads.py` until a timer interrupts it, 0.2 to
60 ms later, within 1 ms as often as after 10 to 50, and sometimes twice, as by a user who presses
stop twice. Then both devices must synchronize, without an error; a fixed computation must be right;
and no byte of memory may be lost. Otherwise this process ends with status 1, and its last line
names the seed of the round. Where it hangs, or an interrupt was lost, it prints after `patience`
seconds what every thread does, and ends.
"""

import faulthandler
import gc
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter

import torch
from stress_workloads import MEMORY, WORKLOADS
from waiting import free_starting_threads


class TimeIsUp(Exception):
    """What a handler of SIGALRM may raise. No TimeoutError: that is an OSError, and linecache,
    which torch.manual_seed calls, takes any OSError for a file that is missing."""


class Alarm:
    """Interrupts this process once or twice, after a random time: by SIGINT, or by TimeIsUp."""

    def __init__(self, draw):
        self.raises = TimeIsUp if draw.random() < 0.1 else KeyboardInterrupt
        self.delay = 0.2e-3 * 300 ** draw.random()
        self.gap = draw.uniform(1e-6, 300e-6)
        self.twice = draw.random() < 0.25
        self.left = 0  # how many interrupts are still to come

    def start(self):
        self.left = 1 + self.twice
        signal.signal(signal.SIGALRM, self.strike)
        signal.setitimer(signal.ITIMER_REAL, self.delay, self.gap * self.twice)

    def stop(self):
        self.left = 0  # before a call, where a second one may strike
        signal.setitimer(signal.ITIMER_REAL, 0)

    def strike(self, number, frame):
        if not self.left:
            return
        self.left -= 1
        if self.raises is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C: it may be held back
        else:
            raise TimeIsUp


dropped = []  # interrupts that Python itself dropped in this round


def note_dropped(unraisable):
    """Note an interrupt that came as Python forgot a thread that has ended; print any other error
    that can not be raised."""
    if unraisable.object is threading._dangling._remove:
        dropped.append(unraisable.exc_type)
    else:
        sys.__unraisablehook__(unraisable)


def repeat(step, alarm):
    """Call `step` until it raises; return the type of what it raised, and its traceback.

    A second interrupt may strike while the first is dealt with.
    """
    try:
        try:
            alarm.start()
            go_on(step)
        except BaseException as error:
            alarm.stop()
            if is_of_threading(error, alarm):
                error = error.__context__
            return type(error), text_of(error)
    except alarm.raises as error:
        alarm.stop()
        return type(error), text_of(error)


def go_on(step):
    """Call `step` until an interrupt comes. This is a function of its own since no handler around a
    loop of Python 3.12 and 3.13 covers its last jump, see interrupts.py."""
    while not dropped:
        step()
    raise dropped[0]


def is_of_threading(error, alarm):
    """Return whether an interrupt became this error in Python's threading module.

    Its Condition leaves its lock as it should not where it is interrupted; and `Thread.start` whose
    thread has begun removes it a second time from those that have not.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    in_start = isinstance(error, KeyError) and frame.f_code.co_name == "start"
    return (
        (in_start or str(error) == "release unlocked lock")
        and frame.f_code.co_filename == threading.__file__
        and isinstance(error.__context__, alarm.raises)
    )


def text_of(error):
    """Return the last lines of the traceback of `error`."""
    return "".join(traceback.format_exception(error, chain=False)[-8:])


def compute(devices):
    """Return what a little computation gives on each device: 2048.

    The gradient of the sum of w @ w is 2 x 8 x 2 for each of the 64 elements of w.
    """
    results = []
    for device, other in (devices, devices[::-1]):
        w = torch.full((8, 8), 2.0, device=device, requires_grad=True)
        (w @ w).sum().backward()
        results.append(w.grad.to(other, non_blocking=True).sum().item())
    return results


def memory_in_use(devices, before, seconds):
    """Return the bytes in use on each device, once they are those from `before`, or after so many
    seconds: threads of nn.DataParallel that an interrupt left behind may take a moment."""
    begin = time.monotonic()
    while True:
        if time.monotonic() > begin + seconds / 2:
            free_starting_threads()
        gc.collect()
        now = [torch.vgpu.memory_allocated(device) for device in devices]
        if now == before or time.monotonic() > begin + seconds:
            return now
        time.sleep(0.05)  # leave Python to the threads


class Stress:
    """Two virtual GPUs, with all that the workloads need once done once."""

    def __init__(self, patience=20, workload=None):
        import d2lpar

        sys.unraisablehook = note_dropped
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a job in the background ignores it
        faulthandler.enable()
        warnings.simplefilter("ignore")
        self.patience = patience
        self.devices = d2lpar.virtual_gpus(2, memory=MEMORY)
        self.names = [workload] if workload else list(WORKLOADS)
        # what torch imports on first use stays broken when it is interrupted
        for name in self.names:
            step, verify = WORKLOADS[name](torch.vgpu, self.devices, random.Random(0))
            step()
            step()
            verify()
        del step, verify
        compute(self.devices)
        gc.collect()
        gc.freeze()  # what is there now: later collections take a moment only

    def run(self, interrupts, seed):
        """Play so many rounds; return how many there were of each workload, and how many "twice".

        Raises AssertionError at the first harm.
        """
        counts = Counter()
        for each in range(seed, seed + interrupts):
            draw = random.Random(each)
            name, alarm = draw.choice(self.names), Alarm(draw)
            before = memory_in_use(self.devices, None, 0)
            faulthandler.dump_traceback_later(self.patience, exit=True)
            try:
                self.interrupt(name, each, alarm)
                now = memory_in_use(self.devices, before, self.patience / 4)
                assert now == before, f"{now} bytes in use instead of {before}"
            except Exception as error:
                error.add_note(f"in {name}; again: run(1, seed={each})")
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
            counts[name] += 1
            counts["twice"] += alarm.twice
        return counts

    def interrupt(self, name, seed, alarm):
        """Interrupt a workload and check all but memory, which it holds."""
        dropped.clear()
        step, verify = WORKLOADS[name](torch.vgpu, self.devices, random.Random(seed))
        raised, where = repeat(step, alarm)
        assert raised is alarm.raises, f"no interrupt, but\n{where}"
        try:
            for device in self.devices:  # as a user would
                torch.vgpu.set_stream(torch.vgpu.default_stream(device))
            torch.vgpu.set_device(self.devices[0])
            torch.set_grad_enabled(True)
            verify()
            for device in self.devices:
                torch.vgpu.synchronize(device)
            results = compute(self.devices)
            assert results == [2048, 2048], f"{results} instead of 2048"
        except Exception as error:
            error.add_note(f"It was interrupted here:\n{where}")
            raise
