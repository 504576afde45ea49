"""Streams, events and engines: what runs when on a virtual GPU.

An `Op` waits for the op before it in its stream and for the events that its stream was told to
wait for; then it queues at its engine. An engine is one thread that runs one op at a time, in the
order in which they became ready. A device has one engine for kernels and one for each direction of
copying, so that ops of different streams overlap when they need different engines, as on a GPU.
"""

import queue
import threading
import time
from time import perf_counter

import torch

_lock = threading.RLock()  # reentrant: a destructor may issue ops while it is held
_recordings = []
_engines = []  # those with a thread
in_fork = False  # is this process a fork of one with virtual GPUs?


class Failure:
    """Stands for the value of a tensor whose kernel failed."""

    __slots__ = ("error",)

    def __init__(self, error):
        self.error = error


class Op:
    """A unit of work on a stream: a kernel, a copy, or a wait (which needs no engine).

    After it ran, `start` and `end` are seconds of `time.perf_counter`; `error` is what it raised.
    """

    done = False
    queued = False
    missing = 0
    dependents = None
    error = None
    num_bytes = 0
    source = target = None
    hold = None  # seconds for which a copy keeps its engine

    def __init__(self, name, kind, stream, engine, work, args=(), kwargs=None, plan=None, out=None):
        self.name = name
        self.kind = kind
        self.stream = stream
        self.engine = engine
        self.work = work
        self.args = args
        self.kwargs = kwargs
        self.plan = plan
        self.out = out


class _Waiter:
    """A thread that waits for an op; stands in the op's list of dependents."""

    __slots__ = ("event",)

    def __init__(self):
        self.event = threading.Event()


class Stream:
    """A queue of ops on one device that run in the order in which they were issued."""

    __slots__ = ("device", "index", "last")

    def __init__(self, device, index):
        self.device = device
        self.index = index
        self.last = None

    def issue(self, op, after=()):
        """Queue `op` behind the ops of this stream, and behind the ops in `after`."""
        if in_fork:
            check_process()
        op.issued = perf_counter()
        with _lock:
            last = self.last
            self.last = op
            if not after and (
                last is None or last.done or (last.queued and last.engine is op.engine)
            ):
                _queue(op)
                return op
            missing = 0
            for earlier in (last, *after):
                if earlier is not None and not earlier.done:
                    if earlier.dependents is None:
                        earlier.dependents = []
                    earlier.dependents.append(op)
                    missing += 1
            op.missing = missing
            if missing == 0:
                _queue(op)
        return op

    def wait_for(self, op):
        """Let all later ops of this stream wait for `op`."""
        if op is None or op.done:
            return
        self.issue(Op("wait", "wait", self, None, None), after=(op,))

    def synchronize(self):
        """Wait until every op issued to this stream has finished."""
        wait(self.last, self.device)


def _queue(op):
    """Hand an op that waits for nothing any more to its engine. The caller holds the lock."""
    if op.engine is None:
        op.start = op.issued
        op.end = perf_counter()
        _finish(op)
    else:
        op.engine.put(op)
        op.queued = True


def _finish(op):
    """Note that `op` has run and release what waited for it. The caller holds the lock."""
    op.done = True
    dependents, op.dependents = op.dependents, None
    for recording in _recordings:
        recording.append(op)
    if dependents:
        for dependent in dependents:
            if type(dependent) is _Waiter:
                dependent.event.set()
            else:
                dependent.missing -= 1
                if dependent.missing == 0:
                    _queue(dependent)


def before_fork():
    """Wait for the ops that run now and hold back the next.

    A fork in the middle of a kernel would inherit the locks that the kernel holds, and hang.
    """
    for engine in _engines:
        engine.running.acquire()


def after_fork():
    """Let the engines go on."""
    for engine in _engines:
        engine.running.release()


def after_fork_in_child():
    """Note that this process is a fork of one with virtual GPUs: their threads are not here."""
    global in_fork, _lock
    in_fork = True
    _lock = threading.RLock()
    after_fork()


