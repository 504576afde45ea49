"""Discrete-event simulation of ops on modelled GPUs, exact for given durations.

The op that became ready first is next, and starts once its resources are free: its engine, and for
a copy the directions of the links on its path. A host that waits for an op has it run until that op
has ended, and sets its own clock to that end. Ops issued afterwards are ready later than everything
simulated so far, and so cannot change it: that is why the result is exact.
"""

import contextlib
import functools
import threading
from collections import deque
from heapq import heappop, heappush
from queue import SimpleQueue
from time import perf_counter
from weakref import WeakKeyDictionary

import torch

from vgpu.modelled import program_clock
from vgpu.operators.plans import VIEW
from vgpu.private.autograd import backward_number, in_backward
from vgpu.runtime import scheduler
from vgpu.runtime.engines import WorkerThread, set_thread_count
from vgpu.runtime.scheduler import QUEUE_LIMIT, Resource
from vgpu.tensors.cells import (
    NO_VALUES,
    ONLY_WRITTEN,
    Cell,
    cells_in,
    drop_values,
    is_known,
    is_whole,
    may_have_values,
    set_missing,
    writers_of,
)

# Bandwidth of the first touch of host memory, pinned or not, in bytes/s (d2l 13.3: 2.3125 s for 50
# copies of 64 MB). Below MIN_NEW_BYTES, an allocator reuses memory.
FIRST_TOUCH_BANDWIDTH, MIN_NEW_BYTES = 1.9e9, 32 * 2**20


class ModelledEngine(Resource):
    """An engine of a modelled GPU, with the attributes of an `Engine` that streams use.

    `hand_over`, in C, passes an op to the simulator. Of the ops `issued` to it, `finished` have
    ended as far as the host knows; `ends` has the end times of those simulated after these.
    """

    def __init__(self, name, device, simulation):
        self.name = name
        self.device = device
        self.clock = simulation
        self.hand_over, self.start = simulator.ops.append, simulator.start
        self.issued = self.finished = 0
        self.ends = deque()

    @property
    def started(self):
        return simulator.started

    def wait_for_room(self):
        self.clock.wait_for_room(self)


class HostClock:
    """The clock of a thread that issues ops, in seconds.

    In a backward pass there is a clock for each device, because torch's autograd has a thread for
    each GPU, though virtual GPUs issue everything from one. Threads do not block each other, except
    those of nn.DataParallel, which share Python's lock, see `Simulation.shared_by`.
    """

    def __init__(self, simulation, now):
        self.simulation = simulation
        self._now = now
        self._of_devices = {}  # index of a device -> seconds, in a backward pass
        self._pass = None  # the number of that pass

    def now(self, device=None):
        """Return the time of the thread, or of its clock for a `Device` in a backward pass."""
        if self._of_devices and backward_number() != self._pass:  # that pass is issued completely
            self._now, self._of_devices = max(self._now, *self._of_devices.values()), {}
        if device is None:
            return max(self._now, *self._of_devices.values()) if self._of_devices else self._now
        return self._of_devices.get(device.index, self._now)

    def set(self, seconds, device=None):
        if device is not None and in_backward():
            self._pass = backward_number()
            self._of_devices[device.index] = seconds
        else:
            self._now = max(seconds, self.now())
            self._of_devices = {}


_started = WeakKeyDictionary()  # thread -> (simulation, seconds) of its start
_host_of = WeakKeyDictionary()  # thread -> its HostClock


@functools.cache
def patch_threads():
    """Patch `threading.Thread`: threads inherit the clock of their start, and joining advances it.

    Python has no hook for starting a thread.
    """
    start, join = threading.Thread.start, threading.Thread.join

    @functools.wraps(start)
    def start_host(self):
        _started[self] = scheduler.clock, scheduler.clock.now()
        start(self)

    @functools.wraps(join)
    def join_host(self, timeout=None):
        join(self, timeout)
        host, clock = _host_of.get(self), scheduler.clock
        if host is not None and host.simulation is clock and not self.is_alive():
            clock.host_clock().set(host.now())

    threading.Thread.start, threading.Thread.join = start_host, join_host


