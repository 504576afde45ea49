"""When an op runs: streams, what waits for what, and which op is ready first.

Time is that of the clock in force. By the wall clock an op runs when its engine, a thread, comes to
it. While GPUs are modelled, `simulation` keeps the time: an op that is `done` has been simulated,
and may end later than the host's `now`.

The host hands an op over in one step that an interrupt cannot tear (`Stream.issue`). From then on
only threads that no interrupt reaches touch it: the thread of its engine *admits* it, which counts
the earlier ops that it waits for, and the thread that finishes the last of these makes it ready.
Of the ops that are ready, an engine takes the one that became ready first (`ReadyQueue`). What an
op does, and how long that takes, is not decided here but by its engine (`engines.py`).

Why a step cannot be torn: Python raises KeyboardInterrupt between bytecodes of the main thread, but
only where a Python function begins, at a jump backwards, and after a call. Stores that follow each
other, and the call of a C function after them, form one step: either all of it has happened or
nothing. No other thread takes over within it, and no destructor runs, since it makes no container.
"""

import threading
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter

from .spans import Span

error_name = "vgpu"  # what errors call the devices, "CUDA" where programs call them "cuda"
QUEUE_LIMIT = 1024  # ops under way on an engine; CUDA, too, lets the host run about this far ahead

# Reentrant, because the garbage collector may run a destructor that issues work while it is held.
_issuing = threading.RLock()  # threads that issue take turns
_ordering = threading.RLock()  # guards `done`, `missing`, `dependents` and `waiters` of all ops
simulation = None  # the `Simulation` that keeps the time while GPUs are modelled
_recordings = ()  # the lists that finished ops are appended to
_watch = None  # function that is called with each op that has run
_forks = []  # not empty in a fork of a process with virtual GPUs
_here = threading.local()  # `engine` is set in the thread of an engine


class Op:
    """A unit of work: a kernel, a copy, or a change of an engine's settings.

    Attributes:
        name: for the record.
        kind: "kernel", "copy" or "setting".
        engine: what runs it.
        stream: where it was issued; set by `Stream.issue`.
        work: function of the op that does the work.
        plan: the `Plan` of a kernel; or None.
        args, kwargs, out: what `work` reads and where it leaves its results.
        seconds: how long a copy keeps its engine at least; None for as long as the work takes.
            In a simulation exactly as long, and never None.
        num_bytes, source, target: the bytes that a copy moves, and its devices.
        receiver: the engine for copies between devices of its target; or None.
        generator: the random numbers that it draws from, in the order of issue; or None.
        issued, ready, start, end: seconds of the clock.
        error: what the work raised.
        done: whether the op has finished.
        previous: the op before it in its stream, which it waits for.
        after: ops given at its issue, which it waits for.
        waits: ops that its stream was told to wait for, each with the time at which it was told.
        drawn: the op that drew from its generator before it, which it waits for.
        number: its place among the ops that its engine has admitted.
        missing: how many of the ops that it waits for are not done.
        dependents: ops that wait for this one.
        waiters: functions that wake the threads that wait for this one.
    """

    error = num_bytes = source = target = seconds = generator = None
    stream = previous = waits = drawn = waiters = None
    plan = receiver = None
    after = ()
    ready = start = end = 0.0
    missing = number = 0
    done = False

    def __init__(self, name, kind, engine, work, args=(), kwargs=None, out=None):
        self.name = name
        self.kind = kind
        self.engine = engine
        self.work = work
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.dependents = []

    def spans(self):
        """Yield what a recording keeps of this op: itself, and waits of its stream before it."""
        stream = self.stream
        device = stream.device.torch_device
        free_at = 0.0 if self.previous is None else self.previous.end
        for earlier, issued in (self.waits or {}).items():
            start = max(issued, free_at)
            end = max(start, earlier.end)
            yield Span("wait", "wait", device, stream.index, "stream", start, end, issued)
        if self.kind != "setting":
            yield Span(
                self.name,
                self.kind,
                device,
                stream.index,
                self.engine.name,
                self.start,
                self.end,
                self.issued,
                self.num_bytes or 0,
                self.source,
                self.target,
            )


