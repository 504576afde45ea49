"""Parameter servers: tensors on server processes, and workers that push to and pull from them.

The processes are Ray's: servers are actors, workers are tasks. Every tensor is flattened and cut
into as many ranges as there are servers. A push adds to the values, so pushes commute (Li et al.,
OSDI'14); how far workers may run apart is up to their ticks (Ho et al., NeurIPS 2013).
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
import traceback
import uuid
import warnings
from collections import defaultdict
from pathlib import Path

import cloudpickle
import numpy as np

from d2lpar.virtual.interrupts import held_back

OBJECT_STORE = 256 << 20  # bytes
SECONDS_TO_STOP = 10.0
QUICK = str(Path(__file__).parent / "quick")  # see the module there


def start_ray(address=None):
    """Connect to a Ray cluster, or start Ray on this machine, without a word.

    Ray started here shows no dashboard, sends no statistics and passes on no output of its
    processes. `ray.shutdown()` ends it, and so does the end of this process. Where this process is
    connected already, nothing happens.

    Args:
        address: of a cluster, "host:port". By default it is RAY_ADDRESS of the environment;
            without one, Ray starts on this machine.

    Returns:
        The module `ray`. Import it so, and not before: it reads on import what to be silent about.

    Raises:
        ModuleNotFoundError: Ray is not installed; says what to install.
    """
    ray = _ray()
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray.init(address, **quiet)
        return ray
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [QUICK, path]))  # of its processes
    try:
        ray.init(
            "local",
            num_cpus=16,  # how many processes Ray keeps for further workers
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return ray


@functools.cache
def _ray():
    """Import Ray, or say what to install."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what raylet tells of workers' ends
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings():  # in a notebook, importing Ray asks for ipywidgets
            warnings.filterwarnings("ignore", "IProgress not found")
            logging.disable(logging.INFO)
            with held_back():  # a module that is imported by half stays broken
                import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "parameter servers run on Ray, which is not installed: pip install ray", name=error.name
        ) from None
    finally:
        logging.disable(disabled)
    return ray


@contextlib.contextmanager
def parameter_servers(values, num_servers=1, replicas=0, address=None):
    """Keep tensors on server processes for the length of a block.

        with parameter_servers({"w": torch.zeros(10)}, num_servers=2) as store:
            store.run(train, num_workers=3)  # calls train(worker) in three processes
            w = store.pull("w")

    However the block ends, its workers and servers end with it; and so does Ray, where this call
    started it. Start it with `start_ray` before, and the next block starts faster.

    Args:
        values: a dict from names to tensors, the initial values.
        num_servers: number of servers. Server i of S holds elements i n / S to (i + 1) n / S of
            each tensor, flattened to n elements.
        replicas: number of copies of each server. A push is acknowledged when all have it. A
            server or copy that dies is replaced, and gets its values from a copy.
        address: of a Ray cluster, as in `start_ray`.

    Returns:
        A context that gives a `Store`.

    Raises:
        ValueError: there are no values, or a number is out of range.
        TypeError: a value is not a tensor that NumPy can hold.
    """
    initial, values = values, _arrays(values)
    _check_count("num_servers", num_servers, 1)
    _check_count("replicas", replicas, 0)
    starts = not _ray().is_initialized()
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
            _ray().shutdown()


def _check_count(name, number, least):
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} is an integer, {least} or more: got {number!r}")


def _arrays(values):
    """Return the initial values as arrays, or say what cannot be one."""
    if not values:
        raise ValueError("a store needs initial values: a dict from names to tensors; got none")
    return {name: _array(f"tensor {name!r}", value) for name, value in values.items()}


def _array(what, value):
    """Return a tensor's numbers as an array, without a copy where they lie on the CPU."""
    try:
        return value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{what} is not a tensor that NumPy can hold: {error}") from None


