"""Parameter servers: tensors in server processes; workers pull them and push updates.

Servers are Ray actors, workers are Ray tasks. Every tensor is flattened and divided into one range
per server. A push adds to the values, so pushes commute (Li et al., OSDI'14); ticks bound how far
workers drift apart (Ho et al., NeurIPS 2013).
"""

import contextlib
import traceback
import uuid
import warnings

import cloudpickle
import numpy as np
import torch

from d2lpar.chapters.parameter_server import actors
from d2lpar.chapters.parameter_server.ray_setup import ray_module, start_ray

TRIES_TO_STOP, SECONDS_A_TRY = 15, 2.0


@contextlib.contextmanager
def parameter_servers(values, num_servers=1, replicas=0):
    """Context manager: store tensors in server processes; yield a `Store`.

        with parameter_servers({"w": torch.zeros(10)}, num_servers=2) as store:
            store.run(train, num_workers=3)  # calls train(worker) in three processes
            w = store.pull("w")

    Workers and servers always end with the block, and so does Ray if this call started it. Call
    `start_ray` before to start several blocks faster.

    Args:
        values: a dict from names to tensors, the initial values.
        num_servers: number of servers. Each stores a range of every tensor, flattened.
        replicas: number of replicas of each server. A push is acknowledged once all have it. A
            server or replica that dies is replaced, and restored from another: a server at
            once, its last replica at the next push.

    Raises:
        ValueError: there are no values, or a number is out of range.
        TypeError: a value cannot be converted to a NumPy array.
    """
    if not values:
        raise ValueError("values must be a dict from names to tensors: got none")
    arrays = {name: _array(f"tensor {name!r}", value) for name, value in values.items()}
    _check_count("num_servers", num_servers, 1)
    _check_count("replicas", replicas, 0)
    starts = not ray_module().is_initialized()
    store = Store()
    try:
        start_ray()
        store.open(arrays, num_servers, replicas)
        yield store
    finally:
        store.close()
        if starts:
            ray_module().shutdown()


def _check_count(name, number, least):
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be an integer, {least} or more: got {number!r}")


def _array(what, value):
    """Return a tensor as an array, without a copy if it is on the CPU."""
    try:
        return value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{what} must be a tensor of a type that NumPy has: {error}") from None


class Client:
    """A client that pulls from the servers of a store and pushes to them.

    Attributes:
        name: "driver", or "worker 0" and so on.
        servers: the actors.
        layout: a dict from names of tensors to their shapes and NumPy dtypes.
    """

    def __init__(self, name, servers, layout):
        self.name, self.servers, self.layout = name, servers, layout
        self._number = 0

    def pull(self, name):
        """Return a tensor of the store.

        Raises:
            KeyError: the store has no such tensor.
            RuntimeError: a server without replica died.
        """
        shape, _ = self._find(name)
        parts = self._answers([server.pull.remote(name) for server in self.servers])
        return torch.from_numpy(np.concatenate(parts).reshape(shape))

    def push(self, name, values):
        """Add values to a tensor; return once all its servers and their replicas have them.

        Args:
            name: the name of the tensor.
            values: a tensor of the same shape.

        Raises:
            KeyError, RuntimeError: as in `pull`.
            ValueError: the shape of `values` is wrong.
        """
        shape, dtype = self._find(name)
        values = _array(f"what is pushed to {name!r}", values).astype(dtype, copy=False)
        if values.shape != shape:
            raise ValueError(f"a push to {name!r} must have the shape {shape}: got {values.shape}")
        self._number += 1
        parts = np.array_split(values.reshape(-1), len(self.servers))
        calls = [
            server.push.remote((self.name, self._number, name, part))
            for server, part in zip(self.servers, parts, strict=True)
        ]
        self._answers(calls)

    def _find(self, name):
        if name not in self.layout:
            raise KeyError(f"no tensor {name!r} in the store: choose {', '.join(self.layout)}")
        return self.layout[name]

    def _answers(self, calls):
        ray = ray_module()
        try:
            return ray.get(calls)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError("a parameter server died, and no replica has its values") from error


class Worker(Client):
    """The first argument of a function that `Store.run` calls: a client that counts its ticks.

    Attributes:
        rank: the index of the worker in its store, from 0.
    """

    def __init__(self, rank, servers, layout, tick_counter):
        super().__init__(f"worker {rank}", servers, layout)
        self.rank, self._tick_counter = rank, tick_counter

    def tick(self, staleness=0):
        """Count a step as done; wait for workers more than `staleness` steps behind.

        Workers that have returned do not count.

        Args:
            staleness: 0 keeps workers in step (BSP), infinity never waits (ASP), values in between
                bound the staleness (SSP).

        Returns:
            The number of steps by which this worker is ahead of the slowest.
        """
        return ray_module().get(self._tick_counter.tick.remote(self.rank, staleness))

    def leave(self):
        """Leave: other workers no longer wait for this one."""
        ray_module().get(self._tick_counter.leave.remote(self.rank))


