"""Streams, `vgpu.Stream` in programs: queues of ops, which can wait for each other."""

import threading

from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import check_not_forked, check_same_clock, under_way

# Serializes issuing threads. Reentrant, because the garbage collector may run a destructor that
# issues work while it is held.
_issuing = threading.RLock()


class StreamQueue:
    """A queue of ops on one device, which run in the order of issue.

    Attributes:
        last: the op issued last, or None.
        waits: {op that the next op waits for: time of that call}; or None.
    """

    __slots__ = ("device", "index", "priority", "last", "waits", "__weakref__")

    def __init__(self, device, index, priority=0):
        self.device = device
        self.index = index
        self.priority = priority
        self.last = None
        self.waits = None

    def issue(self, op, after=(), then=None):
        """Append an op to this stream and return it.

        The calling thread blocks while QUEUE_LIMIT ops of the engine are under way. An exception
        before the op is handed over leaves no trace of it.

        It also waits for the ops `after`, of other streams; later ops of the stream `then` wait for
        it. Raises RuntimeError in a fork, or if no thread can be started for the engine.
        """
        check_not_forked()
        engine = op.engine
        if engine.issued - engine.finished >= scheduler.QUEUE_LIMIT:
            engine.wait_for_room()
        if not engine.started:
            engine.start()
        memory = self.device.memory
        time_of_issue = engine.clock.time_of_issue
        if memory.recorded:  # freed memory is held by ops issued before the free, not by this one
            memory.note_freed()
        op.stream = self
        op.after = after
        generator = op.generator
        hand_over = engine.hand_over
        no_waits = None if then is None else {}
        with _issuing:
            if then is not None:
                then.waits = then._waits_under_way()
            op.issued = issued = time_of_issue(op, self)
            if generator is not None:
                op.kwargs["generator"].manual_seed(generator.next_seed())
                offset = generator.offset + 1
            # One step from here on, see interrupts.py: stores without a new container, a C call. It
            # is no function of its own: each operator would pay for the call.
            op.previous = self.last
            op.waits = self.waits
            self.last = op
            self.waits = None
            if then is not None:
                if then.waits is None:
                    then.waits = no_waits
                then.waits[op] = issued
            if generator is not None:
                generator.offset = offset
            engine.issued += 1
            hand_over(op)
        return op

    def tail(self):
        """Return the ops to wait for until this stream is idle."""
        check_not_forked()
        # In this order: another thread's `issue` between them moves `waits` to its op, `last`.
        waits, last = self.waits, self.last
        ops = (last, *(waits or ()))
        return tuple(op for op in ops if op is not None and under_way(op))

    def wait_for(self, ops):
        """Make later ops of this stream wait for `ops`; RuntimeError if one has another clock."""
        check_not_forked()
        now = scheduler.clock.now()
        waits = {op: now for op in ops if under_way(op) and op.stream is not self}
        if waits:
            for op in waits:
                check_same_clock(self.device, op.stream.device)
            with _issuing:
                self.waits = self._waits_under_way()
                self.waits.update(waits)

    def _waits_under_way(self):
        """Return `waits`, at each multiple of 64 without the ops that are done: none may leak."""
        waits = self.waits or {}
        if len(waits) % 64 or scheduler.is_recording():  # a recording shows all of them
            return waits
        return {op: time for op, time in waits.items() if under_way(op)}