class Server:
    """A range of every tensor, in a process of its own: the actor behind a `Store`.

    Servers that hold the same range form a chain (van Renesse and Schneider, OSDI 2004): the first
    takes the pushes, each passes them on to the next, and the answer comes back from the last.

    Args:
        name: "server 0", or "replica 1 of server 0".
        source: who pushes, where it is not a worker.
        backup: the name under which Ray knows the actor next in the chain, if any. (An actor that
            Ray is to restart must not have another one among its arguments.)
    """

    def __init__(self, name, source=None, backup=None):
        ray = _ray()
        self.name, self.source = name, source
        self.backup = None if backup is None else ray.get_actor(backup)
        self.values, self.last, self.updates = None, {}, 0
        self.num_bytes = defaultdict(int)
        if ray.get_runtime_context().was_current_actor_reconstructed and backup is not None:
            state = ray.get(self.backup.state.remote())
            if state is None:
                raise RuntimeError(f"{name} and its replica died: their values are lost")
            self.values, self.last, self.updates = _own(state)

    def load(self, values, last, updates):
        """Take over values (a dict of arrays), each worker's last push and the number of pushes.

        Bytes are counted anew.
        """
        self.num_bytes.clear()
        self.values, self.last, self.updates = _own((values, last, updates))
        if self.backup is not None:
            _ray().get(self.backup.load.remote(values, last, updates))

    def state(self):
        """Return what `load` takes; None where there is nothing yet."""
        return None if self.values is None else (self.values, self.last, self.updates)

    def push(self, message):
        """Add values to a tensor, at some of its keys or at all.

        Args:
            message: a tuple (worker, number, name, values, keys); each argument of its own would
                cost Ray as much as this method takes. `worker` is who pushes; `number` counts its
                pushes: one that was here before, because its answer was lost with the process that
                owed it, is not added again. `name` is the tensor's, `values` an array with a number
                for each of `keys`, an array of positions in this server's range; None for all.

        Returns:
            How many pushes were added so far; None from a process that has lost its values.
        """
        worker, number, name, values, keys = message
        if self.values is None:
            return None
        sent = values.nbytes + (0 if keys is None else keys.nbytes)
        self.num_bytes[self.source or worker, self.name] += sent
        if number > self.last.get(worker, 0):
            part = self.values[name]
            if keys is None:
                part += values
            else:
                part[keys] += values
            self.last[worker] = number
            self.updates += 1
        if self.backup is not None:
            ray = _ray()
            if ray.get(self.backup.push.remote(message)) is None:
                ray.get(self.backup.load.remote(*self.state()))
        return self.updates

    def pull(self, message):
        """Return how many pushes were added so far, and the values of some keys or all.

        Args:
            message: a tuple (worker, name, keys), as in `push`.
        """
        worker, name, keys = message
        values = self.values[name] if keys is None else self.values[name][keys]
        self.num_bytes[worker, self.name] += 0 if keys is None else keys.nbytes
        self.num_bytes[self.name, worker] += values.nbytes
        return self.updates, values

    def num_updates(self):
        """Return how many pushes were added so far."""
        return self.updates

    def traffic(self):
        """Return the bytes of arrays that came and went, a dict from (source, target)."""
        return dict(self.num_bytes)


def _own(state):
    """Return a state with copies of its arrays: what Ray delivers cannot be written to."""
    values, last, updates = state
    return {name: array.copy() for name, array in values.items()}, dict(last), updates


class Clock:
    """Who is how far: the actor that lets fast workers wait for slow ones."""

    def __init__(self):
        self.ticks = {}
        self.moved = asyncio.Condition()

    async def join(self, worker):
        """Let a worker take part, from where the slowest is."""
        self.ticks[worker] = min(self.ticks.values(), default=0)

    async def leave(self, worker):
        """Go on without a worker."""
        self.ticks.pop(worker, None)
        async with self.moved:
            self.moved.notify_all()

    async def tick(self, worker, staleness):
        """Count a tick of a worker, and wait until it is at most `staleness` ahead of the slowest.

        Returns:
            How many ticks it is ahead.
        """
        self.ticks[worker] += 1
        async with self.moved:
            self.moved.notify_all()
            await self.moved.wait_for(lambda: self._ahead(worker) <= staleness)
        return self._ahead(worker)

    def _ahead(self, worker):
        return self.ticks[worker] - min(self.ticks.values()) if worker in self.ticks else 0


