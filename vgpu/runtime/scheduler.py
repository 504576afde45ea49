"""When an op runs: what waits for what, and which op is ready first.

Times are read from the clock in force, `clock`. On the `WallClock` an op runs when its engine, a
thread, comes to it. While GPUs are modelled, a `Simulation` keeps the time: an op that is `done`
has been simulated, and may end later than the host's `now`.

The host hands an op over in one step that an interrupt cannot tear (`streams.py`). From then on
only threads that no interrupt reaches touch it: its engine's thread *admits* it, which counts the
earlier ops that it waits for, and the thread that finishes the last of these makes it ready. Of the
ready ops, an engine takes the one that became ready first (`ReadyQueue`). What an op does, and how
long that takes, is up to its engine (`engines.py`).
"""

import contextlib
import sys
import threading
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter

from vgpu.recording.spans import Span

error_name = "vgpu"  # what errors call the devices, "CUDA" where programs call them "cuda"
SWITCH_INTERVAL = 1e-4  # seconds
QUEUE_LIMIT = 1024  # ops under way on an engine; CUDA, too, lets the host run about this far ahead

_ordering = threading.RLock()  # guards `done`, `missing`, `dependents` and `waiters` of all ops
_recordings = ()  # the lists that finished ops are appended to
_forks = []  # not empty in a fork of a process with virtual GPUs
_here = threading.local()  # `engine` is set in the thread of an engine
_deaths = []  # (what died, its exception) of threads that no longer do the work of devices
LIVENESS_SECONDS = 1.0  # how often a host that waits looks whether these threads are alive
at_long_wait = None  # function that a host calls when it has waited for twice as long


class WallClock:
    """The clock of virtual GPUs whose engines are threads. A `Simulation` has the same methods.

    Attributes:
        name: the name of the modelled hardware; "" here.
        is_modelled: whether a simulation keeps the time.
        meetings: not None, because ranks need no `Meetings` to have the same wall clock.
    """

    name, is_modelled, meetings = "", False, ()
    _interval_before = None  # what Python's switch interval was before `start`

    def start(self):
        """Shorten Python's switch interval, so that a busy host does not starve the engines."""
        if self._interval_before is None and sys.getswitchinterval() > SWITCH_INTERVAL:
            self._interval_before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)

    def stop(self):
        """Put the switch interval back, unless the program has set another one meanwhile."""
        before, self._interval_before = self._interval_before, None
        if before is not None and abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:
            sys.setswitchinterval(before)

    def now(self):
        return perf_counter()

    def launch(self, op, stream):
        """Return the seconds at which an op is issued, see `Simulation.launch`."""
        return perf_counter()

    def advance(self, seconds):
        """Do nothing: what the host does takes its own time."""

    host_allocates = enter_module = copy_modules = advance

    def ask_and_wait(self, function, *arguments):
        """Call a function."""
        function(*arguments)

    def shared_by(self, threads):
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()

    def catch_up(self):
        """Do nothing: every op that has ended is done."""

    poll = end_meetings = catch_up

    def has_ended(self, op):
        return op.done

    def wait(self, op, device):
        gate, waiters, started = closed_gate(), [], perf_counter()
        with _ordering:
            if op.done:
                return
            if op.waiters is None:
                op.waiters = waiters
            op.waiters.append(gate.release)
        try:
            pass_gate(gate)
        finally:
            record_wait(device, started, perf_counter())


WALL_CLOCK = clock = WallClock()  # `clock` is the one in force


class Resource:
    """Something that serves one op at a time: an engine, or one direction of a link.

    Attributes:
        free_at: seconds of the clock at which the last op that it was given ends.
    """

    free_at = 0.0


class Op:
    """A unit of work: a kernel, a copy, or a change of an engine's settings.

    Attributes:
        kind: "kernel", "copy", "collective" or "setting".
        engine: the engine that runs it.
        stream: where it was issued; set by `StreamQueue.issue`.
        work: function of the op that does the work.
        plan: the `Plan` of a kernel; or None.
        args, kwargs, out: what `work` reads and where it leaves its results.
        seconds: how long a copy keeps its engine at least; None for as long as the work takes.
            In a simulation exactly as long, and never None.
        num_bytes, source, target: the bytes that a copy moves, and its devices.
        receiver: the engine for copies between devices of its target; or None.
        generator: the random numbers that it draws from; or None.
        issued, ready, start, end: seconds of the clock.
        launched: seconds of the wall clock at the issue, where another clock is in force; or None.
        error: what the work raised.
        previous, after, waits: the ops that it waits for: the one before it in its stream, those
            given at its issue, and those that its stream waits for (each with the time of that
            call).
        number: its place among the ops that its engine has admitted.
        missing: how many of the ops that it waits for are not done.
        dependents: ops that wait for this one.
        waiters: functions that wake the threads that wait for this one.
    """

    error = num_bytes = source = target = seconds = generator = None
    stream = previous = waits = waiters = None
    plan = receiver = launched = None
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
            what = self.name, self.kind, device, stream.index, self.engine.name
            when = self.start, self.end, self.issued
            launched = self.issued if self.launched is None else self.launched
            yield Span(*what, *when, self.num_bytes or 0, self.source, self.target, launched)


