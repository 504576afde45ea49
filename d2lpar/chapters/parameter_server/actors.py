"""The actors behind a store: servers, which hold ranges of tensors, and the workers' clock.

They work on NumPy arrays, and their classes travel by value: a process that had to import torch
would start in two seconds, instead of half a second. So this module imports nothing from d2lpar,
and it imports Ray, which `ray_setup` must import first, only where an actor runs.
"""

import asyncio
from collections import defaultdict


class Server:
    """A range of every tensor, in a process of its own: the actor behind a `Store`.

    Servers that hold the same range form a chain (van Renesse and Schneider, OSDI 2004): the first
    takes the pushes, each passes them on to the next, and the answer comes back from the last.

    Args:
        name: "server 0", or "replica 1 of server 0".
        source: the name of the server that pushes to this one; None if workers do.
        backup: the name under which Ray knows the next actor in the chain, if any. (An actor that
            Ray is to restart must not have another one among its arguments.)
    """

    def __init__(self, name, source=None, backup=None):
        import ray

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
        """Replace arrays by name, last pushes by worker and the number of pushes; reset bytes."""
        self.num_bytes.clear()
        self.values, self.last, self.updates = _own((values, last, updates))
        if self.backup is not None:
            import ray

            ray.get(self.backup.load.remote(values, last, updates))

    def state(self):
        """Return the arguments for another server's `load`; None before there are values."""
        return None if self.values is None else (self.values, self.last, self.updates)

    def push(self, message):
        """Add values to a tensor, at some of its keys or at all of them.

        Args:
            message: a tuple (worker, number, name, values, keys), because five separate arguments
                would cost Ray more time than this method takes. `number` counts the worker's
                pushes: one that comes again, because its answer was lost with the process that owed
                it, is not added again. `keys` are positions of `values` in this server's range, or
                None for all.

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
            import ray

            if ray.get(self.backup.push.remote(message)) is None:
                ray.get(self.backup.load.remote(*self.state()))
        return self.updates

    def pull(self, message):
        """Return the number of pushes so far, and the values of some keys or all.

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
    """Return a state with copies of its arrays, since those that Ray delivers are read-only."""
    values, last, updates = state
    return {name: array.copy() for name, array in values.items()}, dict(last), updates


class Clock:
    """The progress of the workers: the actor that makes fast ones wait for slow ones."""

    def __init__(self):
        self.ticks, self.arrivals = {}, {}
        self.moved = asyncio.Condition()

    async def join(self, worker):
        """Add a worker, at the clock of the slowest one."""
        for counts in (self.ticks, self.arrivals):
            counts[worker] = min(counts.values(), default=0)

    async def leave(self, worker):
        """Remove a worker, so that nobody waits for it any more."""
        for counts in (self.ticks, self.arrivals):
            counts.pop(worker, None)
        async with self.moved:
            self.moved.notify_all()

    async def tick(self, worker, staleness):
        """Count a tick of a worker, and wait until it is at most `staleness` ahead of the slowest.

        Returns how many ticks it is ahead.
        """
        self.ticks[worker] += 1
        async with self.moved:
            self.moved.notify_all()
            await self.moved.wait_for(lambda: self._ahead(worker) <= staleness)
        return self._ahead(worker)

    async def barrier(self, worker):
        """Wait until all workers have called this as often as `worker`."""
        self.arrivals[worker] += 1
        count = self.arrivals[worker]
        async with self.moved:
            self.moved.notify_all()
            await self.moved.wait_for(lambda: count <= min(self.arrivals.values(), default=count))

    def _ahead(self, worker):
        return self.ticks[worker] - min(self.ticks.values()) if worker in self.ticks else 0