class Client:
    """Pulls from the servers of a store and pushes to them.

    Attributes:
        name: what stands for it in `Store.traffic`.
        pushes: how many of its pushes were acknowledged.
        seconds: a dict, the time spent in "pull", "push" and "tick".
        staleness: for each push of a tensor, how many pushes of others were added to it, on the
            server where they were most, since this client's last pull of it.
    """

    def __init__(self, name, servers, layout):
        self.name, self._servers, self._layout = name, servers, layout
        self.pushes, self._number = 0, 0
        self.seconds = {"pull": 0.0, "push": 0.0, "tick": 0.0}
        self.staleness = []
        self._seen = {}

    def pull(self, name, keys=None):
        """Fetch the values of a tensor.

        Args:
            name: of the tensor.
            keys: positions in the flattened tensor, ascending and without repetition; a tensor of
                integers. By default all.

        Returns:
            A tensor of the tensor's own shape, or with one number for each of the keys.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the keys are out of range, not ascending, or not integers.
            RuntimeError: a server died that had no replica.
        """
        import torch

        with self._timed("pull"):
            shape, dtype, bounds = self._find(name)
            parts = _parts(name, bounds, keys)
            answers = self._answers(
                [self._servers[i].pull.remote((self.name, name, own)) for i, _, own in parts]
            )
            values = np.empty(bounds[-1] if keys is None else len(keys), dtype)
            for (i, place, _), (updates, part) in zip(parts, answers, strict=True):
                values[place] = part
                self._seen[name, i] = updates
            return torch.from_numpy(values.reshape(shape if keys is None else -1))

    def push(self, name, values, keys=None):
        """Add values to a tensor; return when every server concerned, and its replicas, has them.

        Args:
            name: of the tensor.
            values: a tensor of the same shape, or with one number for each of the keys.
            keys: as in `pull`.

        Raises:
            KeyError, ValueError, RuntimeError: as in `pull`.
            ValueError: the values do not fit the tensor or the keys.
        """
        with self._timed("push"):
            shape, dtype, bounds = self._find(name)
            parts = _parts(name, bounds, keys)
            values = _array(f"what is pushed to {name!r}", values).astype(dtype, copy=False)
            expected = shape if keys is None else (len(keys),)
            if values.shape != expected:
                raise ValueError(
                    f"a push of shape {values.shape} to {name!r} should have {expected}"
                )
            values = values.reshape(-1)
            self._number += 1
            calls = [
                self._servers[i].push.remote((self.name, self._number, name, values[place], own))
                for i, place, own in parts
            ]
            others = [
                updates - 1 - self._seen.get((name, i), updates - 1)
                for (i, _, _), updates in zip(parts, self._answers(calls), strict=True)
            ]
            self.staleness.append(max(others, default=0))
            self.pushes += 1

    def _find(self, name):
        if name not in self._layout:
            raise KeyError(f"no tensor {name!r} in the store: it holds {', '.join(self._layout)}")
        return self._layout[name]

    def _answers(self, calls):
        ray = _ray()
        try:
            return ray.get(calls)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError("a parameter server died, and no replica has its values") from error

    @contextlib.contextmanager
    def _timed(self, what):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start