class Simulation(scheduler.DeviceClock):
    """The `DeviceClock` of modelled GPUs.

    Args:
        name: the modelled hardware.
        host: the `Host` with the host time of operators.
        values: whether ops are computed, not only timed.
    """

    is_modelled, meetings = True, None

    def __init__(self, name, host, values=True):
        self.name = name
        self.host = host
        self.values = values
        self._hosts = threading.local()
        self.num_hosts = 0
        self._sharing = 1  # threads that share Python's lock, see `shared_by`
        self._ready = []  # heap of (ready, issued, device, stream, number, op)
        self._number = 0

    def start(self):
        patch_threads()
        self.host.start()
        program_clock.start()

    def stop(self):
        program_clock.stop()
        self.host.stop()
        if self.meetings is not None:
            self.meetings.leave()

    def end_meetings(self):
        if self.meetings is not None:
            self.meetings.end()
            self.meetings = None

    # -- for the threads of the host

    def host_clock(self):
        """Return the `HostClock` of the calling thread, which starts with the thread."""
        host = getattr(self._hosts, "host", None)
        if host is None:
            thread = threading.current_thread()
            simulation, started = _started.get(thread, (None, 0.0))
            host = HostClock(self, started if simulation is self else 0.0)
            _host_of[thread] = host
            self.num_hosts += 1
            self._hosts.host = host
        return host

    def now(self):
        return self.host_clock().now()

    def advance(self, seconds):
        host = self.host_clock()
        host.set(host.now() + seconds)

    def enter_module(self, seconds):
        self.advance(seconds * self._sharing)

    def copy_modules(self, number):
        self.advance(number * self.host.module)

    @contextlib.contextmanager
    def shared_by(self, threads):
        self._sharing, before = threads, self._sharing
        try:
            yield
        finally:
            self._sharing = before

    def host_allocates(self, num_bytes):
        if num_bytes >= MIN_NEW_BYTES:
            self.advance(num_bytes / FIRST_TOUCH_BANDWIDTH)

    def has_ended(self, op):
        return op.done and (op.end <= self.now() or scheduler.clock is not self)

    def time_of_issue(self, op, stream):
        """Advance the calling thread's clock by the cost of a launch; return the time of issue.

        It is no earlier than that of a dependency, which another thread may have issued.
        """
        host, device = self.host_clock(), stream.device
        op.launched = perf_counter()
        if op.seconds is None and op.kind != "collective":
            op.seconds = device.model.seconds(op)
        issued = host.now(device)
        if self.num_hosts > 1 or in_backward():
            for other in (stream.last, *writers_of(op)):
                if other is not None and other.issued > issued:
                    if other.engine.clock is self:
                        issued = other.issued
        issued += self.host.seconds() * self._sharing
        host.set(issued, device)
        return issued

    def wait(self, op, device):
        self.call_and_wait(self._run_while, lambda: not op.done)
        host, where = self.host_clock(), op.stream.device
        started = host.now(where)
        if op.end > started:
            host.set(op.end, where)
        scheduler.record_wait(device, started, max(started, op.end))

    def wait_for_room(self, engine):
        """Block the calling thread until half of QUEUE_LIMIT is free, if an engine is full.

        First simulate until now, to update the number of finished ops.
        """
        host, device = self.host_clock(), engine.device
        arrived = host.now(device)
        self.call_and_wait(self._run_until, arrived)
        while engine.ends and engine.ends[0] <= arrived:
            engine.finished += 1
            engine.ends.popleft()
        if engine.issued - engine.finished < QUEUE_LIMIT:
            return
        over = engine.issued - QUEUE_LIMIT // 2
        self.call_and_wait(self._run_while, lambda: engine.finished + len(engine.ends) < over)
        while engine.finished < over:
            engine.finished += 1
            arrived = max(arrived, engine.ends.popleft())
        host.set(arrived, device)

    def catch_up(self):
        self.call_and_wait(self._run_until, self.now())

    def set_threads(self, threads):
        self.call_soon(set_thread_count, threads)  # at the first op: this does not start the thread

    def finish(self):
        self.call_and_wait(self._run_until, float("inf"))

    def call_soon(self, function, *arguments):
        """Call a function in the simulator's thread, without waiting."""
        simulator.requests.put((function, arguments, lambda: None))

    def poll(self):
        self.advance(max(self.host.seconds(), program_clock.SECONDS_OF_A_READING))
        self.catch_up()

    def call_and_wait(self, function, *arguments):
        scheduler.check_not_forked()
        scheduler.check_not_engine_thread()
        if simulator.ended.is_set():
            scheduler.check_engines_alive()  # otherwise Python ends, and an `atexit` function asks
            simulator.run_request(function, arguments)
            return
        if not simulator.started:
            simulator.start()
        gate = scheduler.closed_gate()
        simulator.requests.put((function, arguments, gate.release))
        scheduler.pass_gate(gate)

    # -- for the simulator's thread

    def admit(self, op):
        if scheduler.admit(op):
            self.make_ready(op)

    def make_ready(self, op):
        stream = op.stream
        self._number += 1
        key = (op.ready, op.issued, stream.device.index, stream.index, self._number)
        heappush(self._ready, (*key, op))

    def _run_while(self, condition):
        while condition():
            self._run_next()

    def run_issued_while(self, condition):
        self._run_while(lambda: condition() and (self._ready or self.meetings.pending))

    def _run_until(self, seconds):
        while self._ready_first(seconds) <= seconds and self._ready:
            self._run_next()

    def _ready_first(self, limit=float("inf")):
        """Return the time at which the next op is ready, or infinity.

        The ranks of a job cannot meet any more before that time and `limit`.
        """
        while True:
            first = self._ready[0][0] if self._ready else float("inf")
            if self.meetings is None or self.meetings.may_advance_to(min(first, limit)):
                return first

    def _run_next(self):
        self._ready_first()
        op = heappop(self._ready)[-1]
        model = op.engine.device.model
        resources = model.resources_of(op)
        op.start = max(op.ready, *(resource.free_at for resource in resources))
        if op.kind == "collective":
            if op.seconds is None:  # queued again when the last rank is ready
                self.meetings.post(op)
                return
            op.start = op.ready
        if op.kind == "kernel":
            op.end = model.kernel_end(op.start, op.seconds)
        else:
            op.end = op.start + op.seconds
            if op.kind == "collective":
                model.note_collective(op)
        for resource in resources:
            resource.free_at = max(resource.free_at, op.end)
        if self.values or op.kind == "collective" or _is_computed(op):
            simulator.do(op)
        else:
            mark_without_values(op)
        op.engine.ends.append(op.end)
        ready, _ = scheduler.complete(op)
        for dependent in ready:
            self.make_ready(dependent)


