"""What a thread has chosen: its current device, and its current stream on each device."""

import threading
import weakref
from bisect import bisect_right
from operator import itemgetter

from vgpu.private.autograd import sequence_number
from vgpu.runtime.interrupts import one_step


class _Thread(threading.local):
    """What a thread has chosen.

    Attributes:
        device: index of the current device.
        current: a `CurrentStreams`, or None as long as only default streams were current.
        entered: for each `with stream` or `with device` under way, the device and the stream (or
            None) that were current before it.
    """

    device = 0
    current = None
    entered = ()


thread = _Thread()


class CurrentStreams:
    """The streams that a thread issues its work to, and since when it does.

    Autograd numbers the operators of a thread. From the numbers at which the current stream of a
    device changed, backward finds the stream that the forward of an operator was issued to.
    """

    MAX_CHANGES = 100_000

    def __init__(self):
        self.unjoined = None  # a `BackwardStreams` whose streams these do not wait for yet
        self._current = {}  # index of a device -> stream
        self._changes = {}  # index of a device -> list of (number, weak reference to a stream)

    def stream(self, device):
        if self.unjoined is not None:
            self._join()
        return self._current.get(device.index, device.default_stream)

    def after(self, stream, op):
        """Return the ops that `op` waits for besides the ops of its own stream: none."""
        return ()

    def _join(self):
        """Make these streams wait for the streams of a backward pass that has ended.

        It runs when a stream is next asked for: an interrupt could prevent it at the pass's end.
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
        if changes and changes[-1][0] == change[0]:  # autograd made no operator since
            changes[-1] = change
        else:
            changes.append(change)
            if len(changes) > self.MAX_CHANGES:
                self._changes[index] = changes[self.MAX_CHANGES // 2 :]
        self._current[index] = stream

    def at(self, device, number):
        """Return the stream of `device` that was current when autograd made operator `number`.

        It is the default stream in place of one that nothing refers to any more.
        """
        changes = self._changes.get(device.index, ())
        place = bisect_right(changes, number, key=itemgetter(0))
        return (changes[place - 1][1]() if place else None) or device.default_stream


@one_step
def set_entered(index, entered):
    """Set the calling thread's device, and its `with` blocks under way."""
    thread.device = index
    thread.entered = entered


def leave():
    """End the innermost `with` block of the calling thread: restore what was current before it."""
    entered = thread.entered
    try:
        _leave_innermost()
    finally:
        if thread.entered is entered:  # an interrupt came first
            _leave_innermost()


def leave_all():
    """End all `with` blocks of the calling thread: restore what was current before them.

    An interrupt that comes just as a block begins to end leaves it entered.
    """
    while thread.entered:
        _leave_innermost()


def _leave_innermost():
    if thread.entered:
        rest, (index, stream) = thread.entered[:-1], thread.entered[-1]
        if stream is not None:
            set_stream(stream)
        set_entered(index, rest)


def set_stream(stream):
    """Issue later work of the calling thread on the device of `stream` to `stream`."""
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
