"""Clients, which pull from parameter servers and push to them, and workers, which have a clock."""

import contextlib
import time

import numpy as np

from d2lpar.chapters.parameter_server.ray_setup import ray_module


class Client:
    """Pulls from the servers of a store and pushes to them.

    Attributes:
        name: identifies it in `Store.traffic`.
        pushes: how many of its pushes were acknowledged.
        seconds: a dict, the time spent in "pull", "push", "tick" and "barrier".
        delays: for each push of a tensor, how many other pushes its server had added since this
            client last pulled the tensor; of several servers, the largest number.
    """

    def __init__(self, name, servers, layout):
        self.name, self._servers, self._layout = name, servers, layout
        self.pushes, self._number = 0, 0
        self.seconds = {"pull": 0.0, "push": 0.0, "tick": 0.0, "barrier": 0.0}
        self.delays = []
        self._seen = {}

    def pull(self, name, keys=None):
        """Return a tensor of the store, or a vector of its values at some keys.

        Args:
            keys: positions in the flattened tensor, ascending and without repetition; a tensor of
                integers. By default all.

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
            values: a tensor of the same shape, or with one number for each of the keys.
            keys: as in `pull`.

        Raises:
            KeyError, ValueError, RuntimeError: as in `pull`.
            ValueError: the values do not fit the tensor or the keys.
        """
        with self._timed("push"):
            shape, dtype, bounds = self._find(name)
            parts = _parts(name, bounds, keys)
            values = to_array(f"what is pushed to {name!r}", values).astype(dtype, copy=False)
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
            self.delays.append(max(others, default=0))
            self.pushes += 1

    def _find(self, name):
        if name not in self._layout:
            raise KeyError(f"no tensor {name!r} in the store: it holds {', '.join(self._layout)}")
        return self._layout[name]

    def _answers(self, calls):
        ray = ray_module()
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
    """Return for each server concerned its index, a slice of the values and keys in its range."""
    if keys is None:
        return [(i, slice(*bounds[i : i + 2]), None) for i in range(len(bounds) - 1)]
    keys = to_array("keys", keys)
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
    """The argument of a function that `Store.run` calls: a client with a clock.

    Attributes:
        rank: counts the workers of a store, from 0.
        ahead: for each tick, by how many ticks the worker was ahead of the slowest when it went on.
    """

    def __init__(self, rank, servers, layout, clock):
        super().__init__(f"worker {rank}", servers, layout)
        self.rank, self._clock = rank, clock
        self.ahead = []

    def tick(self, staleness=0):
        """Report that a step is done; wait for workers more than `staleness` steps behind.

        With 0 all stay together (BSP); with infinity nobody waits (ASP); in between staleness is
        bounded (SSP). Workers that have returned or left are not waited for.
        """
        with self._timed("tick"):
            self.ahead.append(ray_module().get(self._clock.tick.remote(self.rank, staleness)))

    def barrier(self):
        """Wait until all workers have called this as often; no step counts as done.

        Workers that have returned or left are not waited for.
        """
        with self._timed("barrier"):
            ray_module().get(self._clock.barrier.remote(self.rank))

    def leave(self):
        """Sign off, so that the other workers no longer wait for this one."""
        ray_module().get(self._clock.leave.remote(self.rank))


def to_arrays(values):
    """Return the initial values as arrays; raise an error for what cannot be one."""
    if not values:
        raise ValueError("a store needs initial values: a dict from names to tensors; got none")
    return {name: to_array(f"tensor {name!r}", value) for name, value in values.items()}


def to_array(what, value):
    """Return a tensor's numbers as an array, without a copy if they are on the CPU."""
    try:
        return value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{what} is not a tensor that NumPy can hold: {error}") from None