def _is_copy(op):
    """Return whether `op` copies its second argument to its first."""
    return op.plan is None and (op.kind == "copy" or op.name == "aten.copy_")


def _written(op):
    """Return a list of the cells among the arguments of `op` that it writes.

    Arguments of which results are views are included: `fsdp.all_gather_copy_in` writes one.
    """
    if op.plan is None:
        is_first = _is_copy(op) or op.kind == "collective"
        return [*cells_in(op.args[:1])] if is_first else []
    operator, arguments = op.plan.operator, dict(enumerate(op.args)) | (op.kwargs or {})
    keys = (key for each in (*operator.written, *operator.statistics) for key in each)
    written = [*cells_in([arguments[key] for key in keys if key in arguments])]
    viewed = [source for mode, _, source in op.plan.outputs if mode == VIEW]
    if viewed:
        inputs = [*cells_in(arguments.values())]
        written += [inputs[source] for source in viewed]
    return written


def _is_computed(op):
    """Return whether `op` is computed on devices without values.

    It is if its inputs have values and its outputs are small. So sizes that ranks compare, objects
    that they exchange, counters, and everything computed from these have values.
    """
    if op.work is None:
        return False
    reads = [*op.args, *(op.kwargs or {}).values()]
    if _is_copy(op) or op.plan is not None and op.plan.operator.packet in ONLY_WRITTEN:
        target, *reads = reads
        if isinstance(target, Cell) and not is_known(target) and not is_whole(target):
            return False
    writes = [*cells_in([op.out]), *_written(op)]
    return all(may_have_values(cell.root().layout) for cell in writes) and all(
        map(is_known, cells_in(reads))
    )


def mark_without_values(op):
    set_missing(op.out, NO_VALUES)
    for cell in _written(op):
        drop_values(cell)
    if op.name == "aten._amp_foreach_non_finite_check_and_unscale_":
        op.args[1].root().data = torch.zeros(())  # no infinities: GradScaler does not skip the step
    if op.kind == "copy" and op.target.type == "cpu":
        target = op.args[0]
        if target.is_floating_point() or target.is_complex():
            target.fill_(float("nan"))
        elif target.dtype.is_signed:
            target.fill_(-(2 ** (8 * target.dtype.itemsize - 1)))
        else:
            target.zero_()


class _Simulator(WorkerThread):
    """The thread that runs simulations.

    `ops` are handed over but not admitted yet; `requests` are (function, arguments, callback after
    its return), or None to end. An exception ends the thread, see `scheduler.check_engines_alive`.
    """

    def __init__(self):
        super().__init__()
        self.ops = deque()
        self.requests = SimpleQueue()

    def serve(self):
        for function, arguments, wake in iter(self.requests.get, None):
            self.run_request(function, arguments)
            wake()
            function = arguments = wake = None  # frees tensors before the next wait

    def run_request(self, function, arguments):
        """Admit the ops that were handed over, and call a function."""
        while self.ops:
            op = self.ops.popleft()
            op.engine.clock.admit(op)
        function(*arguments)

    def __str__(self):
        return "the thread that simulates modelled GPUs"

    def end(self):
        self.requests.put(None)


simulator = _Simulator()