class ReadyQueue:
    """The ops issued to one engine, of which `take` gives the one that became ready first.

    Attributes:
        arrivals: the ops that were handed over and are not admitted yet. None among them only
            wakes the engine.
        hand_over: function, in C, that adds an op to them.
        issued, finished: how many ops were handed over, and how many of them are done.
        ends: nothing; a simulation has here when those ended that are done and not counted yet.
        clock: the `WallClock`.
        ending: whether `take` returns None when it is woken.
    """

    clock = WALL_CLOCK
    ends = ()

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
        if not (op.after or op.waits):  # true of most ops; no lock is needed
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
        """Block the calling thread, which is not an engine's, until half of QUEUE_LIMIT is free."""
        check_thread()
        gate = closed_gate()
        self._held_back.append(gate.release)
        if self.issued - self.finished >= QUEUE_LIMIT:
            pass_gate(gate)


def complete(op):
    """Note that an op has run, and record it.

    Returns:
        A list of the ops that waited for it last and are ready now, and a list, or None, of the
        functions that wake the threads that wait for it.
    """
    try:
        if _recordings:
            record(op.spans())
    except BaseException as error:  # it is told at the next synchronize, as an error of the work is
        if op.error is None:
            op.error = error
            op.engine.device.failed(op)
    op.work = op.args = op.kwargs = op.out = op.plan = None
    op.previous = op.waits = op.generator = None
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
    """Make `op` wait for the ops before it that are not done; return whether it is ready."""
    op.ready = op.issued
    with _ordering:
        for earlier in (op.previous, *op.after, *(op.waits or ())):
            if earlier is None:
                continue
            if earlier.done:
                op.ready = max(op.ready, earlier.end)
            else:
                earlier.dependents.append(op)
                op.missing += 1
        return op.missing == 0


def under_way(op):
    """Return whether an op has not ended yet, as far as the calling thread knows.

    One that a simulation has not come to counts as under way, unless `clock.catch_up()` was called.
    """
    return not op.engine.clock.has_ended(op)


def closed_gate():
    gate = threading.Lock()
    gate.acquire()
    return gate


def pass_gate(gate):
    """Block the calling thread until another one releases a gate; see `check_threads`."""
    looks = 0
    while not gate.acquire(timeout=LIVENESS_SECONDS):
        check_threads()
        looks += 1
        if looks == 2 and at_long_wait is not None:
            at_long_wait()


def wait(op, device):
    """Block the calling thread until an op has run; an interrupt ends the wait, not the op.

    A recording shows the wait under `device`, a torch.device.

    Raises:
        RuntimeError: this process is a fork, the calling thread is an engine's, or such a
            thread has died.
    """
    if under_way(op):
        check_process()
        check_thread()
        check_threads()
        op.engine.clock.wait(op, device)


def check_threads():
    """Raise RuntimeError where a thread that does the work of devices has died.

    What was issued to it never ends, and neither does what waits for that.
    """
    if _deaths:
        who, error = _deaths[0]
        raise RuntimeError(
            f"{who} has died of {type(error).__name__}: {error}. What was issued to virtual GPUs "
            "cannot end any more: start Python anew, and please report this"
        ) from error


def note_death(who, error):
    """Make all threads that wait for devices, now or later, raise RuntimeError.

    Args:
        who: what died, for the error.
        error: the exception that it died of.
    """
    _deaths.append((who, error))


def check_clocks(device, other):
    """Raise RuntimeError unless both `Device`s keep the same clock."""
    if device.compute.clock is not other.compute.clock:
        raise RuntimeError(
            f"{device.torch_device} and {other.torch_device} keep two clocks: virtual_gpus was "
            "interrupted, or one of them is not in use any more; call it again"
        )


def is_recording():
    return bool(_recordings)


def record(spans):
    spans = tuple(spans)
    for recording in _recordings:
        recording.extend(spans)


def record_wait(device, start, end):
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
    _here.engine = engine


def wait_all(ops, device):
    """Block the calling thread until all of `ops` have run, as `wait` does."""
    for op in ops:
        wait(op, device)


def start_recording(recording=None):
    """Return a list to which a `Span` is appended for each op that ends, until `stop_recording`.

    The spans have the seconds of the clock in force. An object given as `recording` takes the place
    of the list; the threads that do the work of devices call its `extend`.
    """
    global _recordings
    recording = [] if recording is None else recording
    with _ordering:
        _recordings = (*_recordings, recording)
    return recording


def stop_recording(recording):
    """Stop appending to `recording`; synchronize first, or ops that still run will be missing.

    Raises:
        ValueError: `recording` is not a recording under way.
    """
    global _recordings
    with _ordering:
        rest = tuple(other for other in _recordings if other is not recording)
        if len(rest) == len(_recordings):
            raise ValueError("this list is not a recording under way")
        _recordings = rest


def check_process():
    """Raise RuntimeError, as CUDA does, in a fork of a process with virtual GPUs."""
    if _forks:
        raise RuntimeError(
            f"Cannot re-initialize {error_name} in forked subprocess. To use {error_name} with "
            "multiprocessing, you must use the 'spawn' start method"
        )


def in_fork():
    return bool(_forks)


def forgive_fork():
    """Allow a fork to use virtual GPUs after all, because its parent had given them no work."""
    _forks.clear()


note_fork = partial(_forks.append, True)  # a function in C: no interrupt can come in it
