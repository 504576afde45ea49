"""`torch.cuda.nvtx`: records the ranges that a program marks, for the trace of `vgpu run`.

torch's own `nvtx.range` calls the functions that are replaced here.
"""

import threading
import warnings
from itertools import count

import torch

from vgpu import Span
from vgpu.private.patching import replace
from vgpu.recording.chrome_trace import ANY_THREAD
from vgpu.runtime import scheduler

_CPU = torch.device("cpu")
_here = threading.local()  # `open`: the ranges that the thread has pushed, (text, start)
_started = {}  # number -> (text, start) of a range of `range_start`
_numbers = count(1)


def replace_nvtx():
    """Make `torch.cuda.nvtx` record ranges, and `emit_nvtx` warn."""
    replace(
        torch.cuda.nvtx,
        range_push=range_push,
        range_pop=range_pop,
        range_start=range_start,
        range_end=range_end,
        mark=mark,
    )
    emit_nvtx = torch.autograd.profiler.emit_nvtx
    replace(emit_nvtx, __enter__=_enter, __exit__=lambda self, *exception: False)


def range_push(msg):
    """Begin a nested range in the calling thread; return its depth."""
    _here.open = (*getattr(_here, "open", ()), (msg, scheduler.clock.now()))
    return len(_here.open) - 1


def range_pop():
    """End the innermost range of the calling thread; return its depth, -1 for none."""
    ranges = getattr(_here, "open", ())
    if ranges:
        _here.open = ranges[:-1]
        _record("range", _row(), *ranges[-1])
    return len(ranges) - 1


def range_start(msg):
    """Begin a range that any thread may end; return its number."""
    number = next(_numbers)
    _started[number] = msg, scheduler.clock.now()
    return number


def range_end(range_id):
    """End a range, given by the number that `range_start` returned."""
    if range_id in _started:
        _record("range", ANY_THREAD, *_started.pop(range_id))


def mark(msg):
    _record("mark", _row(), msg, scheduler.clock.now())


def _row():
    return f"ranges, {threading.current_thread().name}"


def _record(kind, row, name, start):
    if scheduler.is_recording():
        end = start if kind == "mark" else scheduler.clock.now()
        scheduler.record([Span(str(name), kind, _CPU, 0, row, start, end)])


def _enter(self):
    """`emit_nvtx.__enter__`: a warning, because its ranges are for CUDA profilers."""
    if self.enabled:
        warnings.warn(
            "emit_nvtx does nothing on virtual GPUs, because CUDA profilers cannot attach: use "
            "vgpu run --trace, which shows every operator",
            stacklevel=2,
        )
    return self