class Stream:
    """A queue of ops on one device that run in the order in which they were issued.

    Attributes:
        device: the `Device` that it is on.
        index: its number there.
        last: the op that was issued last, or None.
        waits: ops that the next op shall wait for, each with the time at which the stream was told
            to; or None.
    """

    __slots__ = ("device", "index", "last", "waits", "__weakref__")

    def __init__(self, device, index):
        self.device = device
        self.index = index
        self.last = None
        self.waits = None

    def issue(self, op, after=(), then=None):
        """Queue an op behind the ops of this stream and return it.

        The calling thread waits while QUEUE_LIMIT ops of the engine are under way. An exception
        before the op is handed over leaves no trace of it.

        Args:
            op: the op.
            after: ops of other streams that it waits for, too.
            then: another stream, whose later ops wait for this op; or None.

        Raises:
            RuntimeError: this process is a fork, or no thread can be started for the engine.
        """
        if _forks:
            check_process()
        engine = op.engine
        if engine.issued - engine.finished >= QUEUE_LIMIT:
            engine.wait_for_room()
        if not engine.started:
            engine.start()
        memory = self.device.memory
        simulated_by = engine.simulation
        if memory.recorded:  # freed memory is held by the ops before the free, not by this one
            memory.note_freed()
        op.stream = self
        op.after = after
        generator = op.generator
        hand_over = engine.hand_over
        no_waits = None if then is None else {}
        with _issuing:
            if then is not None:
                then.waits = then._waits_under_way()
            issued = perf_counter() if simulated_by is None else simulated_by.launch(op, self)
            op.issued = issued
            # One step from here on, see above: stores that make no container, then a C call.
            op.previous = self.last
            op.waits = self.waits
            self.last = op
            self.waits = None
            if then is not None:
                if then.waits is None:
                    then.waits = no_waits
                then.waits[op] = issued
            if generator is not None:
                op.drawn = generator.last
                generator.last = op
            engine.issued += 1
            hand_over(op)
        return op

    def tail(self):
        """Return the ops to wait for until all that was issued to this stream has finished."""
        check_process()
        with _issuing:
            ops = (self.last, *(self.waits or ()))
        return tuple(op for op in ops if op is not None and under_way(op))

    def wait_for(self, ops):
        """Let all later ops of this stream wait for `ops`.

        Raises:
            RuntimeError: an op under way keeps another clock.
        """
        check_process()
        told = now()
        waits = {op: told for op in ops if under_way(op) and op.stream is not self}
        if waits:
            for op in waits:
                check_clocks(self.device, op.stream.device)
            with _issuing:
                self.waits = self._waits_under_way()
                self.waits.update(waits)

    def _waits_under_way(self):
        """Return `waits`; each time it has grown by 64, without the ops that are done.

        A stream that is told to wait again and again, and is given no op, would otherwise keep all
        of them.
        """
        waits = self.waits or {}
        if len(waits) % 64 or _recordings:  # a recording asks for all of them
            return waits
        return {op: told for op, told in waits.items() if under_way(op)}


class ReadyQueue:
    """The ops issued to one engine, of which `take` gives the one that became ready first.

    Attributes:
        arrivals: the ops that were handed over and are not admitted yet. None among them only
            wakes the engine.
        hand_over: function, in C, that adds an op to them.
        issued: how many ops were handed over.
        finished: how many of them are done.
        simulation: None: it keeps to the wall clock.
        ending: whether `take` shall return None when it is woken.
    """

    simulation = None

    def __init__(self):
        self.arrivals = SimpleQueue()
        self.hand_over = self.arrivals.put
        self.issued = self.finished = 0
        self.ending = False
        self._ready = []  # heap of (ready time, number, op)
        self._number = 0
        self._held_back = []  # functions that wake the threads that wait for room

    def take(self):
        """Wait for a ready op; return the one that became ready first, or None when it ends."""
        ready, get, size = self._ready, self.arrivals.get, self.arrivals.qsize
        while True:
            if ready and not size():
                return heappop(ready)[2]
            op = get()
            if op is None:
                if self.ending:
                    return None
            elif self._admit(op):
                if not ready and not size():
                    return op
                heappush(ready, (op.ready, op.number, op))

    def _admit(self, op):
        """Count the ops that `op` waits for; return whether there are none, so that it is ready."""
        op.ready = op.issued
        self._number = op.number = self._number + 1
        previous = op.previous
        if not (op.after or op.waits or op.drawn):  # true of most ops; no lock is needed
            if previous is None:
                return True
            if previous.done:
                if previous.end > op.ready:
                    op.ready = previous.end
                return True
            if previous.engine is self:  # this thread runs it, so it cannot finish meanwhile
                previous.dependents.append(op)
                op.missing = 1
                return False
        return admit(op)

    def finish(self, op):
        """Note that `op` has run; make the ops that waited for it ready, and wake the threads."""
        ready, waiters = complete(op)
        for dependent in ready:
            queue = dependent.engine
            heappush(queue._ready, (dependent.ready, dependent.number, dependent))
            if queue is not self:
                queue.arrivals.put(None)
        for wake in waiters or ():
            wake()
        self.finished += 1
        if self._held_back and self.issued - self.finished <= QUEUE_LIMIT // 2:
            while self._held_back:
                self._held_back.pop()()

    def wait_for_room(self):
        """Block the calling thread until half of QUEUE_LIMIT is free.

        Raises:
            RuntimeError: it is the thread of an engine.
        """
        check_thread()
        gate = closed_gate()
        self._held_back.append(gate.release)
        if self.issued - self.finished >= QUEUE_LIMIT:
            gate.acquire()


