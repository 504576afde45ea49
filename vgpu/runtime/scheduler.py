"""Scheduling of ops: dependencies, ready queues, waiting and recordings.

Times are those of the current clock, `clock`. On modelled GPUs an op that is `done` has been
simulated, and may end later than the host's `now`. An engine's thread *admits* an op: it counts
the earlier ops that it depends on. The thread that finishes the last of these makes it ready.
"""

import contextlib
import os
import sys
import threading
import warnings
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter

from vgpu.runtime.spans import Span

sync_debug_mode = 0  # 1 warns of synchronizing operators, 2 makes them raise
error_name = "vgpu"  # of the devices in errors; "CUDA" if the device type is "cuda"
SWITCH_INTERVAL = 1e-4  # seconds
QUEUE_LIMIT = 1024  # ops under way on an engine; CUDA blocks the host at about this number, too

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # vgpu's folder
_ordering = threading.RLock()  # guards what changes in an op once it is issued
_recordings = ()  # lists to which spans of finished ops are appended
_forks = []  # has an item in a fork of a process with virtual GPUs
thread_local = threading.local()  # `engine` is set in an engine's thread
deaths = []  # (engine, exception) of engine threads that have died: see `check_engines_alive`
LIVENESS_SECONDS = 1.0  # between a waiting host's checks that these threads are alive
at_long_wait = None  # called once by a host that has waited for 2 LIVENESS_SECONDS


class DeviceClock:
    """What keeps the time: `WallClock`, or `Simulation` on modelled GPUs.

    Methods do nothing unless overridden: by the wall clock, all that takes time does so by itself.

    Attributes:
        name: the modelled hardware; "" on the wall clock.
        is_modelled: whether the time is simulated.
        meetings: how the ranks of a job agree on times: `ConnectedRanks` or `EqualRanks`, None
            before there is a job; () on the wall clock, which they share.
    """

    name, is_modelled, meetings = "", False, ()

    def start(self):
        """Apply what the clock changes in Python: the switch interval, or threads and modules."""

    def stop(self):
        """Undo it: another clock takes over, or the process ends."""

    def now(self):
        """Return the time of the calling thread, in seconds."""

    def time_of_issue(self, op, stream):
        """Return the time of issue of an op, after the host time of its launch."""

    def advance(self, seconds):
        """Let host work take `seconds`."""

    def host_allocates(self, num_bytes):
        """Let the first touch of new CPU memory take its time."""

    def enter_module(self, seconds):
        """Let the call of a module take `seconds`."""

    def copy_modules(self, number):
        """Let the copy of so many modules take its time."""

    def shared_by(self, threads):
        """Return a context manager in which `threads` host threads share Python's lock."""

    def has_ended(self, op):
        """Return whether an op has ended, as far as the calling thread knows."""

    def catch_up(self):
        """Bring the state of all ops up to `now`."""

    def poll(self):
        """Call `catch_up` for a host that queries an event, which takes host time."""

    def wait(self, op, device):
        """Block the calling thread until an op has ended; `device` is for recordings."""

    def call_and_wait(self, function, *arguments):
        """Call a function after all ops issued so far, in a thread that no interrupt reaches."""

    def end_meetings(self):
        """Complete all issued ops, and leave the ranks of the job."""


class WallClock(DeviceClock):
    """The `DeviceClock` of virtual GPUs whose engines are threads."""

    _interval_before = None  # Python's switch interval before `start`

    def start(self):
        """Shorten Python's switch interval, so that a busy host does not starve the engines."""
        if self._interval_before is None and sys.getswitchinterval() > SWITCH_INTERVAL:
            self._interval_before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)

    def stop(self):
        """Restore the switch interval, unless the program has changed it meanwhile."""
        before, self._interval_before = self._interval_before, None
        if before is not None and abs(sys.getswitchinterval() - SWITCH_INTERVAL) < 1e-6:
            sys.setswitchinterval(before)

    def now(self):
        return perf_counter()

    def time_of_issue(self, op, stream):
        return perf_counter()

    def call_and_wait(self, function, *arguments):
        function(*arguments)

    def shared_by(self, threads):
        return contextlib.nullcontext()

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


