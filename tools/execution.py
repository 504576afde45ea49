"""Executes a submitted notebook, as process 1 of a sandbox: what its code does ends there.

`serve` is that process. It starts a session, a process with nbclient and a kernel, and watches it.
The session tells the outputs of each cell. When a cell takes too long, it is interrupted. When that
does not help, or the session uses up the memory, or dies, everything but process 1 is ended, and
the next session goes on with the next cell. Setup and given cells are executed again for it.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time

import nbformat
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.connect import write_connection_file
from kernel_server import be_kernel
from nbclient import NotebookClient
from sandbox import FOLDER, Channel, be_seen, clear, overrun

OUTPUT = 2**20  # bytes that a cell may show
GRACE = 3.0  # seconds in which an interrupted cell ends
START = 60.0  # seconds in which a kernel starts
POLL = 0.1
CONNECTION = "/tmp/kernel.json"


def serve(channel):
    """Execute the notebook that the channel gives, and tell what comes of it.

    Tells `{"cell": i, "fault": word}`, with "outputs" and "execution_count" if the cell has ended.
    """
    request = channel.read()
    if request is None:  # there was nothing to execute
        return
    cells = request["cells"]
    start, deadly = 0, set()
    while start < len(cells):
        again = [i for i in range(start) if cells[i]["given"] and i not in deadly]
        order = again + list(range(start, len(cells)))
        last = _watch(channel, cells, order, start, request["cell_seconds"])
        clear()
        if last is None:
            break
        deadly.add(last)
        start = max(start, last + 1)
    channel.write("done")


def _watch(channel, cells, order, start, cell_seconds):
    """Run a session; return the cell that it did not survive, None if it came to its end."""
    ours, its = socket.socketpair()
    if not os.fork():
        try:
            ours.close()
            channel.close()
            _be_session(Channel(its), [(i, cells[i]["source"]) for i in order])
        finally:
            os._exit(1)
    its.close()
    kernel, current, fault, begun, limit = None, order[0], "", time.monotonic(), START
    told, stopped = b"", ""
    with ours:
        while True:
            if select.select([ours], [], [], POLL)[0]:
                told += (new := ours.recv(2**20))
                if not new:
                    fault = fault or "killed"
                    break
                *lines, told = told.split(b"\n")
                for line in map(json.loads, lines):
                    if "kernel" in line:
                        kernel = line["kernel"]
                    elif "begins" in line:
                        current, fault = line["begins"], ""
                        begun, limit = time.monotonic(), cell_seconds
                    elif "finished" in line:
                        return None
                    elif "stops" in line:
                        stopped = line["stops"]
                    elif line["cell"] >= start:
                        channel.write({**line, "fault": fault})
            if stopped := stopped or overrun():
                fault = stopped
                break
            if time.monotonic() > begun + limit:
                if fault:
                    break
                fault, limit = "time", limit + GRACE
                if kernel:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(kernel, signal.SIGINT)
    channel.write({"cell": current, "fault": fault})
    return current


def _be_session(channel, cells):
    """Start a kernel, have it execute the cells, and tell their outputs."""
    os.nice(10)  # process 1 goes before
    os.chdir(FOLDER)
    write_connection_file(CONNECTION)
    pid = os.fork()
    if not pid:
        channel.close()
        os.closerange(3, 4096)
        be_seen()
        sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
        be_kernel(["-f", CONNECTION, "--HistoryManager.hist_file=:memory:"], FOLDER, _environment())
    channel.write({"kernel": pid})
    asyncio.run(_execute(channel, Kernel(pid), cells))
    channel.write({"finished": True})


def _environment():
    return {
        "HOME": FOLDER,
        "IPYTHONDIR": "/tmp/ipython",
        "JUPYTER_RUNTIME_DIR": "/tmp",
        "LANG": "C.UTF-8",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "USER": "student",
    }


async def _execute(channel, kernel, cells):
    client = AsyncKernelClient(connection_file=CONNECTION)
    client.load_connection_file()
    client.allow_stdin = False
    client.start_channels()
    await client.wait_for_ready(timeout=START)
    code = [nbformat.v4.new_code_cell(source) for _, source in cells]
    runner = Client(nbformat.v4.new_notebook(cells=code), kernel, channel)
    runner.kc = client
    for place, (number, _) in enumerate(cells):
        channel.write({"begins": number})
        runner.num_bytes = 0
        cell = await runner.async_execute_cell(code[place], place)
        count = cell.execution_count
        channel.write({"cell": number, "outputs": cell.outputs, "execution_count": count})


class Kernel:
    """What nbclient wants to know of a kernel; when that ends, so does this process."""

    def __init__(self, pid):
        self.pid = pid
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self):
        os.waitpid(self.pid, 0)
        os._exit(1)

    async def is_alive(self):
        """Tell whether it runs."""
        return True


class Client(NotebookClient):
    """Executes cells, and gives up one that shows too much."""

    def __init__(self, notebook, kernel, channel):
        super().__init__(
            notebook,
            km=kernel,
            timeout=None,
            allow_errors=True,
            coalesce_streams=True,
            record_timing=False,
            store_widget_state=False,
        )
        self.channel = channel

    def process_message(self, msg, cell, cell_index):
        """Take what the kernel tells, an output for example."""
        self.num_bytes += len(json.dumps(msg["content"]))
        if self.num_bytes > OUTPUT:
            self.channel.write({"stops": "output"})
            os.kill(self.km.pid, signal.SIGSTOP)
            time.sleep(START)  # process 1 ends it
        return super().process_message(msg, cell, cell_index)