def complete(op):
    """Note that an op has run, and record it.

    Returns:
        A list of the ops that waited for it last and are ready now, and a list, or None, of the
        functions that wake the threads that wait for it.
    """
    if _recordings:
        record(op.spans())
    if _watch is not None:
        _watch(op)
    op.work = op.args = op.kwargs = op.out = op.plan = None
    op.previous = op.waits = op.drawn = op.generator = None
    op.after = ()
    with _ordering:
        op.done = True
        dependents, op.dependents = op.dependents, None
        waiters, op.waiters = op.waiters, None
        ready = []
        for dependent in dependents:
            if op.end > dependent.ready:
                dependent.ready = op.end
            dependent.missing -= 1
            if dependent.missing == 0:
                ready.append(dependent)
    return ready, waiters


def admit(op):
    """Let `op` wait for the ops before it that are not done; return whether it is ready."""
    op.ready = op.issued
    with _ordering:
        for earlier in (op.previous, *op.after, *(op.waits or ()), op.drawn):
            if earlier is None:
                continue
            if earlier.done:
                op.ready = max(op.ready, earlier.end)
            else:
                earlier.dependents.append(op)
                op.missing += 1
        return op.missing == 0


def now():
    """Return the seconds of the clock in force, for the calling thread."""
    return perf_counter() if simulation is None else simulation.now()


def under_way(op):
    """Return whether an op has not ended yet, as far as the calling thread knows.

    One that a simulation has not come to counts as under way; see `catch_up`.
    """
    if not op.done:
        return True
    return simulation is not None and op.engine.simulation is simulation and op.end > now()


def catch_up():
    """Let a simulation come to the calling thread's `now`, so that `under_way` is exact."""
    if simulation is not None:
        simulation.catch_up()


def poll():
    """Do `catch_up`; asking costs the host of a simulation some time."""
    if simulation is not None:
        simulation.poll()


def closed_gate():
    gate = threading.Lock()
    gate.acquire()
    return gate


def wait(op, device):
    """Block the calling thread until an op has run; an interrupt ends the wait, not the op.

    Args:
        op: the op.
        device: the torch.device that a recording shows for the wait.

    Raises:
        RuntimeError: this process is a fork, or the calling thread is that of an engine.
    """
    if not under_way(op):
        return
    check_process()
    check_thread()
    if op.engine.simulation is not None:
        op.engine.simulation.wait(op, device)
        return
    gate, waiters, started = closed_gate(), [], perf_counter()
    with _ordering:
        if op.done:
            return
        if op.waiters is None:
            op.waiters = waiters
        op.waiters.append(gate.release)
    try:
        gate.acquire()
    finally:
        record_wait(device, started, perf_counter())


def check_clocks(device, other):
    """Raise RuntimeError unless both devices, `Device`s, are modelled or neither is."""
    if (device.model is None) != (other.model is None):
        raise RuntimeError(
            f"{device.torch_device} and {other.torch_device} keep two clocks: virtual_gpus was "
            "interrupted, or one of them is not in use any more; call it again"
        )


def record(spans):
    """Append spans to all recordings under way."""
    spans = tuple(spans)
    for recording in _recordings:
        recording.extend(spans)


def record_wait(device, start, end):
    """Record that the host waited for `device`."""
    if _recordings:
        record([Span("synchronize", "wait", device, 0, "host", start, end, start)])


def check_thread():
    """Raise RuntimeError in the thread of an engine, where a wait would never end."""
    if getattr(_here, "engine", None) is not None:
        raise RuntimeError(
            "a destructor that waits for a virtual GPU was run by the garbage collector in one of "
            "the threads that do its work: call what it does where you drop the object"
        )


def note_engine(engine):
    """Note that the calling thread does the work of `engine`."""
    _here.engine = engine


def wait_all(ops, device):
    """Block the calling thread until all of `ops` have run, as `wait` does."""
    for op in ops:
        wait(op, device)


def start_recording(recording=None):
    """Return a list to which a `Span` is appended for each op that ends, until `stop_recording`.

    The seconds of the spans are those of `now`.

    Args:
        recording: what shall be extended by the spans in place of a new list. The threads that do
            the work of devices call its `extend`.
    """
    global _recordings
    recording = [] if recording is None else recording
    with _ordering:
        _recordings = (*_recordings, recording)
    return recording


def stop_recording(recording):
    """Stop appending to `recording`; synchronize before, or the ops that still run are missing.

    Raises:
        ValueError: `recording` is not a recording under way.
    """
    global _recordings
    with _ordering:
        rest = tuple(other for other in _recordings if other is not recording)
        if len(rest) == len(_recordings):
            raise ValueError("this list is not a recording under way")
        _recordings = rest


def watch(function):
    """Let a function be called with each op that has run, by the thread that ran it; or None."""
    global _watch
    _watch = function


def check_process():
    """Raise RuntimeError, as CUDA does, in a fork of a process with virtual GPUs."""
    if _forks:
        raise RuntimeError(
            f"Cannot re-initialize {error_name} in forked subprocess. To use {error_name} with "
            "multiprocessing, you must use the 'spawn' start method"
        )


def in_fork():
    """Return whether this process is a fork of one with virtual GPUs."""
    return bool(_forks)


def forgive_fork():
    """Let a fork use virtual GPUs after all: those of the process before it had done nothing."""
    _forks.clear()


note_fork = partial(_forks.append, True)  # a function in C: no interrupt can come in it
