"""Threads: the current device and streams of each, and the frames they are in."""

import gc
import sys
import threading
import weakref
from bisect import bisect_right
from operator import itemgetter

from vgpu.private.autograd import sequence_number
from vgpu.runtime.interrupts import one_step


class _Thread(threading.local):
    """Current device and streams of a thread."""

    device = 0  # index of the current device
    current = None  # a `CurrentStreams`, or None while only default streams have been current
    entered = ()  # the device and the stream (or None) before each active `with` block of one


thread = _Thread()


class CurrentStreams:
    """The current streams of a thread, and their history.

    Autograd numbers the operators of a thread. The numbers at which the current stream of a device
    changed tell backward the stream of an operator's forward.
    """

    MAX_CHANGES = 100_000

    def __init__(self):
        self.unjoined = None  # a `BackwardStreams`, for whose streams these do not yet wait
        self._current = {}  # index of a device -> stream
        self._changes = {}  # index of a device -> list of (number, weak reference to a stream)

    def stream(self, device):
        if self.unjoined is not None:
            self.join()
        return self._current.get(device.index, device.default_stream)

    def after(self, stream, op):
        """Return the ops of other streams that `op` must wait for: none."""
        return ()

    def join(self):
        """Make these streams wait for the streams of a finished backward pass.

        Also when a stream is next used: an interrupt may have prevented it at the end of the pass.
        """
        streams, used = self.unjoined, tuple(self.unjoined.used)
        for stream in used:
            current = self._current.get(stream.device.index, stream.device.default_stream)
            current.wait_for(stream.tail())
        if self.unjoined is streams:
            self.unjoined = None

    def set(self, stream):
        index, change = stream.device.index, (sequence_number(), weakref.ref(stream))
        changes = self._changes.setdefault(index, [])
        if changes and changes[-1][0] == change[0]:  # no new operator since the last change
            changes[-1] = change
        else:
            changes.append(change)
            if len(changes) > self.MAX_CHANGES:
                self._changes[index] = changes[self.MAX_CHANGES // 2 :]
        self._current[index] = stream

    def at(self, device, number):
        """Return the stream of `device` that was current at autograd's operator `number`.

        If that stream no longer exists, return the default stream.
        """
        changes = self._changes.get(device.index, ())
        index = bisect_right(changes, number, key=itemgetter(0))
        return (changes[index - 1][1]() if index else None) or device.default_stream


def current_frames():
    """Return the innermost frame of each thread, by the thread's number.

    Python 3.11 may deadlock if it collects garbage in `sys._current_frames` (gh-106883).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


@one_step
def set_entered(index, entered):
    thread.device = index
    thread.entered = entered


def leave():
    """Leave the innermost `with` block of the calling thread: restore its device and stream."""
    entered = thread.entered
    try:
        _leave_innermost()
    finally:
        if thread.entered is entered:  # an interrupt came first
            _leave_innermost()


def leave_all():
    """Leave all `with` blocks of the calling thread, which an interrupt may have left entered."""
    while thread.entered:
        _leave_innermost()


def _leave_innermost():
    if thread.entered:
        rest, (index, stream) = thread.entered[:-1], thread.entered[-1]
        if stream is not None:
            set_stream(stream)
        set_entered(index, rest)


def set_stream(stream):
    """Make `stream` the calling thread's current stream on its device."""
    if thread.current is None:
        thread.current = CurrentStreams()
    thread.current.set(stream)


def issue_op(op, device):
    """Queue an op on the calling thread's current stream of `device`."""
    current = thread.current
    if current is None:
        device.default_stream.issue(op)
    else:
        stream = current.stream(device)
        stream.issue(op, current.after(stream, op))
