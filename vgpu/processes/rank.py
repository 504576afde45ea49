r"""One process of a parallel job: set up the process group, call a function, tear it down.

`launch` starts such processes on this machine. On several machines torchrun does; on each one:

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m vgpu.processes.rank train.py:train num_epochs=3 lr=0.1

calls `train(num_epochs=3, lr=0.1)` of the file train.py in every process; rank 0 prints its result.
`package.module:train` names a function of an installed module; `--timeout 300` before the name sets
the time limit of `run`. docs/several_machines.md has more options.
"""

import argparse
import ast
import contextlib
import gc
import importlib
import io
import linecache
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from vgpu import virtual_gpus
from vgpu.devices.device_setup import requested_settings
from vgpu.distributed import BACKEND
from vgpu.processes.roll_call import RollCall, is_timeout
from vgpu.runtime.registry import synchronize

TIMEOUT = 120.0  # seconds; torch's own default is 30 minutes
STREAMS = ("stdout", "stderr")


def run(fn, timeout=TIMEOUT, store=None, settings=None):
    """Call `fn()` in a process group of the elastic agent's processes; return its result.

    Each process has its own GPU as its current device, as in `launch`, whose `timeout` it has, with
    its TimeoutError. CPU tensors go through gloo, and on virtual GPUs their kernels use one thread.

    Args:
        store: the store of the process group; by default torchrun's.
        settings: arguments of `virtual_gpus`; by default those of VGPU_DEVICES.
    """
    limit = timedelta(seconds=timeout)
    if store is None:
        store = _store_of_torchrun(limit)
    store.set_timeout(limit)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, backend = _choose_device(settings)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device
    )
    roll_call = RollCall(store, rank, world_size)
    try:
        result = fn()
        synchronize()  # raises pending asynchronous errors
        roll_call.arrive_at_end(timeout)
    except RuntimeError as error:
        if not is_timeout(error):
            raise
        raise TimeoutError(roll_call.report(error, timeout)) from error
    # Freeing a DDP object after its process group can hang or abort the process.
    gc.collect()
    dist.destroy_process_group()
    roll_call.close()
    return result


def _store_of_torchrun(limit):
    store, _, _ = next(dist.rendezvous("env://", timeout=limit))
    if os.environ["GROUP_WORLD_SIZE"] == "1":  # several machines count attempts differently
        # All attempts share the agent's store, where keys of a killed attempt break gloo.
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt {attempt}", store)
    return store


def _choose_device(settings):
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if settings is None and has_gpus(local_size):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device, "cpu:gloo,cuda:nccl"
    torch.set_num_threads(1)
    device = virtual_gpus(**(settings or requested_settings(local_size)))[local_rank]
    torch.vgpu.set_device(device)
    # torch ignores device_id for Python backends, with this warning.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    return device, f"cpu:gloo,vgpu:{BACKEND}"


def has_gpus(count):
    """Return whether each of `count` processes can and may have a CUDA GPU."""
    return os.environ.get("VGPU_DEVICES", "") in ("", "cuda") and (
        torch.cuda.device_count() >= count
    )


def serve(folder, timeout):
    """Run the call in `folder`, write its result there, and end this process of `launch`.

    The file is `ATTEMPT.RANK.result` or `ATTEMPT.RANK.error`.
    """
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    signal.signal(signal.SIGINT, partial(_leave_to_parent, os.getpid()))
    # The default method: a DataLoader would start another fork server, which imports torch.
    multiprocessing.set_start_method(None, force=True)
    _write_to_files(folder)
    rank = int(os.environ["RANK"])
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    name = Path(folder, f"{attempt}.{rank}")
    code = 1
    try:
        sources, settings, call = cloudpickle.loads(Path(folder, "call").read_bytes())
        linecache.cache.update(sources)  # tracebacks show the lines of notebook cells
        fn, args, kwargs = _unpickled(call)
        # The result may hold a DDP object, so it is pickled and freed before the tear-down.
        run(
            lambda: _write(f"{name}.result", _pickled(fn(*args, **kwargs), rank)),
            timeout,
            store_of(folder, attempt, int(os.environ["WORLD_SIZE"])),
            settings,
        )
        code = 0
    except BaseException as error:
        _write(f"{name}.error", error_report(error, rank))
    for child in multiprocessing.active_children():
        child.terminate()
    _end(code)


