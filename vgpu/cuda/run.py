"""`vgpu run`: runs a command whose processes have virtual GPUs in place of CUDA's.

This process does not import torch.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vgpu.cuda.autoload import CLOCK, GPUS, REPORTS, TRACE, VALUES
from vgpu.cuda.summary import read_reports, summary, write_trace

assert sys.platform == "linux", "the command has refused the others"

SECONDS_TO_END = 5.0  # for remaining processes after a signal
SECONDS_FOR_CHILDREN = 1.0  # for children to end by themselves after the command
POLL_SECONDS = 0.05
SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # requests to end
NOT_FOUND, CANNOT_RUN = 127, 126  # exit codes of a shell
_PR_SET_CHILD_SUBREAPER = 36


def run_command(command, gpus, model=None, trace=None, clock="model", values=True):
    """Run a command, a list of strings, with the options of `vgpu run`; return its exit code."""
    if trace is not None and not os.path.isdir(os.path.dirname(os.path.abspath(trace))):
        print(f"vgpu run: the folder of the trace {trace} does not exist", file=sys.stderr)
        return CANNOT_RUN
    folder = tempfile.mkdtemp(prefix="vgpu-run-")
    try:
        environment = {
            **os.environ,
            GPUS: f"{model or 'vgpu'}:{gpus}",
            CLOCK: clock,
            VALUES: str(int(values)),
            REPORTS: folder,
            TRACE: "1" if trace else "",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        }
        began = time.perf_counter()
        try:
            code = _Job(command, environment).wait()
        except OSError as error:
            print(f"vgpu run: {command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        seconds = time.perf_counter() - began
        reports = read_reports(folder)
        sys.stdout.flush()
        print(summary(reports, gpus, seconds, code, clock, values), file=sys.stderr)
        if trace is not None:
            write_trace(trace, reports, folder, began)
            print(f"trace: {trace} (open it in https://ui.perfetto.dev)", file=sys.stderr)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Job:
    """A command and all its descendants.

    It stays in this process's group, so a terminal interrupts, stops and resumes both; a signal of
    another process to this one alone is forwarded.
    """

    def __init__(self, command, environment):
        self._asked_to_end = False
        self._before = _descendants()
        _adopt_orphans(True)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        unblock = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, self._mask)
        try:
            self._process = subprocess.Popen(command, env=environment, preexec_fn=unblock)
        except BaseException:
            self._restore()
            raise

    def wait(self):
        try:
            while self._process.poll() is None:
                self._handle_signal()
            self._end_children()
        finally:
            self._restore()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _handle_signal(self):
        """Wait a moment; forward the first signal of another process, and kill all at the second.

        The command gets the terminal's Ctrl-C by itself, and may take its time, for a checkpoint.
        """
        time.sleep(POLL_SECONDS)
        # With a time-out, this returns garbage if the process was stopped (Ctrl-Z, a debugger) for
        # longer: Python reads the clock, not the result of the system call.
        info = signal.sigtimedwait(SIGNALS, 0)
        if info is None or info.si_code > 0:  # none, or from the terminal
            return
        if self._asked_to_end:
            _send(signal.SIGKILL, _descendants(self._before))
        else:
            self._asked_to_end = True
            _send(info.si_signo, _descendants(self._before), os.getpgrp())

    def _end_children(self):
        for ask, seconds in (
            (None, SECONDS_FOR_CHILDREN),
            (signal.SIGTERM, SECONDS_TO_END),
            (signal.SIGKILL, SECONDS_TO_END),
        ):
            left = _descendants(self._before)
            if ask is not None:
                _send(ask, left)
            deadline = time.monotonic() + seconds
            while left and time.monotonic() < deadline:
                self._handle_signal()
                left = _descendants(self._before)
            if not left:
                return

    def _restore(self):
        _adopt_orphans(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _adopt_orphans(yes):
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _descendants(without=()):
    """Return the pids of this process's running descendants, without the trees below `without`."""
    children, ended = {}, set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # the process has ended
            continue
        state, parent, *_ = text.rpartition(")")[2].split()
        pid = int(path.parent.name)
        children.setdefault(int(parent), []).append(pid)
        if state == "Z":
            ended.add(pid)
    found, unseen = [], [os.getpid()]
    while unseen:
        for pid in children.get(unseen.pop(), ()):
            if pid not in without:
                unseen.append(pid)
                found.append(pid)
    return [pid for pid in found if pid not in ended]


def _send(number, pids, group=None):
    """Send a signal to processes, of one group if given; ignore ended ones and other users'."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group in (None, os.getpgid(pid)):
                os.kill(pid, number)
