"""Ray actors of a store: servers, which store ranges of tensors, and a counter of ticks.

Actors use NumPy arrays, and their classes are pickled by value, so their processes need not import
torch and start in 0.5 s instead of 2 s. This module imports nothing from d2lpar, and Ray only
inside actors, because `ray_setup` must import it first.
"""

import asyncio


class Server:
    """An actor that stores a range of every tensor.

    A server and its replicas form a chain (van Renesse and Schneider, OSDI 2004): the first
    receives a push, each forwards it to the next, and the last acknowledges it.

    Args:
        name: "server 0" or "replica 1 of server 0".
        backup: Ray's name of the next actor in the chain, if any: the arguments of an actor that
            Ray restarts must not contain another actor.
    """

    def __init__(self, name, backup=None):
        import ray

        self.backup = None if backup is None else ray.get_actor(backup)
        self.values, self.last, self.updates = None, {}, 0
        if ray.get_runtime_context().was_current_actor_reconstructed and backup is not None:
            state = ray.get(self.backup.state.remote())
            if state[0] is None:
                raise RuntimeError(f"{name} and its replica died: their values are lost")
            self.values, self.last, self.updates = _own(state)

    def load(self, *state):
        """Replace the arrays, the last push of each worker and the count of pushes."""
        self.values, self.last, self.updates = _own(state)
        if self.backup is not None:
            import ray

            ray.get(self.backup.load.remote(*state))

    def state(self):
        """Return the arguments of another server's `load`; the first is None without values."""
        return self.values, self.last, self.updates

    def push(self, message):
        """Add values to this server's range of a tensor.

        Args:
            message: a tuple (worker, number, name, values); four arguments would cost Ray more time
                than this method. `number` counts the worker's pushes, so that a push repeated after
                a lost acknowledgement is ignored.

        Returns:
            The number of pushes so far, or None if this process has lost its values.
        """
        worker, number, name, values = message
        if self.values is None:
            return None
        if number > self.last.get(worker, 0):
            self.values[name] += values
            self.last[worker] = number
            self.updates += 1
        if self.backup is not None:
            import ray

            if ray.get(self.backup.push.remote(message)) is None:
                ray.get(self.backup.load.remote(*self.state()))
        return self.updates

    def pull(self, name):
        """Return this server's range of a tensor."""
        return self.values[name]

    def num_updates(self):
        """Return the number of pushes so far."""
        return self.updates


def _own(state):
    """Return a state with copies of its arrays: those from Ray are read-only."""
    values, last, updates = state
    return {name: array.copy() for name, array in values.items()}, dict(last), updates


class TickCounter:
    """An actor that counts the workers' ticks and makes fast workers wait for slow ones."""

    def __init__(self):
        self.ticks = {}
        self.moved = asyncio.Condition()

    async def join(self, worker):
        """Add a worker, at the tick of the slowest one."""
        self.ticks[worker] = min(self.ticks.values(), default=0)

    async def leave(self, worker):
        """Remove a worker; others no longer wait for it."""
        self.ticks.pop(worker, None)
        async with self.moved:
            self.moved.notify_all()

    async def tick(self, worker, staleness):
        """Count a tick of a worker; wait until it is at most `staleness` ahead of the slowest.

        Returns:
            The number of ticks by which it is ahead.
        """
        self.ticks[worker] += 1
        async with self.moved:
            self.moved.notify_all()
            await self.moved.wait_for(lambda: self._ahead(worker) <= staleness)
        return self._ahead(worker)

    def _ahead(self, worker):
        return self.ticks[worker] - min(self.ticks.values()) if worker in self.ticks else 0