def _parts(name, bounds, keys):
    """Return what concerns each server: tuples (server, slice of the values, its own keys)."""
    if keys is None:
        return [(i, slice(*bounds[i : i + 2]), None) for i in range(len(bounds) - 1)]
    keys = _array("keys", keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ValueError(f"keys are a vector of integers: got {keys.dtype} of shape {keys.shape}")
    if len(keys) and not 0 <= keys.min() <= keys.max() < bounds[-1]:
        raise ValueError(
            f"keys {keys.min()} to {keys.max()} are not within 0 to {bounds[-1] - 1} of {name!r}"
        )
    if (wrong := np.flatnonzero(keys[1:] <= keys[:-1])).size:
        before, after = keys[wrong[0]], keys[wrong[0] + 1]
        raise ValueError(f"keys must ascend without repetition: {after} comes after {before}")
    cuts = np.searchsorted(keys, bounds)
    return [
        (i, slice(a, b), (keys[a:b] - bounds[i]).astype(np.int32))
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
        if a < b
    ]


class Worker(Client):
    """What a function that `Store.run` calls works with: a client that has a clock.

    Attributes:
        rank: counts the workers of a store, from 0.
        ahead: for each tick, by how many ticks the worker was ahead of the slowest when it went on.
    """

    def __init__(self, rank, servers, layout, clock):
        super().__init__(f"worker {rank}", servers, layout)
        self.rank, self._clock = rank, clock
        self.ahead = []

    def tick(self, staleness=0):
        """Say that a step is done, and wait for workers that are more than `staleness` behind.

        With 0, a barrier, all stay together (BSP); with infinity nobody waits (ASP); in between
        staleness is bounded (SSP). No tick of the others is needed from a worker that has returned
        or left.
        """
        with self._timed("tick"):
            self.ahead.append(_ray().get(self._clock.tick.remote(self.rank, staleness)))

    def leave(self):
        """Let the others no longer wait for this worker."""
        _ray().get(self._clock.leave.remote(self.rank))


class Store(Client):
    """Tensors on parameter servers, as `parameter_servers` gives them. Itself a client, "driver".

    Attributes:
        servers: the actors; `ray.kill(store.servers[0], no_restart=False)` is an accident.
    """

    def __init__(self, values, num_servers, replicas):
        ray = _ray()
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        lasting = {"max_restarts": -1, "max_task_retries": -1} if replicas else {}
        actor = ray.remote(**options, **lasting)(Server)
        self._actors, servers = [], []
        label = uuid.uuid4().hex  # Ray's names are for all stores of this process
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
            self._clock = ray.remote(**options)(Clock).remote()
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
        """Give all tensors new values, and count workers, pushes and bytes anew.

        Args:
            values: a dict of tensors, with the names and shapes of those in the store.

        Raises:
            ValueError: they have other names or shapes.
            RuntimeError: workers are under way.
        """
        values = _arrays(values)
        shapes = {name: array.shape for name, array in values.items()}
        known = {name: layout[0] for name, layout in self._layout.items()}
        if shapes != known:
            raise ValueError(f"the store holds tensors of shapes {known}: got {shapes}")
        if not all(run.done() for run in self._running):
            raise RuntimeError("workers are under way: wait for their results, or stop them")
        self._num_workers, self._running, self._seen = 0, [], {}
        parts = [{} for _ in self.servers]
        for name, (_, dtype, bounds) in self._layout.items():
            flat = values[name].astype(dtype).reshape(-1)
            for i, part in enumerate(parts):
                part[name] = flat[slice(*bounds[i : i + 2])]
        servers = zip(self.servers, parts, strict=True)
        self._answers([server.load.remote(part, {}, 0) for server, part in servers])

    def start(self, fn, *args, num_workers=1, **kwargs):
        """Call `fn(worker, *args, **kwargs)` in `num_workers` new processes, and do not wait.

        Args:
            fn: the function; it may be defined in a notebook. It gets a `Worker`.
            num_workers: number of processes, each with one thread. All take part in the clock from
                now on, from where the slowest worker is.

        Returns:
            A `Run`: `done()`, `results()`, `stop()`.
        """
        _check_count("num_workers", num_workers, 1)
        ray = _ray()
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
        """Call `fn(worker, *args, **kwargs)` in `num_workers` processes; return their results.

        As `start` and then `Run.results`.
        """
        return self.start(fn, *args, num_workers=num_workers, **kwargs).results()

    def num_updates(self):
        """Return how many pushes each server has added, a list."""
        return self._answers([server.num_updates.remote() for server in self.servers])

    def traffic(self):
        """Return the bytes of tensors and keys that arrived, a dict from (source, target).

        Both are names: "worker 0", "server 1", "replica 1 of server 0", "driver". What a process
        that died had counted is lost.
        """
        num_bytes = {}
        for counted in self._answers(
            [a.traffic.remote() for a in self._actors if a is not self._clock]
        ):
            num_bytes |= {link: total for link, total in counted.items() if total}
        return num_bytes

    def close(self):
        """End the workers and the servers."""
        ray = _ray()
        for run in self._running:
            run.stop()
        for actor in self._actors:
            ray.kill(actor)


def _work(fn, worker, args, kwargs):
    """Call a function in the process of a worker; return its result and None, or None and why not.

    Ray would send errors by plain pickle, which does not know the classes of a notebook.
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
    """Workers under way.

    Attributes:
        tasks: a dict from a worker's rank to Ray's reference of its result.
    """

    def __init__(self, clock, tasks):
        self._clock, self.tasks = clock, tasks

    def done(self):
        """Return whether all workers have returned, or one has failed."""
        refs = {ref: rank for rank, ref in self.tasks.items()}
        ready, waiting = _ray().wait(list(refs), num_returns=len(refs), timeout=0)
        return not waiting or any(_outcome(ref, refs[ref])[1] for ref in ready)

    def results(self):
        """Wait for the workers; return what they returned, in the order of their ranks.

        Raises:
            RuntimeError: a worker was killed.
            Exception: what the first worker that failed raised, with its traceback as a note.
                The others are stopped; so they are when this is interrupted.
        """
        ray = _ray()
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
        """End the workers that are still under way."""
        ray = _ray()
        refs = list(self.tasks.values())
        for ref in refs:
            with contextlib.suppress(Exception):
                ray.cancel(ref, force=True)
        ray.wait(refs, num_returns=len(refs), timeout=SECONDS_TO_STOP)
        ray.get([self._clock.leave.remote(rank) for rank in self.tasks])


def _outcome(ref, rank):
    """Return what a worker that has ended returned, and what it raised."""
    ray = _ray()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:  # for example, a result that cannot be pickled
        return None, error
    except ray.exceptions.RayError:
        return None, RuntimeError(f"worker {rank} was killed")
