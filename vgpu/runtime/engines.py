"""Engines: threads that take ready ops and do their work, one at a time.

A device has one engine for kernels and one for each direction of copying, so that ops of different
streams overlap when they need different engines, as on a GPU.
"""

import _thread
import contextlib
import threading
import time
from collections import deque
from functools import partial
from operator import methodcaller
from time import perf_counter

import torch

from vgpu.private.autograd import set_below_autograd
from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import Op, ReadyQueue

# A fork in the middle of a kernel would inherit the locks that the kernel holds, and hang. So a
# fork takes these locks first: one for this list, and `running` of each thread that does work.
_fork_locks = [threading.RLock()]


def _of_each_fork_lock(method):
    """Return a function that calls a method of each lock.

    It is in C throughout: an exception in a function that runs at a fork is lost, so that Python
    code could swallow an interrupt.
    """
    calls = staticmethod(partial(map, methodcaller(method), _fork_locks))
    return partial(deque, type("Calls", (), {"__iter__": calls})(), 0)


before_fork, after_fork = _of_each_fork_lock("acquire"), _of_each_fork_lock("release")


class WorkerThread:
    """A thread that does the work of ops. It starts with the first op.

    Attributes:
        threads: CPU threads that a kernel uses.
        running: a lock that is held while the thread is in torch.
        started: whether the thread has been started.
        ended: an Event that is set once it has ended.
    """

    def __init__(self, threads=1):
        self.threads = threads
        self.running = threading.RLock()
        self.started = False
        self._begun = threading.Lock()
        self.ended = threading.Event()

    def start(self):
        """Start the thread; RuntimeError if there are too many threads.

        An interrupt may come before the thread is there, in a function of `sys.addaudithook`, or
        after. So this may be called again; the thread that comes second ends at once.
        """
        _thread.start_new_thread(self._run, ())
        self.started = True

    def _run(self):
        if not self._begun.acquire(blocking=False):
            return
        self.started = True
        scheduler.note_engine(self)
        with _fork_locks[0]:  # waits until a fork under way is over
            _fork_locks.append(self.running)
        try:
            with self.running:
                set_thread_count(self.threads)
                set_below_autograd()
            with torch.inference_mode():  # so that tensors made in that mode can be written
                self.serve()
        except BaseException as error:
            scheduler.note_death(self, error)
        with _fork_locks[0]:
            _fork_locks.remove(self.running)
        self.ended.set()

    def do(self, op):
        """Do the work of `op`; an error is kept for the next synchronize."""
        with self.running:
            self.do_beside_forks(op)

    def do_beside_forks(self, op):
        """Do the work of `op`, which holds no locks that a fork would inherit."""
        try:
            op.work(op)
        except BaseException as error:
            op.error = error.with_traceback(None)  # its frames are an engine's, of no use to a user
            op.engine.device.failed(op)

    def join(self, timeout=60.0):
        """Wait for the end of the thread, for at most `timeout` seconds."""
        if self.started:
            self.ended.wait(timeout)


class Engine(WorkerThread, ReadyQueue):
    """A thread that runs the ops of its queue one at a time: "compute", "h2d", "d2h" or "p2p"."""

    def __init__(self, name, device, threads=1):
        WorkerThread.__init__(self, threads)
        ReadyQueue.__init__(self)
        self.name = name
        self.device = device
        self._free_at = self._last_end = 0.0  # when the last copy should have ended, when it did
        self._seconds_per_byte = 2e-10  # to write what was copied; a first guess

    def __str__(self):
        return f"the engine {self.name} of {self.device.torch_device}"

    def serve(self):
        while True:
            op = self.take()
            if op is None:
                break
            self._execute(op)
            self.finish(op)
            op = None  # otherwise its tensors would be kept while this waits

    def _execute(self, op):
        op.start = perf_counter()
        takes_time = op.seconds is not None
        if takes_time:
            arrival = self._carry(op)
            begun = perf_counter()
        self.do(op)
        if takes_time:
            self._land(op, arrival, begun)
        op.end = perf_counter()
        if takes_time:
            self._last_end = op.end

    def _carry(self, op):
        """Sleep until the link has carried the bytes of a copy; return when they have to arrive.

        The bytes are written at the end, so that a stream that reads the target too early sees what
        was there before. A copy that follows at once starts when the one before should have ended,
        so that delays in waking up do not add up.
        """
        ready = self._free_at if op.ready == self._last_end else op.ready
        started = max(ready, self._free_at) if op.start - self._free_at < 1e-3 else op.start
        self._free_at = arrival = started + op.seconds
        writing = (op.num_bytes or 0) * self._seconds_per_byte
        sleep_until(arrival - writing)
        return arrival

    def _land(self, op, arrival, begun):
        """Keep the engine until `arrival`; learn from a copy how long writing takes."""
        if op.num_bytes:
            seconds_per_byte = (perf_counter() - begun) / op.num_bytes
            self._seconds_per_byte = (self._seconds_per_byte + seconds_per_byte) / 2
        sleep_until(arrival)

    def set_threads(self, threads):
        """Run later ops with `threads` CPU threads."""
        self.threads = threads
        if self.started:
            op = Op("set_num_threads", "setting", self, lambda op: set_thread_count(threads))
            self.device.default_stream.issue(op)
            scheduler.wait(op, self.device.torch_device)

    def end(self):
        """End the thread after the op that runs now; what is queued is dropped."""
        self.ending = True
        self.arrivals.put(None)


def sleep_until(moment):
    """Sleep until the wall clock reads `moment`, in seconds."""
    remaining = moment - perf_counter()
    if remaining > 0:
        time.sleep(remaining)


_counting = threading.Lock()


def set_thread_count(threads):
    """Set the number of CPU threads for the calling thread's kernels, and for no other thread's.

    `torch.set_num_threads` also sets the number with which threads that start later begin. So a
    thread that starts before the call reads that number, and one that starts after it puts it back.
    Where there are too many threads for that, the number stays.
    """
    with _counting, contextlib.suppress(RuntimeError):
        torch.get_num_threads()  # without this, the first kernel would put the default back
        default = []
        _in_new_thread(lambda: default.append(torch.get_num_threads()))
        torch.set_num_threads(threads)
        _in_new_thread(lambda: torch.set_num_threads(default[0]))


def _in_new_thread(function):
    """Call a function in a thread that a simulation does not take for one of the host's."""
    ended = threading.Event()

    def run():
        try:
            function()
        finally:
            ended.set()

    _thread.start_new_thread(run, ())
    ended.wait()
