"""Processes that begin with torch imported, and nothing else done: each a fork of one that waits.

To import torch takes seconds; a fork takes none. What runs in a fork is the main program of a
process of its own, with this process's environment. It ends as a process does where it ends with
`sys.exit`; otherwise its modules are not torn down.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from types import SimpleNamespace

TORCH = "torch"
SET_UP = "torch, torch._dynamo"  # what `virtual_gpus` imports, too

SERVER = """
import atexit, gc, os, socket, sys, threading
gc.disable()  # what is imported is no garbage
import {imports}

gc.freeze()  # else the end of each process goes through it
gc.enable()
channel = socket.socket(fileno=int(sys.argv.pop()))
while True:
    request, files, _, _ = socket.recv_fds(channel, 2**20, 3)
    if not request:
        sys.exit()
    if not (pid := os.fork()):
        break
    for file in files:
        os.close(file)
    channel.send(str(pid).encode())
    channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
channel.close()
os.setsid()  # a Ctrl-C is for the tests
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
code, environment = eval(request)
os.environ.clear()
os.environ.update(environment)
exec(code, {{"__name__": "__main__"}})
# The end of a process, but that modules stay: to tear them down takes longer than most programs.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


@functools.cache
def server(imports):
    """Return the socket of a process that forks when it is asked to.

    It has imported `imports`, and run the statements in the lines after them, if there are any. It
    ends when the socket is closed, at the latest with this process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", SERVER.format(imports=imports), str(theirs.fileno())]
    subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
    )
    theirs.close()
    return ours


class Process:
    """A process that runs `code`; one at a time of each kind, that is, of each `imports`."""

    def __init__(self, code, imports, stdin, stdout, stderr):
        self.server = server(imports)
        files = [file.fileno() for file in (stdin, stdout, stderr)]
        request = repr((code, dict(os.environ))).encode()
        socket.send_fds(self.server, [request], files)
        self.pid = int(self.server.recv(100))
        self.status = None

    def wait(self, timeout=None):
        """Return its exit status; raises TimeoutError."""
        if self.status is None:
            self.server.settimeout(timeout)
            try:
                self.status = int(self.server.recv(100))
            finally:
                self.server.settimeout(None)
        return self.status

    def end(self):
        if self.status is None:  # else another process may have its number by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def run(code, imports, timeout=120):
    """Run `code` in a process of its own; return its `returncode`, `stdout` and `stderr`."""
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull))
        printed = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
        process = Process(code, imports, nothing, *printed)
        try:
            status = process.wait(timeout)
        finally:
            process.end()
        for file in printed:
            file.seek(0)
        stdout, stderr = (file.read() for file in printed)
        return SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)


def printed(code, imports):
    """Run `code` as `run` does; return what it printed. It must end without an error."""
    done = run(code, imports)
    assert done.returncode == 0, done.stderr
    return done.stdout
