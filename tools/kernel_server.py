"""Forks Jupyter kernels from a process that has imported what all chapters import. On Linux only.

`run` starts it, with the number of an open socket. A request is a line of JSON, and so is its
answer: the arguments, folder and environment of a new kernel give its process id, {"ended": id}
its exit code, or null while it runs. It ends when the other end of the socket does.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

IMPORTS = ("torch._dynamo", "matplotlib.pyplot", "d2lpar", "ipykernel.kernelapp")


def serve(channel):
    """Answer requests until there are no more."""
    del sys.path[0]  # the folder of this file
    for name in IMPORTS:
        with contextlib.suppress(ImportError):  # the chapter that needs it will say so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with channel.makefile("rw") as file:
        for line in file:
            request = json.loads(line)
            if "ended" in request:
                pid, status = os.waitpid(request["ended"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            elif not (answer := os.fork()):
                be_kernel(**request)
            print(json.dumps(answer), file=file, flush=True)


def be_kernel(arguments, folder, environment):
    """Be a kernel, and end this process."""
    code = 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by way of what follows `finally`
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        from ipykernel.kernelapp import launch_new_instance

        parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # with it the kernel ends
        launch_new_instance([*arguments, parent])
        code = 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit._run_exitfuncs()  # os._exit leaves them out: temporary folders would stay
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
