"""Clients of parameter servers, which pull and push, and workers, which also have a clock."""

import numpy as np

from d2lpar.chapters.parameter_server.ray_setup import ray_module


class Client:
    """A client that pulls from the servers of a store and pushes to them.

    Attributes:
        name: its name in `Store.traffic`.
        pushes: number of acknowledged pushes.
    """

    def __init__(self, name, servers, layout):
        self.name, self._servers, self._layout = name, servers, layout
        self.pushes, self._number = 0, 0

    def pull(self, name, keys=None):
        """Return a tensor of the store, or a vector of its values at some keys.

        Args:
            name: the name of the tensor.
            keys: an integer tensor of positions in the flattened tensor, strictly ascending; by
                default all.

        Raises:
            KeyError: the store has no such tensor.
            ValueError: the keys are out of range, not ascending, or not integers.
            RuntimeError: a server without replica died.
        """
        import torch

        shape, dtype, bounds = self._find(name)
        parts = _parts(name, bounds, keys)
        answers = self._answers(
            [self._servers[i].pull.remote((self.name, name, own)) for i, _, own in parts]
        )
        values = np.empty(bounds[-1] if keys is None else len(keys), dtype)
        for (_, place, _), part in zip(parts, answers, strict=True):
            values[place] = part
        return torch.from_numpy(values.reshape(shape if keys is None else -1))

    def push(self, name, values, keys=None):
        """Add values to a tensor; return once all its servers and their replicas have them.

        Args:
            name: the name of the tensor.
            values: a tensor of the same shape, or a vector with one number per key.
            keys: as in `pull`.

        Raises:
            KeyError, RuntimeError: as in `pull`.
            ValueError: as in `pull`, or the shape of `values` is wrong.
        """
        shape, dtype, bounds = self._find(name)
        parts = _parts(name, bounds, keys)
        values = to_array(f"what is pushed to {name!r}", values).astype(dtype, copy=False)
        expected = shape if keys is None else (len(keys),)
        if values.shape != expected:
            raise ValueError(
                f"a push to {name!r} must have the shape {expected}: got {values.shape}"
            )
        values = values.reshape(-1)
        self._number += 1
        calls = [
            self._servers[i].push.remote((self.name, self._number, name, values[place], own))
            for i, place, own in parts
        ]
        self._answers(calls)
        self.pushes += 1

    def _find(self, name):
        if name not in self._layout:
            raise KeyError(f"no tensor {name!r} in the store: choose {', '.join(self._layout)}")
        return self._layout[name]

    def _answers(self, calls):
        ray = ray_module()
        try:
            return ray.get(calls)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError("a parameter server died, and no replica has its values") from error


def _parts(name, bounds, keys):
    """Return for each server involved its index, a slice of the values, and keys in its range."""
    if keys is None:
        return [(i, slice(*bounds[i : i + 2]), None) for i in range(len(bounds) - 1)]
    keys = to_array("keys", keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise ValueError(f"keys must be a vector of integers: got {keys.dtype}, {keys.shape}")
    if len(keys) and not 0 <= keys.min() <= keys.max() < bounds[-1]:
        raise ValueError(
            f"keys of {name!r} must be within 0 to {bounds[-1] - 1}: "
            f"got {keys.min()} to {keys.max()}"
        )
    if (wrong := np.flatnonzero(keys[1:] <= keys[:-1])).size:
        before, after = keys[wrong[0]], keys[wrong[0] + 1]
        raise ValueError(f"keys must be strictly ascending: got {after} after {before}")
    cuts = np.searchsorted(keys, bounds)
    return [
        (i, slice(a, b), (keys[a:b] - bounds[i]).astype(np.int32))
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
        if a < b
    ]


class Worker(Client):
    """The first argument of a function that `Store.run` calls: a client with a clock.

    Attributes:
        rank: the index of the worker in its store, from 0.
        ahead: for each tick, the lead over the slowest worker when it continued, in ticks.
    """

    def __init__(self, rank, servers, layout, clock):
        super().__init__(f"worker {rank}", servers, layout)
        self.rank, self._clock = rank, clock
        self.ahead = []

    def tick(self, staleness=0):
        """Count a step as done; wait for workers more than `staleness` steps behind.

        Workers that have returned or left do not count.

        Args:
            staleness: 0 keeps workers in step (BSP), infinity never waits (ASP), values in between
                bound the staleness (SSP).
        """
        self.ahead.append(ray_module().get(self._clock.tick.remote(self.rank, staleness)))

    def leave(self):
        """Leave: other workers no longer wait for this one."""
        ray_module().get(self._clock.leave.remote(self.rank))


def to_arrays(values):
    """Convert a dict of tensors to arrays; raise TypeError if that is impossible."""
    if not values:
        raise ValueError("values must be a dict from names to tensors: got none")
    return {name: to_array(f"tensor {name!r}", value) for name, value in values.items()}


def to_array(what, value):
    """Return a tensor as an array, without a copy if it is on the CPU."""
    try:
        return value.detach().cpu().numpy()
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{what} must be a tensor of a type that NumPy has: {error}") from None
