"""The process that `stress.py` interrupts: it runs a workload, is interrupted, and checks.

It reads a round from standard input, a line of JSON, and answers with lines of JSON: "begin" when
it may be interrupted, "caught" when it was, with where, and "checked" with what was wrong then.
Signals are held off except between the first two. Where it hangs it prints what every thread does,
and ends.
"""

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from unittest import mock

import torch
from stress_workloads import INTERRUPTED, MEMORY, WORKLOADS
from waiting import free_starting_threads


class TimeIsUp(Exception):
    """What the handler of SIGALRM raises. No TimeoutError: that is an OSError, and linecache, which
    torch.manual_seed calls, takes any OSError for a file that is missing."""


struck = []  # where time was up in this round
dropped = []  # interrupts that Python itself dropped in this round


def time_out(number, frame):
    struck.append(f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}\n")
    raise TimeIsUp


def note_dropped(unraisable):
    """Note an interrupt that came as Python forgot a thread that has ended; print any other error
    that can not be raised."""
    if unraisable.object is threading._dangling._remove:
        dropped.append(unraisable.exc_type)
    else:
        sys.__unraisablehook__(unraisable)


def ignore(number, frame):
    """Take a signal that comes when it is held off."""


HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGALRM: time_out}
RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: TimeIsUp}


def repeat(step, number, began):
    """Call `step` until it raises; return the type of what it raised, and its text.

    The signal `number` is taken from the call of `began` on, and held off on return. It may come
    twice, so a second one may strike while the first is dealt with.
    """
    try:
        try:
            signal.signal(number, HANDLERS[number])
            began()
            go_on(step)
        except BaseException as error:
            signal.signal(number, ignore)
            if is_of_threading(error):
                error = error.__context__
            return type(error), text_of(error)
    except RAISED[number] as error:
        signal.signal(number, ignore)
        return type(error), text_of(error)


def go_on(step):
    """Call `step` until an interrupt comes. This is a function of its own since no handler around a
    loop of Python 3.12 and 3.13 covers its last jump, see interrupts.py."""
    while not dropped:
        step()
    raise dropped[0]