WALL_CLOCK = clock = WallClock()  # `clock` is the current one


class Resource:
    """An exclusive resource of ops: an engine, or one direction of a link."""

    free_at = 0.0  # end of its last op, in seconds of the clock


class Op:
    """A unit of work: a kernel, a copy, or a change of an engine's settings.

    Attributes:
        kind: "kernel", "copy", "collective" or "setting".
        stream: its stream; set by `StreamQueue.issue`.
        work: function(op) that does the work.
        args, kwargs, out: inputs and outputs of `work`.
        seconds: the minimum duration of a copy; None for the duration of the work. In a simulation
            the exact duration, never None.
        num_bytes, source, target: size and devices of a copy.
        receiver: the target's engine for copies between devices; or None.
        generator: the generator of its random numbers; or None.
        issued, ready, start, end: seconds of the clock.
        launched: wall-clock seconds of the issue if the clock is simulated; or None.
        previous: the op before it in its stream, on which it depends.
        after: other ops on which it depends, passed to `issue`.
        waits: {op: time of the call} for those that its stream was told to wait for.
        num_unfinished, dependents: number of its dependencies that are not done; ops that depend
            on it.
    """

    error = num_bytes = source = target = seconds = generator = None
    stream = previous = waits = waiters = None
    plan = receiver = launched = None
    after = ()
    ready = start = end = 0.0
    num_unfinished = number = 0
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
        """Yield the spans of this op, and of its stream's waits before it."""
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
    """The ops issued to one engine; `take` returns the one that became ready first.

    Attributes:
        arrivals: queue of ops that are not yet admitted; an item None only wakes the engine.
        hand_over, issued, finished, ends: see `ModelledEngine`.
        ending: whether `take` returns None when woken.
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
        self._waiting_for_room = []  # functions that wake the threads in `wait_for_room`

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
        """Count the unfinished dependencies of `op`; return whether it is ready."""
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
            if previous.engine is self:  # runs in this thread, so it cannot finish meanwhile
                previous.dependents.append(op)
                op.num_unfinished = 1
                return False
        return admit(op)

    def finish(self, op):
        """Mark `op` as done; queue dependents that are now ready, and wake waiting threads."""
        self.finished += 1  # before a thread that waits for it goes on
        ready, waiters = complete(op)
        for dependent in ready:
            queue = dependent.engine
            heappush(queue._ready, (dependent.ready, dependent.number, dependent))
            if queue is not self:
                queue.arrivals.put(None)
        for wake in waiters or ():
            wake()
        if self._waiting_for_room and self.issued - self.finished <= QUEUE_LIMIT // 2:
            while self._waiting_for_room:
                self._waiting_for_room.pop()()

    def wait_for_room(self):
        """Block the calling thread until half of QUEUE_LIMIT is free; not for engine threads."""
        check_not_engine_thread()
        gate = closed_gate()
        self._waiting_for_room.append(gate.release)
        if self.issued - self.finished >= QUEUE_LIMIT:
            pass_gate(gate)


def complete(op):
    """Mark an op as done, and record it; return its dependents that are now ready, and waiters."""
    try:
        if _recordings:
            record(op.spans())
    except BaseException as error:  # reported at the next synchronize, like an error in the op
        if op.error is None:
            op.error = error
            op.engine.device.failed(op)
    # Before `done`: whoever sees it, without the lock, may rely on `end`, and that nothing is held.
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
            dependent.num_unfinished -= 1
            if dependent.num_unfinished == 0:
                ready.append(dependent)
    return ready, waiters


def admit(op):
    """Register `op` with its unfinished dependencies; return whether it is ready."""
    op.ready = op.issued
    with _ordering:
        for earlier in (op.previous, *op.after, *(op.waits or ())):
            if earlier is None:
                continue
            if earlier.done:
                op.ready = max(op.ready, earlier.end)
            else:
                earlier.dependents.append(op)
                op.num_unfinished += 1
        return op.num_unfinished == 0


def under_way(op):
    """Return whether an op has not ended yet, as far as the calling thread knows.

    Ops that are not yet simulated count as under way; `clock.catch_up()` simulates them.
    """
    return not op.engine.clock.has_ended(op)


def closed_gate():
    gate = threading.Lock()
    gate.acquire()
    return gate


def pass_gate(gate):
    """Block the calling thread until another one releases the gate; see `check_engines_alive`."""
    looks = 0
    while not gate.acquire(timeout=LIVENESS_SECONDS):
        check_engines_alive()
        looks += 1
        if looks == 2 and at_long_wait is not None:
            at_long_wait()


def wait(op, device):
    """Block the calling thread until an op has run; an interrupt ends the wait, not the op.

    A recording shows the wait under `device`, a torch.device. Raises RuntimeError in a fork or an
    engine's thread, or if an engine's thread has died.
    """
    if under_way(op):
        check_not_forked()
        check_not_engine_thread()
        check_engines_alive()
        op.engine.clock.wait(op, device)


def note_sync():
    """Warn of a synchronizing operator, or raise RuntimeError, as `sync_debug_mode` says."""
    if sync_debug_mode:
        text = f"called a synchronizing {error_name} operation"
        if sync_debug_mode == 2:
            raise RuntimeError(text)
        frame, level = sys._getframe(), 1
        while (file := frame.f_code.co_filename).startswith(PACKAGE) or "_ops.py" in file:
            frame, level = frame.f_back, level + 1
        warnings.warn(text, stacklevel=level)  # at the caller, outside vgpu and torch.ops


def check_engines_alive():
    """Raise RuntimeError if an engine's thread has died: its ops and their dependents never end."""
    if deaths:
        who, error = deaths[0]
        raise RuntimeError(
            f"{who} has died of {type(error).__name__}: {error}. Work on virtual GPUs cannot end "
            "any more: restart Python, and please report this"
        ) from error


