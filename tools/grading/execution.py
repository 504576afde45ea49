"""Execute a submitted notebook in a sandbox, and enforce its limits.

`session.py` runs inside, with nbclient and a kernel, reports the outputs of each cell, and
interrupts a cell that takes too long. If the interrupt fails, memory runs out or the session dies,
the sandbox is killed, and another one continues with the next cell, after executing given cells
such as the set-up again.
"""

import json
import select
import socket
import sys
import time
from pathlib import Path

from sandbox import Sandbox

GRACE = 3.0  # time limit of an interrupted cell, in seconds
START = 60.0  # time limit of the start of a kernel, in seconds
POLL = 0.1
REPORT = 2**26  # maximum length of a line of a report, in bytes
SESSION = Path(__file__).with_name("session.py").read_text()


def execute(cells, given, cell_seconds, notebook_seconds, hidden, packages):
    """Execute the code cells of a notebook.

    Args:
        cells: the sources of the cells.
        given: for each cell whether to execute it again in a new kernel.
        cell_seconds, notebook_seconds: time limits.
        hidden: folders that must be hidden from the code.
        packages: folders of packages beside the installed ones, with the same parent folder.

    Yields:
        For each cell its number, a key of `grade.FAULTS` or "", and the report with its outputs, or
        None if it was not executed to its end.

    Raises:
        TimeoutError: the notebook exceeds its time limit.
    """
    end = time.monotonic() + notebook_seconds
    start, fatal = 0, set()
    while start < len(cells):
        numbers = [i for i in range(start) if given[i] and i not in fatal]
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
        fatal.add(number)
        start = max(start, number + 1)


def _watch(ours, box, current, cell_seconds, end):
    """Yield the reports of a session; the last one is None if the session did not survive."""
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