def is_of_threading(error):
    """Return whether an interrupt became this error in Python's threading module.

    Its Condition leaves its lock as it should not where it is interrupted; and `Thread.start` whose
    thread has begun removes it a second time from those that have not.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    in_start = isinstance(error, KeyError) and frame.f_code.co_name == "start"
    return (
        (in_start or str(error) == "release unlocked lock")
        and frame.f_code.co_filename == threading.__file__
        and isinstance(error.__context__, tuple(RAISED.values()))
    )


def text_of(error):
    """Return the last lines of the traceback of `error`."""
    return "".join(traceback.format_exception(error, chain=False)[-8:])


def check(problems, name, function, *args):
    """Return what `function` returns, or add to `problems` what it raises."""
    try:
        return function(*args)
    except Exception as error:
        problems.append(f"{name}: {text_of(error)}")


def answer(accel, devices, sides):
    """Return what a fixed little computation gives, in whole numbers: exact in any order."""
    numbers = []
    for device, other, side in zip(devices, devices[::-1], sides, strict=True):
        x = (torch.arange(48.0).reshape(6, 8) % 5).to(device)
        w = (torch.arange(32.0).reshape(8, 4) % 3 - 1).to(device).requires_grad_()
        loss = (x @ w).relu().pow(2).sum()
        loss.backward()
        moved = w.grad.to(other, non_blocking=True)
        main = accel.current_stream(other)
        side.wait_stream(main)
        with accel.stream(side):
            product = moved.t() @ moved
            moved.record_stream(side)
        main.wait_stream(side)
        product.record_stream(main)
        numbers.append([loss.item(), w.grad.tolist(), product.tolist()])
    return numbers


def answer_of_cpu():
    """Return what `answer` gives on the CPU, which has no streams."""
    with mock.patch.object(torch.Tensor, "record_stream"):
        return answer(mock.MagicMock(), [torch.device("cpu")] * 2, [mock.MagicMock()] * 2)


def fail():
    raise torch.AcceleratorError("an error that nobody caused")


leaked = []
FAULTS = {  # what `synchronize` does
    "hang": threading.Event().wait,
    "stuck": lambda: time.sleep(1000),
    "death": os.abort,
    "leak": lambda: leaked.append(torch.zeros(1000, device="vgpu:0")),
    "wrong": lambda: setattr(torch.Tensor, "relu", torch.Tensor.abs),
    "error": fail,
}


def do_harm(fault):
    """Let `synchronize` have a fault, or, if it is "lost", `_sleep` lose an interrupt."""
    synchronize, issue_sleep = torch.vgpu.synchronize, torch.vgpu._sleep

    def synchronize_badly(device=None):
        FAULTS[fault]()
        synchronize(device)

    def sleep_on(seconds):
        try:
            time.sleep(seconds)
        except BaseException:
            torch.vgpu._sleep = issue_sleep

    if fault == "lost":
        torch.vgpu._sleep = sleep_on
    else:
        torch.vgpu.synchronize = synchronize_badly


class Program:
    """Virtual GPUs, with all that the workloads need once done once."""

    def __init__(self, tell, patience, fault, names):
        import d2lpar

        self.tell = tell
        self.patience = patience
        self.wanted = answer_of_cpu()
        self.devices = d2lpar.virtual_gpus(2, memory=MEMORY)
        self.accel = torch.vgpu
        self.sides = [torch.vgpu.Stream(device) for device in self.devices[::-1]]
        # what torch imports on first use stays broken when it is interrupted
        for name in names:
            step, verify = WORKLOADS[name](self.accel, self.devices, random.Random(0))
            step()
            step()
            verify()
        del step, verify
        answer(self.accel, self.devices, self.sides)
        gc.collect()
        gc.freeze()  # what is there now: later collections take a moment only
        if fault:
            do_harm(fault)

    def round(self, workload, seed, number):
        """Play one round and tell what came of it."""
        before = self.allocated()
        self.watch(6 * self.patience)  # this process ends when nobody interrupts it any more
        problems = []
        self.interrupted(workload, seed, number, problems)
        leaked = check(problems, "memory_allocated", self.leaked, before) or 0
        faulthandler.cancel_dump_traceback_later()
        self.tell("checked", problems=problems, leaked=leaked)

    def interrupted(self, workload, seed, number, problems):
        """Run a workload until it is interrupted, and check all but memory, which it holds."""
        step, verify = WORKLOADS[workload](self.accel, self.devices, random.Random(seed))
        struck.clear()
        dropped.clear()
        raised, text = repeat(step, number, lambda: self.tell("begin"))
        text += "".join(struck)
        self.tell("caught" if raised is RAISED[number] else "raised", text=text)
        self.watch(self.patience)
        self.reset()
        check(problems, "what was interrupted", verify)
        for device in self.devices:
            check(problems, f"synchronize {device}", self.accel.synchronize, device)
        check(problems, "a fixed computation", self.compute)

    def watch(self, seconds):
        """Print what every thread does and end this process after so many seconds."""
        faulthandler.dump_traceback_later(seconds, exit=True)

    def reset(self):
        """Choose the default streams, the first device and gradients, as a user would."""
        for device in self.devices:
            self.accel.set_stream(self.accel.default_stream(device))
        self.accel.set_device(self.devices[0])
        torch.set_grad_enabled(True)

    def compute(self):
        given = answer(self.accel, self.devices, self.sides)
        assert given == self.wanted, f"{given} instead of {self.wanted}"

    def allocated(self):
        gc.collect()
        return [self.accel.memory_allocated(device) for device in self.devices]

    def leaked(self, before):
        """Return by how much memory stays off `before`, its bytes, once threads that an interrupt
        left behind (those of nn.DataParallel) have ended."""
        begin = time.monotonic()
        late, deadline = begin + self.patience / 8, begin + self.patience / 4
        while (now := self.allocated()) != before and time.monotonic() < deadline:
            if time.monotonic() > late:
                free_starting_threads()
            time.sleep(0.01)
        return sum(abs(a - b) for a, b in zip(now, before, strict=True))


def main(patience, fault, workload):
    """Play the rounds that standard input asks for; `fault` is None, "lost" or one of `FAULTS`."""
    channel = os.dup(1)
    os.dup2(2, 1)  # what others print is no answer
    for number in HANDLERS:
        signal.signal(number, ignore)
    if fault == "stuck":  # interrupts are held off, in threads that are still to come, too
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLERS)
    sys.unraisablehook = note_dropped
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")

    def tell(event, **what):
        os.write(channel, (json.dumps({"event": event, **what}) + "\n").encode())

    names = [workload] if workload in INTERRUPTED else list(INTERRUPTED)
    program = Program(tell, patience, fault, names)
    tell("ready")
    for line in sys.stdin:
        program.round(**json.loads(line))