def store_of(folder, attempt, world_size):
    """Return the store of an attempt, for a rank or for the process that called `launch`.

    It is a file: torch's TCPStore queries a name server for each connection.
    """
    return dist.FileStore(str(Path(folder, f"{attempt}.store")), world_size)


def output_path(folder, environment, stream):
    """Return the output file of a process with this environment; stream: "stdout" or "stderr"."""
    attempt, rank = environment["TORCHELASTIC_RESTART_COUNT"], environment["RANK"]
    return Path(folder, f"{attempt}.{rank}.{stream}")


def _write_to_files(folder):
    """Redirect the output of this process, of its C++ code and of its children to files."""
    for number, stream in enumerate(STREAMS, 1):
        with open(output_path(folder, os.environ, stream), "ab") as file:
            os.dup2(file.fileno(), number)
        text = open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)  # line by line
        setattr(sys, stream, text)


def _end(code):
    """End this process without destructors: freeing a DDP object now is not safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent(folder):
    multiprocessing.parent_process().join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _leave_to_parent(rank, number, frame):
    """Ignore an interrupt in the process `rank`, but not in its children.

    A terminal and Jupyter interrupt the whole group; the process that called `launch` ends ranks.
    """
    if os.getpid() != rank:
        signal.default_int_handler(number, frame)


def _unpickled(call):
    try:
        return cloudpickle.loads(call)
    except Exception as error:
        what = "the function or its arguments cannot be unpickled in another process"
        raise TypeError(f"{what}: {error}") from error


class _Pickler(cloudpickle.Pickler):
    """Pickles by value; refuses virtual GPUs and their tensors, which other processes lack."""

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor) and obj.device.type == "vgpu":
            raise TypeError(
                f"a tensor of shape {tuple(obj.shape)} on {obj.device} cannot leave its process: "
                "call .cpu() first, or create the tensor in the process that uses it"
            )
        if isinstance(obj, torch.device) and obj.type == "vgpu":
            raise TypeError(
                f"the device {obj} exists in one process only: "
                "call try_gpu() in the process that uses it"
            )
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 drops the file name
            return _code_in_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        return super().reducer_override(obj)


def _code_in_file(filename, make, arguments):
    """Return a code object with its file name, for tracebacks; pickle calls this."""
    return make(*arguments).replace(co_filename=filename)


def dumps(value):
    """Return a value as bytes, for `cloudpickle.loads` in another process.

    Raises TypeError for a virtual GPU or a tensor on one; other errors are cloudpickle's.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _pickled(result, rank):
    try:
        return dumps(result)
    except Exception as error:
        kind = type(result).__name__
        raise TypeError(f"rank {rank} returned a {kind} that cannot be pickled: {error}") from error


def error_report(error, rank):
    """Return, pickled: the time, the exception or None, its summary and its traceback."""
    moment = time.time()
    report = traceback.TracebackException.from_exception(error)
    part = report
    while part:  # drop the frames of this file
        part.stack[:] = [frame for frame in part.stack if frame.filename != __file__]
        part = part.__cause__ or part.__context__
    text = "".join(report.format()).rstrip()
    summary = "".join(report.format_exception_only()).strip()
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            error = cloudpickle.dumps(error)
    else:  # sys.exit() or an interrupt, not to be raised in a notebook
        summary = f"rank {rank} was ended by {error!r}"
    return cloudpickle.dumps((moment, error if isinstance(error, bytes) else None, summary, text))


def _write(path, data):
    """Write a file atomically."""
    Path(f"{path}.part").write_bytes(data)
    os.replace(f"{path}.part", path)


def main():
    """Run a function of a file or a module under torchrun; see the docstring of this module."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m vgpu.processes.rank", description=main.__doc__
    )
    parser.add_argument("function", help="train.py:train or package.module:train")
    parser.add_argument("arguments", nargs="*", help="name=value, a Python literal or a text")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds, by default 120")
    options = parser.parse_args()
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(_run_named)(options)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


def _run_named(options):
    module, _, name = options.function.rpartition(":")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        module = Path(module).stem
    fn = getattr(importlib.import_module(module), name)
    kwargs = dict(map(parse_argument, options.arguments))
    result = run(lambda: fn(**kwargs), options.timeout)
    if result is not None and os.environ["RANK"] == "0":
        print(result)


def parse_argument(text):
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"arguments must be name=value: got {text!r}")
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    return name, value


if __name__ == "__main__":
    main()