def check_process():
    """Raise RuntimeError, as CUDA does, in a fork of a process with virtual GPUs."""
    if in_fork:
        raise RuntimeError(
            "Cannot re-initialize vgpu in forked subprocess. To use vgpu with multiprocessing, "
            "you must use the 'spawn' start method"
        )


def wait(op, device):
    """Block the calling thread until `op` has run; KeyboardInterrupt ends the wait, not the op."""
    if op is None or op.done:
        return
    check_process()
    waiter = _Waiter()
    started = perf_counter()
    with _lock:
        if op.done:
            return
        if op.dependents is None:
            op.dependents = []
        op.dependents.append(waiter)
    try:
        waiter.event.wait()
    finally:
        if _recordings:
            host = Op("synchronize", "wait", None, None, None)
            host.issued, host.start, host.end = started, started, perf_counter()
            host.device = device
            with _lock:
                for recording in _recordings:
                    recording.append(host)


class Engine:
    """A thread that runs ops one at a time: the kernels of a device, or copies in one direction."""

    def __init__(self, name, device, threads=1):
        self.name = name
        self.device = device
        self.threads = threads
        self.free_at = 0.0
        self.running = threading.RLock()  # held while the thread is in torch
        self._queue = queue.SimpleQueue()
        self._thread = None
        self.put = self._start_and_put

    def _start_and_put(self, op):
        self._thread = threading.Thread(
            target=self._run, name=f"vgpu:{self.device.index} {self.name}", daemon=True
        )
        self._queue.put(op)
        self.put = self._queue.put
        _engines.append(self)
        self._thread.start()

    def _run(self):
        with self.running:
            set_thread_count(self.threads)
        with torch.inference_mode():  # so that tensors made in that mode can be written
            self._run_ops()

    def _run_ops(self):
        below_autograd = torch._C._AutoDispatchBelowAutograd()
        get = self._queue.get
        while True:
            op = get()
            if op is None:
                break
            op.start = perf_counter()
            try:
                with self.running:
                    op.work(op)
            except BaseException as error:
                op.error = error
                self.device.failed(op)
            if op.hold is not None:
                self._hold(op)
            op.end = perf_counter()
            op.work = op.args = op.kwargs = op.out = None
            with _lock:
                _finish(op)
            op = None
        del below_autograd

    def _hold(self, op):
        """Keep the engine for the time that the link takes, asleep.

        A copy that follows at once starts where the one before should have ended, so that waking
        up late does not add up.
        """
        started = max(op.issued, self.free_at) if op.start - self.free_at < 1e-3 else op.start
        self.free_at = started + op.hold
        remaining = self.free_at - perf_counter()
        if remaining > 0:
            time.sleep(remaining)

    def set_threads(self, threads):
        """Run later ops with `threads` threads."""
        self.threads = threads
        if self._thread is not None:
            done = threading.Event()

            def change(op):
                set_thread_count(threads)
                done.set()

            op = Op("set_num_threads", "setting", None, self, change)
            op.issued = perf_counter()
            op.device = self.device.torch_device
            self.put(op)
            done.wait()

    def stop(self):
        """End the thread after the op that runs now."""
        if self._thread is not None:
            while True:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
            self._queue.put(None)
            self._thread.join(timeout=60)
            _engines.remove(self)


_thread_count_lock = threading.Lock()


def set_thread_count(threads):
    """Set the number of threads of the calling thread's kernels, and of no other's.

    `torch.set_num_threads` also sets what threads that start later begin with; a thread that
    starts now tells what that was, and another puts it back.
    """
    with _thread_count_lock:
        torch.get_num_threads()  # a thread's first kernel would set the default again
        default = []
        _in_new_thread(lambda: default.append(torch.get_num_threads()))
        torch.set_num_threads(threads)
        _in_new_thread(lambda: torch.set_num_threads(default[0]))


def _in_new_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def start_recording():
    """Return a list to which every op is appended as it finishes, until `stop_recording`."""
    recording = []
    with _lock:
        _recordings.append(recording)
    return recording


def stop_recording(recording):
    """Stop appending to `recording`. Synchronize first, or ops that still run are missing."""
    with _lock:
        for position, other in enumerate(_recordings):
            if other is recording:
                del _recordings[position]
                return
    raise ValueError("this list is not a recording under way")
