"""Writes a process's use of virtual GPUs to a folder, for `vgpu run`.

A report is a JSON file, `<pid>.json`; with a trace, `<pid>.spans` has a line for each op. Both are
written every second and at the end, because a signal may kill a process. A process without work on
GPUs writes nothing.
"""

import _thread
import atexit
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from vgpu import hardware_name
from vgpu.cuda.summary import RAY_WORKER, SPAN
from vgpu.recording.chrome_trace import NVTX_KINDS
from vgpu.runtime import registry, scheduler

SECONDS_BETWEEN_REPORTS = 1.0
MAX_GAPS = 10_000  # gaps between steps that a process keeps, the last ones


def report_to(folder, with_spans=False):
    """Write reports of this process to a folder, from its first op on; optionally also each op."""
    report = Report(folder, with_spans)
    scheduler.start_recording(report)
    atexit.register(report.wait_and_write_last)  # runs before `_end` of backend.py
    # Children of multiprocessing run finalizers, then os._exit; a fork starts without finalizers.
    finish = functools.partial(Finalize, None, report.write_last, exitpriority=0)
    finish()
    register_after_fork(report, lambda report: finish())
    report.note_errors_of_children()
    register_optimizer_step_post_hook(report.note_step)


class Report:
    """A recording for `scheduler` that keeps sums over spans only, to save memory."""

    def __init__(self, folder, with_spans):
        self._folder = folder
        self._recorded = SimpleQueue()  # spans to be added
        self._writing = threading.Lock()
        self._spans = [] if with_spans else None
        self._busy = defaultdict(Counter)  # device -> engine -> seconds
        self._ops = Counter()  # by device
        self._links = {}  # (source, target) -> [bytes, seconds, copies]
        self._waiting = 0.0
        self._begin, self._end = float("inf"), 0.0
        self._steps_of = WeakKeyDictionary()  # optimizer -> its entry in `_steps`
        self._steps = []
        self._rank = os.environ.get("RANK")
        self._started = False  # whether the writing thread runs
        self._ended = False  # whether the last report is written
        self._raised = None  # the exception that ended a child of multiprocessing
        self._error = None  # the name of the exception that ended this process

    def extend(self, spans):
        """Add spans of finished ops and of waits.

        Takes no lock, because a signal handler may call it again.
        """
        self._recorded.put(spans)
        if not self._started and spans and spans[0].kind not in NVTX_KINDS:
            self._start()

    def _add(self, span):
        seconds = span.end - span.start
        if span.kind == "wait":
            if span.engine == "host":
                self._waiting += seconds
        elif span.kind not in NVTX_KINDS:
            self._busy[span.device][span.engine] += seconds
            self._ops[span.device] += 1
            self._begin, self._end = min(self._begin, span.start), max(self._end, span.end)
            on_meta = getattr(span.target, "type", None) == "meta"  # copies that move nothing
            if span.kind in ("copy", "collective") and not on_meta:
                sums = self._links.setdefault((span.source, span.target), [0, 0.0, 0])
                sums[0] += span.num_bytes
                sums[1] += seconds
                sums[2] += 1
        if self._spans is not None:
            self._spans.append(span)

    def note_step(self, optimizer, args, kwargs):
        """Record a step of an optimizer; a hook of torch."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        device = next((p.device for p in parameters if registry.is_virtual(p.device)), None)
        if device is None:
            return
        if optimizer not in self._steps_of:
            self._steps.append(_Steps())
            self._steps_of[optimizer] = self._steps[-1]
        work = registry.find(device).current_stream().tail()
        self._steps_of[optimizer].note(scheduler.clock.now(), work)

    def note_errors_of_children(self):
        """Record the exception that ends a child of multiprocessing, before 3.13 discards it."""
        run = BaseProcess.run

        @functools.wraps(run)
        def noting(process):
            try:
                run(process)
            except BaseException as error:
                self._raised = error
                raise

        BaseProcess.run = noting

    def _start(self):
        self._started = True
        self._pid = os.getpid()
        _thread.start_new_thread(self._write_again, ())

    def _write_again(self):
        while True:
            self.write(ended=False)
            time.sleep(SECONDS_BETWEEN_REPORTS)

    def wait_and_write_last(self):
        """Wait for issued work and write the last report.

        After an error it does not wait: other ranks may never join a collective.
        """
        if not hasattr(sys, "last_value"):
            registry.wait_for_all_devices()  # returns at once in a fork
        self.write_last()

    def write_last(self):
        """Write the last report, once, if this process has written before."""
        if self._started and os.getpid() == self._pid:
            error = getattr(sys, "last_value", None) or self._raised
            if error is not None and getattr(error, "code", True) not in (None, 0):
                # torch.multiprocessing.spawn calls sys.exit(1) while it handles the error.
                cause = error.__context__ if isinstance(error, SystemExit) else None
                self._error = type(cause or error).__name__
            self.write(ended=True)

    def write(self, ended):
        """Write a report, the last one if `ended`; nothing after that."""
        with self._writing:
            if self._ended:  # by another thread
                return
            contents = self._contents(ended)
            self._write_spans()
            path = os.path.join(self._folder, f"{self._pid}.json")
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(contents, file)
            os.replace(f"{path}.new", path)
            self._ended = ended

    def _write_spans(self):
        if self._spans is None:
            return
        spans, self._spans = self._spans, []
        path = os.path.join(self._folder, f"{self._pid}.spans")
        with open(path, "a", encoding="utf-8") as file:
            for span in spans:
                fields = [getattr(span, name) for name in SPAN]
                file.write(json.dumps(fields, default=str) + "\n")

    def _contents(self, ended):
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        for _ in range(self._recorded.qsize()):
            for span in self._recorded.get():
                self._add(span)
        links = [[str(s), str(t), *sums] for (s, t), sums in self._links.items()]
        devices = {}
        for device in registry.devices:
            where = device.torch_device
            if where in self._ops:
                devices[str(where)] = {
                    "busy": self._busy[where],
                    "ops": self._ops[where],
                    "peak": device.memory.highest,
                }
        for steps in list(self._steps):
            steps.settle()
        steps = max(list(self._steps), key=lambda steps: steps.number, default=_Steps())
        return {
            "pid": self._pid,
            "rank": None if self._rank is None else int(self._rank),
            "name": name_of_this_process(),
            "started": _start_of_this_process(),
            "modelled": hardware_name(),
            "devices": devices,
            "links": links,
            "waiting": self._waiting,
            "begin": self._begin,
            "end": self._end,
            "steps": steps.number,
            "step_seconds": median(steps.gaps) if steps.gaps else None,
            "ended": ended,
            "error": self._error,
        }


class _Steps:
    """The number of an optimizer's steps, and the seconds between them.

    A step ends when the device has executed it.
    """

    def __init__(self):
        self.number = 0
        self.gaps = deque(maxlen=MAX_GAPS)
        self._pending = deque()  # (time of issue, ops to wait for)
        self._last = None

    def note(self, now, work):
        """Count a step, issued at `now`, which ends when the ops `work` have ended."""
        self.number += 1
        self._pending.append((now, work))

    def settle(self):
        while self._pending and all(op.done for op in self._pending[0][1]):
            now, work = self._pending.popleft()
            end = max([now, *(op.end for op in work)])
            if self._last is not None:
                self.gaps.append(end - self._last)
            self._last = end


def name_of_this_process():
    """Return a short name of this process's script or module, or of the test that started it."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.match("ray/*/workers/default_worker.py"):
        return RAY_WORKER
    name = path.parent.name if path.name == "__main__.py" else path.name
    if multiprocessing.parent_process() is None:
        return "python -c" if name == "-c" else name
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].partition(" ")[0]
    return f"{multiprocessing.current_process().name}: {test or name}"


def _start_of_this_process():
    """Return the start time of this process, clock ticks since boot; see proc(5)."""
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[19])
