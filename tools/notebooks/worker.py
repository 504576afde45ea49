"""Execute one notebook in a new kernel; started by `run.py`, which may kill it at any time.

python tools/notebooks/worker.py NOTEBOOK TARGET SECONDS CORE

It writes the executed notebook to TARGET. A line of JSON on standard output reports each code cell
that starts or ends, and finally the failure, if any. SECONDS is the time limit of a cell; with CORE
(1 or 0) only the core is executed. The worker ends when its standard input is closed.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path

import nbformat
from contents import read_chapter
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

LONGEST = 95  # bytes of a socket's path, without its number; the limit of macOS is 103


def sockets(path):
    """Return settings of a kernel's manager, for sockets at `path`: others could take ports."""
    if os.name != "posix" or len(os.fsencode(path)) > LONGEST:
        return {}
    return {"transport": "ipc", "ip": path}


def execute(path, target, cell_seconds, core, report):
    """Execute the notebook at `path`, or its core, and write the executed one to `target`.

    `report`: a function that takes `cell`, the number of a code cell that starts, or `done`, of one
    that ended; finally `failure`, a line for the table, and `details`, both "" on success.
    """
    notebook, started = read_chapter(path, core), []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)

    def start(cell, cell_index):
        if cell.cell_type == "code":
            started.append(cell)
            report(cell=len(started))

    path_of_sockets = os.path.join(os.environ["JUPYTER_RUNTIME_DIR"], f"k{os.getpid()}")
    client = NotebookClient(
        notebook,
        timeout=cell_seconds,
        kernel_name="python3",
        config=Config({"KernelManager": sockets(path_of_sockets)}),
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,
        on_cell_start=start,
        on_cell_executed=lambda **_: report(done=len(started)),
    )
    variables = os.environ | {"JPY_SESSION_NAME": path.name}  # as from Jupyter
    failure = details = ""
    try:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(client.async_execute(env=variables))
    except CellExecutionError as error:
        details = str(error)
        failure = f"failed in cell {len(started)}: {error.ename}: {error.evalue}".splitlines()[0]
    except Exception as error:  # a dead kernel, a slow cell
        where = f"in cell {len(started)}" if started else "before the first cell"
        failure = f"failed {where}: {type(error).__name__}"
        source = [cell.source for cell in started[-1:]]
        details = "\n\n".join([*source, f"{type(error).__name__}: {error}"])
    nbformat.write(notebook, target)
    report(failure=failure, details=details)


def _end_with_standard_input():
    os.read(0, 1)  # not sys.stdin, whose lock would be held when Python ends
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel writes to its file descriptors is no report
    path, target, seconds, core = sys.argv[1:]
    execute(
        Path(path),
        Path(target),
        float(seconds),
        core == "1",
        lambda **report: print(json.dumps(report), file=reports, flush=True),
    )
