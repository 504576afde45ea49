"""`d2lpar run`: a command whose processes have virtual GPUs under the names of CUDA's.

This starts the command, passes on what asks it to end, leaves nothing behind, and says at the end
what the ranks did. It does not import torch: the command does. All this needs Linux.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .autoload import GPUS, REPORTS, TRACE
from .summary import read_reports, summary, write_trace

assert sys.platform == "linux", "the command has refused the others"

SECONDS_TO_END = 5.0  # for what was asked to end
SECONDS_FOR_CHILDREN = 1.0  # for children to end by themselves once the command has ended
SECONDS_BETWEEN_LOOKS = 0.05
NOT_FOUND, CANNOT_RUN = 127, 126  # exit codes, as of a shell
_PR_SET_CHILD_SUBREAPER = 36


def run_command(command, gpus, model=None, trace=None):
    """Run a command and return its exit code.

    Args:
        command: a list of texts: a program and its arguments.
        gpus: how many virtual GPUs each of its processes sees.
        model: the GPU or the machine that is modelled, by its name; None for the wall clock.
        trace: path of a trace of all ranks to write; or None.
    """
    if trace is not None and not os.path.isdir(os.path.dirname(os.path.abspath(trace))):
        print(f"d2lpar run: there is no folder for the trace {trace}", file=sys.stderr)
        return CANNOT_RUN
    folder = tempfile.mkdtemp(prefix="d2lpar-run-")
    try:
        environment = {
            **os.environ,
            GPUS: f"{model or 'vgpu'}:{gpus}",
            REPORTS: folder,
            TRACE: "1" if trace else "",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        }
        began = time.perf_counter()
        try:
            code = _Job(command, environment).wait()
        except OSError as error:
            print(f"d2lpar run: {command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN
        seconds = time.perf_counter() - began
        reports = read_reports(folder)
        sys.stdout.flush()
        print(summary(reports, gpus, seconds, code), file=sys.stderr)
        if trace is not None:
            write_trace(trace, reports, folder, began)
            print(f"trace: {trace} (open it in https://ui.perfetto.dev)", file=sys.stderr)
        return code
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Job:
    """A command and all processes that it starts.

    It has a process group of its own, so that an interrupt in a terminal reaches this process
    alone, which passes it on once. If the terminal is its input, it gets the terminal, too, and
    with it the interrupts, as a shell's command does.
    """

    def __init__(self, command, environment):
        self._asked_to_end = None  # since when
        self._handlers = {}
        self._before = _descendants()
        _adopt_orphans(True)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._pass_on)
        try:
            self._process = subprocess.Popen(command, env=environment, process_group=0)
        except BaseException:
            self._restore()
            raise
        self._terminal = _give_terminal(self._process.pid)

    def wait(self):
        """Wait until the command has ended, end what it left, and return its exit code."""
        try:
            while self._process.poll() is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if self._asked_to_end and time.monotonic() > self._asked_to_end + SECONDS_TO_END:
                    self._kill()
            self._end_children()
        finally:
            if self._terminal is not None:
                _take_terminal(self._terminal)
            self._restore()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _pass_on(self, number, frame):
        """Pass a signal on to the command, once; at the second one end everything."""
        if self._asked_to_end is None:
            self._asked_to_end = time.monotonic()
            _signal_group(self._process.pid, number)
        else:
            self._kill()

    def _kill(self):
        _signal_group(self._process.pid, signal.SIGKILL)
        _signal(self._descendants(), signal.SIGKILL)

    def _end_children(self):
        """End the processes that the command has left, first gently."""
        for ask, seconds in (
            (None, SECONDS_FOR_CHILDREN),
            (signal.SIGTERM, SECONDS_TO_END),
            (signal.SIGKILL, SECONDS_TO_END),
        ):
            left = self._descendants()
            if ask is not None:
                _signal(left, ask)
            deadline = time.monotonic() + seconds
            while left and time.monotonic() < deadline:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                left = self._descendants()
            if not left:
                return

    def _descendants(self):
        """Return the processes that descend from this one, without those that were there before."""
        return _descendants(self._before)

    def _restore(self):
        _adopt_orphans(False)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _adopt_orphans(yes):
    """Let this process be the parent of descendants whose parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _descendants(without=()):
    """Return the numbers of the processes that descend from this one and still run, a list.

    Args:
        without: numbers of processes to leave out, with all that descend from them.
    """
    children, ended = {}, set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it has just ended
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


def _signal(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _signal_group(group, number):
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _give_terminal(group):
    """Let a process group be the one that the terminal talks to; return the one before, or None."""
    try:
        before = os.tcgetpgrp(0)
        if before != os.getpgrp():
            return None
        os.tcsetpgrp(0, group)
        _signal_group(group, signal.SIGCONT)  # it may have asked for input too early
    except OSError:  # the input is no terminal
        return None
    return before


def _take_terminal(group):
    """Let the terminal talk to a process group again; this one is in the background now."""
    ignored = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        os.tcsetpgrp(0, group)
    except OSError:
        pass
    finally:
        signal.signal(signal.SIGTTOU, ignored)
