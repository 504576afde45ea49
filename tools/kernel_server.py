"""Forks Jupyter kernels from a process that has imported what all chapters import. On Linux only.

`run` starts it, with the number of an open socket. A request is a line of JSON, and so is its
answer: the arguments, folder and environment of a new kernel give its process id, {"ended": id}
its exit code, or null while it runs. It ends when the other end of the socket does.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import types
from multiprocessing import util

IMPORTS = (
    "torch._dynamo",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "matplotlib.pyplot",
    "d2lpar",
    "ipykernel.kernelapp",
)


def serve(channel):
    """Answer requests until there are no more."""
    del sys.path[0]  # the folder of this file
    import_ahead()
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


def import_ahead():
    """Import what the kernels, forks of this process, need not import then."""
    for name in IMPORTS:
        with contextlib.suppress(ImportError):  # the chapter that needs it will say so
            importlib.import_module(name)


def be_kernel(arguments, folder, environment):
    """Be a kernel, and end this process."""
    code = 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # by way of what follows `finally`
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        keep_fork_server()
        from ipykernel.kernelapp import launch_new_instance

        parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # with it the kernel ends
        launch_new_instance([*arguments, parent])
        code = 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        atexit._run_exitfuncs()  # os._exit leaves them out: temporary folders would stay
        os._exit(code)


def keep_fork_server():
    """Keep a fork of this process, in which `multiprocessing` is to start its fork server.

    A new Python would import torch first. A process can be forked as long as it has no threads.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner, pid = os.getpid(), os.fork()
    if not pid:
        ours.close()
        be_fork_server(its)
    its.close()
    spawn = util.spawnv_passfds

    def start(path, arguments, files):
        code, passed = arguments[-1], [0, 1, 2, *files]
        if "multiprocessing.forkserver" in code and os.getpid() == owner:
            util.spawnv_passfds = spawn
            state = dict(os.environ), os.getcwd(), [*os.sched_getaffinity(0)]
            with ours, contextlib.suppress(OSError):  # the fork has ended
                socket.send_fds(ours, [json.dumps([code, passed, *state]).encode()], passed)
                return pid
        return spawn(path, arguments, files)

    util.spawnv_passfds = start


def be_fork_server(channel):
    """Wait for the code, the open files and the state of a fork server, and be it; end after it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a kernel is interrupted with its group
    with channel:
        message, files, *_ = socket.recv_fds(channel, 2**20, 16)
    failed = bool(message)
    try:
        if message:
            code, numbers, environment, folder, cores = json.loads(message)
            copies = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
            for copy, number in zip(copies, numbers, strict=True):
                os.dup2(copy, number)
            for file in {*files, *copies} - {*numbers}:
                os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            os.sched_setaffinity(0, cores)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(code, main.__dict__)
    except SystemExit:  # so it ends
        failed = False
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(failed)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
