"""Engines: threads that run ready ops, one at a time; ops on different engines overlap."""

import _thread
import contextlib
import threading
import time
from collections import deque
from functools import partial
from operator import methodcaller
from time import perf_counter

import torch

from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import Op, ReadyQueue

# A fork during a kernel would inherit the kernel's locks, and hang. So a fork acquires these locks
# first: one for this list, and `running` of each worker thread.
_fork_locks = [threading.RLock()]


def _of_each_fork_lock(method):
    """Return a function that calls a method of each lock, without Python code.

    Exceptions in fork hooks are lost, so Python code there could swallow an interrupt.
    """
    calls = staticmethod(partial(map, methodcaller(method), _fork_locks))
    return partial(deque, type("Calls", (), {"__iter__": calls})(), 0)


before_fork, after_fork = _of_each_fork_lock("acquire"), _of_each_fork_lock("release")


class WorkerThread:
    """A thread that runs ops with `threads` CPU threads each, started by the first op."""

    def __init__(self, threads=1):
        self.threads = threads
        self.running = threading.RLock()  # held while the thread is in torch
        self.started = False
        self._begun = threading.Lock()
        self.ended = threading.Event()

    def start(self):
        """Start the thread; RuntimeError if there are too many threads.

        An interrupt may come before the thread exists (in `sys.addaudithook`'s functions) or after.
        So this may be called twice; the second thread ends at once.
        """
        _thread.start_new_thread(self._run, ())
        self.started = True

    def _run(self):
        if not self._begun.acquire(blocking=False):
            return
        self.started = True
        scheduler.thread_local.engine = self
        with _fork_locks[0]:  # waits for a fork in progress
            _fork_locks.append(self.running)
        try:
            with self.running:
                set_thread_count(self.threads)
            with torch.inference_mode():  # below autograd; allows writes to inference tensors
                self.serve()
        except BaseException as error:
            scheduler.deaths.append((self, error))
        with _fork_locks[0]:
            _fork_locks.remove(self.running)
        self.ended.set()

    def do(self, op):
        """Run the work of `op`; the next synchronize reports its error."""
        with self.running:
            self.do_beside_forks(op)

    def do_beside_forks(self, op):
        """Run the work of `op`, which holds no locks that a fork would inherit."""
        try:
            op.work(op)
        except BaseException as error:
            op.error = error.with_traceback(None)  # engine frames do not help the user
            op.engine.device.failed(op)

    def join(self, timeout=60.0):
        if self.started:
            self.ended.wait(timeout)


class Engine(WorkerThread, ReadyQueue):
    """A thread that runs the ops of its queue one at a time: "compute", "h2d", "d2h" or "p2p"."""

    def __init__(self, name, device, threads=1):
        WorkerThread.__init__(self, threads)
        ReadyQueue.__init__(self)
        self.name = name
        self.device = device
        self._free_at = self._last_end = 0.0  # planned and actual end of the last copy
        self._seconds_per_byte = 2e-10  # of writing a copy; an initial guess

    def __str__(self):
        return f"the engine {self.name} of {self.device.torch_device}"

    def serve(self):
        while True:
            op = self.take()
            if op is None:
                break
            self._execute(op)
            self.finish(op)
            op = None  # frees its tensors before the next wait

    def _execute(self, op):
        op.start = perf_counter()
        if op.seconds is None:
            self.do(op)
            op.end = perf_counter()
            return
        arrival = self._carry(op)
        begun = perf_counter()
        self.do(op)
        if op.num_bytes:  # update the measured figure
            seconds_per_byte = (perf_counter() - begun) / op.num_bytes
            self._seconds_per_byte = (self._seconds_per_byte + seconds_per_byte) / 2
        sleep_until(arrival)
        op.end = self._last_end = perf_counter()

    def _carry(self, op):
        """Sleep for a copy's time on the link; return the planned arrival time.

        The bytes are written at the end, so that a stream without synchronization reads old values.
        Writing has at most half of the time: its rate may come from a process that stood still.
        A copy that follows at once starts at the planned end of the one before: delays do not add
        up.
        """
        ready = self._free_at if op.ready == self._last_end else op.ready
        started = max(ready, self._free_at) if op.start - self._free_at < 1e-3 else op.start
        self._free_at = arrival = started + op.seconds
        writing = min((op.num_bytes or 0) * self._seconds_per_byte, op.seconds / 2)
        sleep_until(arrival - writing)
        return arrival

    def set_threads(self, threads):
        self.threads = threads
        if self.started:
            op = Op("set_num_threads", "setting", self, lambda op: set_thread_count(threads))
            self.device.default_stream.issue(op)
            scheduler.wait(op, self.device.torch_device)

    def end(self):
        """End the thread after the running op; queued ops are dropped."""
        self.ending = True
        self.arrivals.put(None)


def sleep_until(moment):
    remaining = moment - perf_counter()
    if remaining > 0:
        time.sleep(remaining)


_counting = threading.Lock()


def set_thread_count(threads):
    """Set the number of CPU threads for kernels of the calling thread only.

    `torch.set_num_threads` also sets the default of new threads. So a helper thread reads that
    default before the call, and another one restores it. If no thread can be started, nothing
    changes.
    """
    with _counting, contextlib.suppress(RuntimeError):
        torch.get_num_threads()  # without this, the first kernel would restore the default
        default = []
        _in_new_thread(lambda: default.append(torch.get_num_threads()))
        torch.set_num_threads(threads)
        _in_new_thread(lambda: torch.set_num_threads(default[0]))


def _in_new_thread(function):
    """Call a function in a thread that a simulation does not count as a host thread."""
    ended = threading.Event()

    def run():
        try:
            function()
        finally:
            ended.set()

    _thread.start_new_thread(run, ())
    ended.wait()
