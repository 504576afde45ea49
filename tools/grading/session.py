"""Executes cells inside a sandbox: nbclient and a kernel. `execution.py` starts it there.

python session.py FD FOLDER    FD is the number of a socket that carries lines of JSON; the code
                               may import what lies in FOLDER
"""

import asyncio
import ctypes
import json
import os
import platform
import socket
import subprocess
import sys

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

OUTPUT = 2**20  # bytes that a cell may show
PR_SET_DUMPABLE = 4
KEYCTL = {"x86_64": 250, "aarch64": 219}  # number of the system call
JOIN_SESSION_KEYRING = 1  # as in sandbox.py, which cannot be imported inside


class Client(NotebookClient):
    """Executes cells, and ends the sandbox when one shows too much."""

    num_bytes = 0

    def process_message(self, msg, cell, cell_index):
        """Take a message of the kernel, an output for example."""
        self.num_bytes += len(json.dumps(msg["content"]))
        if self.num_bytes > OUTPUT:
            self.report(fault="output")
            os._exit(1)
        return super().process_message(msg, cell, cell_index)

    def report(self, **message):
        """Send a line to the other end."""
        self.channel.sendall(json.dumps(message).encode() + b"\n")


async def main(channel):
    """Read which cells to execute, and report the outputs of each."""
    with channel.makefile("r") as file:
        request = json.loads(file.readline())
    asyncio.get_running_loop().add_reader(channel, os._exit, 1)  # the other end has gone
    cells = [new_code_cell(source) for _, source in request["cells"]]
    client = Client(new_notebook(cells=cells), timeout=None, allow_errors=True)
    client.channel = channel
    async with client.async_setup_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        for place, (number, _) in enumerate(request["cells"]):
            client.report(begins=number)
            client.num_bytes = 0
            execution = asyncio.ensure_future(client.async_execute_cell(cells[place], place))
            done, _ = await asyncio.wait([execution], timeout=request["cell_seconds"])
            if not done:
                await client.km.interrupt_kernel()
            cell = await execution
            client.report(
                cell=number,
                fault="" if done else "time",
                outputs=cell.outputs,
                execution_count=cell.execution_count,
            )
        client.report(finished=True)
        os._exit(0)


if __name__ == "__main__":
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0)  # keep the kernel from reporting in our name
    try:
        # Leave the keyring of whoever grades for an empty one, without a name.
        if libc.syscall(KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None) < 0:
            raise OSError(ctypes.get_errno(), "no keyring of its own")
        os.environ["PYTHONPATH"] = sys.argv[2]  # of the kernel
        asyncio.run(main(socket.socket(fileno=int(sys.argv[1]))))
    finally:
        os._exit(1)