def check_same_clock(device, other):
    if device.compute.clock is not other.compute.clock:
        raise RuntimeError(
            f"{device.torch_device} and {other.torch_device} must have the same clock: "
            "virtual_gpus was interrupted, or one device is no longer in use; call it again"
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


def check_not_engine_thread():
    """Raise RuntimeError in an engine's thread, where a wait would never end."""
    if getattr(thread_local, "engine", None) is not None:
        raise RuntimeError(
            "the garbage collector ran a destructor that waits for a virtual GPU in an engine's "
            "thread, which would deadlock: release the object explicitly before dropping it"
        )


def wait_for_ops(ops, device):
    """Block the calling thread until all of `ops` have run, as `wait` does."""
    for op in ops:
        wait(op, device)


def start_recording(recording=None):
    """Return a list to which a `Span` is appended for each op that ends, until `stop_recording`.

    Times are those of the current clock. `recording` replaces the list: an object whose `extend`
    engine threads call.
    """
    global _recordings
    recording = [] if recording is None else recording
    with _ordering:
        _recordings = (*_recordings, recording)
    return recording


def stop_recording(recording):
    """Stop appending to `recording`; synchronize first, or ops that still run will be missing.

    Raises:
        ValueError: `recording` is not active.
    """
    global _recordings
    with _ordering:
        rest = tuple(other for other in _recordings if other is not recording)
        if len(rest) == len(_recordings):
            raise ValueError("recording must be one that start_recording returned, not yet stopped")
        _recordings = rest


def check_not_forked():
    """Raise RuntimeError, as CUDA does, in a fork of a process with virtual GPUs."""
    if _forks:
        raise RuntimeError(
            f"Cannot re-initialize {error_name} in forked subprocess. To use {error_name} with "
            "multiprocessing, you must use the 'spawn' start method"
        )


def in_fork():
    return bool(_forks)


def forgive_fork():
    """Allow a fork to use virtual GPUs, because its parent had issued no work to them."""
    _forks.clear()


note_fork = partial(_forks.append, True)  # a function in C: no interrupt can come within it
