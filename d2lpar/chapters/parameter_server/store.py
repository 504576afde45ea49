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

from d2lpar.chapters.parameter_server import actors
from d2lpar.chapters.parameter_server.clients import Client, Worker, to_arrays
from d2lpar.chapters.parameter_server.ray_setup import ray_module, start_ray

TRIES_TO_STOP, SECONDS_A_TRY = 5, 2.0


@contextlib.contextmanager
def parameter_servers(values, num_servers=1, replicas=0, address=None):
    """Context manager: store tensors in server processes; yield a `Store`.

        with parameter_servers({"w": torch.zeros(10)}, num_servers=2) as store:
            store.run(train, num_workers=3)  # calls train(worker) in three processes
            w = store.pull("w")

    Workers and servers always end with the block, and so does Ray if this call started it. Call
    `start_ray` before to start several blocks faster.

    Args:
        values: a dict from names to tensors, the initial values.
        num_servers: number of servers. Server i of S stores elements i n / S to (i + 1) n / S of
            each tensor, flattened to n elements.
        replicas: number of replicas of each server. A push is acknowledged once all have it. A
            server or replica that dies is replaced, and restored from another.
        address: the address of a Ray cluster, as in `start_ray`.

    Raises:
        ValueError: there are no values, or a number is out of range.
        TypeError: a value cannot be converted to a NumPy array.
    """
    initial, values = values, to_arrays(values)
    _check_count("num_servers", num_servers, 1)
    _check_count("replicas", replicas, 0)
    starts = not ray_module().is_initialized()
    store = None
    try:
        start_ray(address)
        store = Store(values, num_servers, replicas)
        store.reset(initial)
        yield store
    finally:
        if store is not None:
            store.close()
        if starts:
            ray_module().shutdown()


def _check_count(name, number, least):
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be an integer, {least} or more: got {number!r}")


class Store(Client):
    """The tensors on parameter servers; also a `Client`, named "driver".

    Attributes:
        servers: the actors; `ray.kill(store.servers[0], no_restart=False)` simulates a failure.
    """

    def __init__(self, values, num_servers, replicas):
        ray = ray_module()
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        lasting = {"max_restarts": -1, "max_task_retries": -1} if replicas else {}
        ray.cloudpickle.register_pickle_by_value(actors)
        actor = ray.remote(**options, **lasting)(actors.Server)
        self._actors, servers = [], []
        label = uuid.uuid4().hex  # names of actors must be unique in Ray
        self._clock, self._num_workers, self._running = None, 0, []
        try:
            for i in range(num_servers):
                backup = None
                names = [
                    f"server {i}",
                    *(f"replica {r + 1} of server {i}" for r in range(replicas)),
                ]
                for name, source in reversed(list(zip(names, [None, *names], strict=False))):
                    server = actor.options(name=f"{name} {label}").remote(name, source, backup)
                    self._actors.append(server)
                    backup = f"{name} {label}"
                servers.append(server)
            self._clock = ray.remote(**options)(actors.Clock).remote()
            self._actors.append(self._clock)
        except BaseException:
            self.close()
            raise
        layout = {
            name: (
                array.shape,
                array.dtype,
                [array.size * i // num_servers for i in range(num_servers + 1)],
            )
            for name, array in values.items()
        }
        super().__init__("driver", servers, layout)
        self.servers = servers

    def reset(self, values):
        """Replace all values, and reset the counts of workers, pushes and bytes.

        Args:
            values: a dict of tensors with the names and shapes of the stored ones.

        Raises:
            ValueError: names or shapes differ.
            RuntimeError: workers are running.
        """
        values = to_arrays(values)
        shapes = {name: array.shape for name, array in values.items()}
        known = {name: layout[0] for name, layout in self._layout.items()}
        if shapes != known:
            raise ValueError(f"the shapes must be {known}: got {shapes}")
        if not all(run.done() for run in self._running):
            raise RuntimeError("workers are running: wait for their results, or stop them")
        self._num_workers, self._running = 0, []
        parts = [{} for _ in self.servers]
        for name, (_, dtype, bounds) in self._layout.items():
            flat = values[name].astype(dtype).reshape(-1)
            for i, part in enumerate(parts):
                part[name] = flat[slice(*bounds[i : i + 2])]
        servers = zip(self.servers, parts, strict=True)
        self._answers([server.load.remote(part, {}, 0) for server, part in servers])

    def start(self, fn, *args, num_workers=1, **kwargs):
        """Call `fn(worker, *args, **kwargs)` in `num_workers` new processes, asynchronously.

        Args:
            fn: a function of a `Worker` and further arguments; a notebook may define it.
            num_workers: number of processes, each with one thread. They join the clock at the tick
                of the slowest worker.

        Returns:
            A `Run`, with `done()`, `results()` and `stop()`.
        """
        _check_count("num_workers", num_workers, 1)
        ray = ray_module()
        ranks = range(self._num_workers, self._num_workers + num_workers)
        self._num_workers += num_workers
        ray.get([self._clock.join.remote(rank) for rank in ranks])
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="SPREAD")(_work)
        run = Run(self._clock, {})
        self._running.append(run)
        for rank in ranks:
            worker = Worker(rank, self.servers, self._layout, self._clock)
            run.tasks[rank] = task.remote(fn, worker, args, kwargs)
        return run

    def run(self, fn, *args, num_workers=1, **kwargs):
        """Call `start` and return the results, a list in the order of ranks."""
        return self.start(fn, *args, num_workers=num_workers, **kwargs).results()

    def num_updates(self):
        """Return the number of pushes that each server has added, a list."""
        return self._answers([server.num_updates.remote() for server in self.servers])

    def traffic(self):
        """Return the received bytes of tensors and keys, a dict from (source, target).

        Both are names such as "worker 0", "server 1", "replica 1 of server 0" or "driver". The
        counts of a dead process are lost.
        """
        num_bytes = {}
        for counted in self._answers(
            [a.traffic.remote() for a in self._actors if a is not self._clock]
        ):
            num_bytes |= {link: total for link, total in counted.items() if total}
        return num_bytes

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
    import torch

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

    def __init__(self, clock, tasks):
        self._clock, self.tasks = clock, tasks

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
        ray.get([self._clock.leave.remote(rank) for rank in self.tasks])


def _outcome(ref, rank):
    """Return (result, None) or (None, error) of a worker that has ended."""
    ray = ray_module()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:  # for example a result that cannot be pickled
        return None, error
    except ray.exceptions.RayError:
        return None, RuntimeError(f"worker {rank} was killed")
