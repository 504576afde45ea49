"""Executes a submitted notebook in a sandbox, and enforces its limits.

`session.py` runs inside, with nbclient and a kernel, and reports the outputs of each cell. It
interrupts a cell that takes too long. When that does not help, or the session uses up the memory,
or dies, the sandbox is ended, and another one goes on with the next cell. Given cells, such as the
set-up, are executed again in it.
"""

import json
import select
import socket
import sys
import time
from pathlib import Path

from sandbox import Sandbox

GRACE = 3.0  # seconds in which an interrupted cell ends
START = 60.0  # seconds in which a kernel starts
POLL = 0.1
REPORT = 2**26  # bytes that a line of a report may have
SESSION = Path(__file__).with_name("session.py").read_text()


def execute(cells, given, cell_seconds, notebook_seconds, hidden, packages):
    """Execute the code cells of a notebook.

    Args:
        cells: the sources of the cells.
        given: for each whether to execute it again in a further kernel.
        cell_seconds: how long each may take.
        notebook_seconds: how long all may take together.
        hidden: folders that the code must not see.
        packages: the folders of packages that it may import, beside the installed ones; they lie
            in the same folder.

    Yields:
        For each cell its number, a word for what went wrong or "", and the cell with its outputs,
        or None if it was not executed to its end.

    Raises:
        TimeoutError: after `notebook_seconds`.
    """
    end = time.monotonic() + notebook_seconds
    start, deadly = 0, set()
    while start < len(cells):
        numbers = [i for i in range(start) if given[i] and i not in deadly]
        numbers += range(start, len(cells))
        request = {"cells": [(i, cells[i]) for i in numbers], "cell_seconds": cell_seconds}
        ours, its = socket.socketpair()
        program = [sys.executable, "-c", SESSION, its.fileno(), Path(packages[0]).parent]
        with ours, its, Sandbox(program, hidden, packages, its.fileno()) as box:
            its.close()
            ours.sendall(json.dumps(request).encode() + b"\n")
            survived = False
            for number, fault, cell in _watch(ours, box, numbers[0], cell_seconds, end):
                survived = cell is not None
                if number >= start or not survived:
                    yield number, fault, cell
        if survived:
            return
        deadly.add(number)
        start = max(start, number + 1)


def _watch(ours, box, current, cell_seconds, end):
    """Yield what a session reports; the last has no cell if the session did not survive it."""
    fault, received, deadline = "", b"", time.monotonic() + START
    running = False
    while not fault:
        if select.select([ours], [], [], POLL)[0]:
            received += (new := ours.recv(2**20))
            *lines, received = received.split(b"\n")
            for report in map(json.loads, lines):
                if "begins" in report:
                    current, running = report["begins"], True
                    deadline = time.monotonic() + cell_seconds + GRACE
                elif "finished" in report:
                    return
                elif "cell" in report:
                    yield report["cell"], report["fault"], report
                else:
                    fault = report["fault"]
            if not new or len(received) > REPORT:
                fault = fault or "killed"
        if time.monotonic() > end:
            raise TimeoutError
        if running:
            fault = fault or box.overrun()
        if time.monotonic() > deadline:
            fault = fault or "time"
    yield current, fault, None