class Store(Client):
    """The tensors on parameter servers; also a `Client`, named "driver".

    `ray.kill(store.servers[0], no_restart=False)` simulates the failure of a server.
    """

    def __init__(self):
        super().__init__("driver", [], {})
        self._actors, self._running, self._num_workers = [], [], 0

    def open(self, values, num_servers, replicas):
        """Start the servers and the tick counter, and load the values, a dict of arrays."""
        ray = ray_module()
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        lasting = {"max_restarts": -1, "max_task_retries": -1} if replicas else {}
        ray.cloudpickle.register_pickle_by_value(actors)
        self._tick_counter = ray.remote(**options)(actors.TickCounter).remote()
        self._actors.append(self._tick_counter)
        actor = ray.remote(**options, **lasting)(actors.Server)
        label = uuid.uuid4().hex  # names of actors must be unique in Ray
        for i in range(num_servers):
            backup = None
            chain = [f"server {i}", *(f"replica {r + 1} of server {i}" for r in range(replicas))]
            for name in reversed(chain):
                server = actor.options(name=f"{name} {label}").remote(name, backup)
                self._actors.append(server)
                backup = f"{name} {label}"
            self.servers.append(server)
        parts = [{} for _ in self.servers]
        for name, array in values.items():
            self.layout[name] = array.shape, array.dtype
            for i, part in enumerate(np.array_split(array.reshape(-1), num_servers)):
                parts[i][name] = part
        servers = zip(self.servers, parts, strict=True)
        self._answers([server.load.remote(part, {}, 0) for server, part in servers])

    def start(self, fn, *args, num_workers=1, **kwargs):
        """Call `fn(worker, *args, **kwargs)` in `num_workers` new processes, asynchronously.

        Args:
            fn: a function of a `Worker` and further arguments; a notebook may define it.
            num_workers: number of processes, each with one thread. They start at the tick
                of the slowest worker.

        Returns:
            A `Run`, with `done()`, `results()` and `stop()`.
        """
        _check_count("num_workers", num_workers, 1)
        ray = ray_module()
        ranks = range(self._num_workers, self._num_workers + num_workers)
        self._num_workers += num_workers
        ray.get([self._tick_counter.join.remote(rank) for rank in ranks])
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(_work)
        run = Run(self._tick_counter, {})
        self._running.append(run)
        for rank in ranks:
            worker = Worker(rank, self.servers, self.layout, self._tick_counter)
            run.tasks[rank] = task.remote(fn, worker, args, kwargs)
        return run

    def run(self, fn, *args, num_workers=1, **kwargs):
        """Call `start` and return the results, a list in the order of ranks."""
        return self.start(fn, *args, num_workers=num_workers, **kwargs).results()

    def num_updates(self):
        """Return the number of pushes that each server has added, a list."""
        return self._answers([server.num_updates.remote() for server in self.servers])

    def close(self):
        """End the workers and the servers."""
        ray = ray_module()
        for run in self._running:
            run.stop()
        for actor in self._actors:
            ray.kill(actor)


def _work(fn, worker, args, kwargs):
    """Call a function in a worker's process; return (result, None) or (None, error).

    Ray would pickle a raised error by reference, which fails for the classes of a notebook.
    """
    torch.set_num_threads(1)
    try:
        return fn(worker, *args, **kwargs), None
    except Exception as error:
        text = traceback.format_exc()
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(f"This was raised in {worker.name}:\n{text}")
        return None, error
    finally:
        worker.leave()


class Run:
    """Running workers.

    Attributes:
        tasks: a dict from ranks of workers to Ray references to their results.
    """

    def __init__(self, tick_counter, tasks):
        self._tick_counter, self.tasks = tick_counter, tasks

    def done(self):
        """Return whether all workers have returned, or one has failed."""
        refs = {ref: rank for rank, ref in self.tasks.items()}
        ready, waiting = ray_module().wait(list(refs), num_returns=len(refs), timeout=0)
        return not waiting or any(_outcome(ref, refs[ref])[1] for ref in ready)

    def results(self):
        """Wait for the workers; return their results in the order of ranks.

        After an error or an interrupt the other workers are stopped.

        Raises:
            RuntimeError: a worker was killed.
            Exception: the exception of the first worker that failed, with its traceback as a note.
        """
        ray = ray_module()
        ranks = {ref: rank for rank, ref in self.tasks.items()}
        try:
            waiting = list(ranks)
            while waiting:
                [ref], waiting = ray.wait(waiting)
                _, error = _outcome(ref, ranks[ref])
                if error is not None:
                    raise error
            return [ray.get(ref)[0] for ref in ranks]
        except BaseException:
            self.stop()
            raise

    def stop(self):
        """Stop the workers that are still running."""
        ray = ray_module()
        refs = list(self.tasks.values())
        # Ray 2.60 can abort this process if a task is cancelled just as it ends, and drops a
        # cancellation that arrives before its task (CancelTask in normal_task_submitter.cc).
        _, waiting = ray.wait(refs, num_returns=len(refs), timeout=0)
        for _ in range(TRIES_TO_STOP):
            for ref in waiting:
                with contextlib.suppress(Exception):
                    ray.cancel(ref, force=True)
            _, waiting = ray.wait(refs, num_returns=len(refs), timeout=SECONDS_A_TRY)
            if not waiting:
                break
        else:
            warnings.warn(f"Ray did not end {len(waiting)} of {len(refs)} workers", stacklevel=2)
        ray.get([self._tick_counter.leave.remote(rank) for rank in self.tasks])


def _outcome(ref, rank):
    """Return (result, None) or (None, error) of a worker that has ended."""
    ray = ray_module()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:  # for example a result that cannot be pickled
        return None, error
    except ray.exceptions.RayError:
        return None, RuntimeError(f"worker {rank} was killed")
