"""Execute cells inside a sandbox, with nbclient and a kernel; started by `execution.py`.

python session.py FD FOLDER    FD is the file descriptor of a socket for lines of JSON; the code
                               can import packages in FOLDER
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

OUTPUT = 2**20  # maximum output of a cell, in bytes
PR_SET_DUMPABLE = 4
KEYCTL = {"x86_64": 250, "aarch64": 219}  # number of the system call
JOIN_SESSION_KEYRING = 1  # as in sandbox.py, which cannot be imported here


class Client(NotebookClient):
    """An nbclient that ends the sandbox if a cell has too much output."""

    num_bytes = 0

    def process_message(self, msg, cell, cell_index):
        """Process a message of the kernel, for example an output."""
        self.num_bytes += len(json.dumps(msg["content"]))
        if self.num_bytes > OUTPUT:
            self.report(fault="output")
            os._exit(1)
        return super().process_message(msg, cell, cell_index)

    def report(self, **message):
        """Send a line to `execution.py`."""
        self.channel.sendall(json.dumps(message).encode() + b"\n")


async def main(channel):
    """Read the cells to execute, and report the outputs of each."""
    with channel.makefile("r") as file:
        request = json.loads(file.readline())
    asyncio.get_running_loop().add_reader(channel, os._exit, 1)  # if the other end closes
    cells = [new_code_cell(source) for _, source in request["cells"]]
    client = Client(
        new_notebook(cells=cells), timeout=None, allow_errors=True, coalesce_streams=True
    )
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
    libc.prctl(PR_SET_DUMPABLE, 0)  # prevents the kernel from forging our reports
    try:
        # Replace the keyring of the grading user by an empty, anonymous one.
        if libc.syscall(KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None) < 0:
            raise OSError(ctypes.get_errno(), "no keyring of its own")
        os.environ["PYTHONPATH"] = sys.argv[2]  # of the kernel
        asyncio.run(main(socket.socket(fileno=int(sys.argv[1]))))
    finally:
        os._exit(1)
