"""Tests that run in every rank of a job, one after the other in the same processes.

To start the processes takes a second or two; a test in them takes milliseconds.
"""

import contextlib
import faulthandler
import functools
import inspect
import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from gates import elsewhere

from vgpu import virtual_gpus

LIMIT = 60  # seconds for one test
SETTLE = 3  # seconds for the other ranks, once one has failed
SORTS_ON_REQUEST = "sort_ranks" in inspect.signature(dist.new_group).parameters
PATIENCE = 20  # seconds that a collective waits, unless a test says otherwise
_jobs = {}  # number of ranks -> Job
_numbers = itertools.count()
_after_test = contextlib.ExitStack()


class Job:
    """Processes that form a gloo group and run functions together.

    Args:
        size: number of ranks.
    """

    def __init__(self, size):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "vgpu.devices.backend", "pytest"])
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, str(Path(self.folder.name, "store")), theirs
            process = context.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function, *args, may_die=(), last=False):
        """Call a function in all ranks; return what it returned in each, in their order.

        Args:
            function, *args: what is called.
            may_die: ranks that may end instead of returning.
            last: whether the processes shall end then, and are left as the function leaves them.
        """
        last = last or bool(may_die)
        for connection in self.connections:
            connection.send_bytes(cloudpickle.dumps((function, args, not last)))
        results, errors = {}, []
        deadline = time.monotonic() + LIMIT
        while len(results) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in results]
            for connection in wait(waiting, max(0, deadline - time.monotonic())):
                rank = self.connections.index(connection)
                try:
                    succeeded, results[rank] = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    succeeded, results[rank] = rank in may_die, "it has ended"
                if not succeeded:
                    errors.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + SETTLE)
            if time.monotonic() >= deadline:
                break
        if len(results) < len(self.connections):
            missing = [rank for rank in range(len(self.connections)) if rank not in results]
            errors.append(f"ranks {missing} did not return:\n" + self._stacks(missing))
        if errors or last:
            self.end()
        assert not errors, "\n".join(errors)
        return [results[rank] for rank in sorted(results)]

    def _stacks(self, ranks):
        texts = []
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        for rank in ranks:
            path = Path(self.folder.name, f"store.stacks{rank}")
            texts.append(f"rank {rank}\n{path.read_text() if path.exists() else ''}")
        return "\n".join(texts)

    def end(self):
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        self.folder.cleanup()
        for size, job in list(_jobs.items()):
            if job is self:
                del _jobs[size]


def job_of(size):
    """Return the `Job` of so many ranks that tests share."""
    for last_try in (False, False, True):
        if size not in _jobs:
            _jobs[size] = Job(size)
            try:
                _jobs[size].run(int)
            except AssertionError:  # gloo does not always find its peers at the first try
                if last_try:
                    raise
    return _jobs[size]


def end_jobs():
    for job in list(_jobs.values()):
        job.end()


def in_ranks(*sizes):
    """Let a test run in every rank of jobs of so many ranks."""

    def decorate(function):
        @functools.wraps(function)
        def test(size):
            job_of(size).run(function)

        del test.__wrapped__  # pytest would look at its parameters
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


def in_group(*sizes, **figures):
    """Let a test run in every rank, as `in_ranks` does, with what `set_up(**figures)` returns."""

    def decorate(function):
        @functools.wraps(function)
        def in_rank():
            function(*set_up(**figures))

        return in_ranks(*sizes)(in_rank)

    return decorate


def in_groups(*sizes):
    """Let a test run as `in_group` does, and once more `elsewhere`, with the ranks reversed."""

    def decorate(function):
        def in_rank(is_reversed):
            if is_reversed:
                virtual_gpus(dist.get_world_size())
                elsewhere(lambda: function(*set_up(is_reversed=True)))
            else:
                function(*set_up())

        @functools.wraps(function)
        def test(size, is_reversed):
            job_of(size).run(in_rank, is_reversed)

        del test.__wrapped__
        orders = pytest.mark.parametrize("is_reversed", [False, True], ids=["in_order", "reversed"])
        return orders(pytest.mark.parametrize("size", sizes)(test))

    return decorate


# -- in a rank


def _serve(rank, size, path, connection):
    with open(f"{path}.stacks{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        torch.set_num_threads(1)
        limit = timedelta(seconds=LIMIT)
        store = dist.FileStore(path, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        multiprocessing.set_start_method("fork", force=True)
        while call := _next_call(connection):
            connection.send_bytes(cloudpickle.dumps(_answer(*cloudpickle.loads(call))))
        os._exit(0)


def _next_call(connection):
    with contextlib.suppress(EOFError, OSError):
        return connection.recv_bytes()


def _answer(function, args, goes_on):
    global _signals
    _signals = dist.PrefixStore(
        f"signals {next(_numbers)}", dist.distributed_c10d._get_default_store()
    )
    try:
        with _after_test:
            result = function(*args)
        if not goes_on:
            return True, result
        dist.barrier()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        return True, result
    except BaseException as error:
        return False, "".join(traceback.format_exception(error))


def after_test(function, *args):
    """Let this rank call a function once its test is over, whether it passes or not."""
    _after_test.callback(function, *args)


def tell(name):
    _signals.set(name, "")


def hear(name):
    _signals.wait([name], timedelta(seconds=LIMIT / 2))


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def a_group(ranks=None, timeout=PATIENCE, backend="vccl"):
    """Return a new group of some ranks, by default all, whose tensors are on virtual GPUs.

    Its ranks are numbered in their order here; torch 2.11 sorts them.
    """
    options = {"sort_ranks": False} if SORTS_ON_REQUEST else {}
    return dist.new_group(ranks, timedelta(seconds=timeout), backend, **options)


def set_up(timeout=PATIENCE, make=virtual_gpus, backend="vccl", is_reversed=False, **figures):
    """Return this rank's number in a group of all ranks, its virtual GPU and the group."""
    size = dist.get_world_size()
    devices = make(size, **figures)
    group = a_group([*range(size)][::-1] if is_reversed else None, timeout, backend)
    rank = dist.get_rank(group)
    torch.vgpu.set_device(rank)
    return rank, devices[rank], group


def failure_of(function):
    """Return the text of the error that a call, or the next synchronize, raises."""
    try:
        function()
        torch.vgpu.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
