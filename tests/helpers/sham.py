"""A stand-in for `torch.vgpu` on plain CPU tensors, where nothing is asynchronous.

It gives the right answers to compare with, and it shows what the harness itself does: with no
fault nothing may be reported, and each fault of FAULTS must be.
"""

import gc
import os
import signal
import sys
import threading
import time

import torch

FAULTS = ("none", "hang", "stuck", "death", "leak", "wrong", "error", "lost")
fault = "none"  # what the next `synchronize` or `_sleep` does
leaked = []


def deafen():
    """Hold all interrupts off from now on, in threads that are still to come, too."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGALRM])


class Stream:
    """A stream whose work is done as soon as it is issued."""

    def __init__(self, device=None):
        self.device = device

    def record_event(self):
        return Event()

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


class Event:
    """An event that has happened as soon as it is recorded."""

    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        self.time = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.time - self.time) * 1e3


device = stream = Stream  # as context managers
current_stream = default_stream = Stream


def set_stream(stream):
    pass


def set_device(device):
    pass


def current_device():
    return 0


def manual_seed(seed):
    pass


def synchronize(device=None):
    """Return at once, unless a fault is due."""
    if fault == "hang":
        threading.Event().wait()
    elif fault == "stuck":
        time.sleep(1000)
    elif fault == "death":
        os.abort()
    elif fault == "leak":
        leaked.append(torch.zeros(1000))
    elif fault == "wrong":
        torch.Tensor.relu = torch.Tensor.abs
    elif fault == "error":
        raise torch.AcceleratorError("an error that nobody caused")


def _sleep(seconds):
    try:
        time.sleep(seconds)
    except BaseException:
        global fault
        if fault != "lost":
            raise
        fault = "none"


def memory_allocated(device=None):
    """Return the bytes of all tensors that were made since `gc.freeze` and can be reached."""
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return sum(each.untyped_storage().nbytes() for each in tensors)


def set_up():
    """Return this module and two devices; from then on tensors can be pinned without a GPU."""
    torch.Tensor.pin_memory = torch.Tensor.clone
    torch.Tensor.record_stream = lambda tensor, stream: None
    return sys.modules[__name__], [torch.device("cpu")] * 2
