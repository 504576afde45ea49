"""Collectives on a modelled clock: ranks post them, meet, and run them."""

import itertools
import os

import torch.distributed as dist

from vgpu.distributed.agreement import machine_id
from vgpu.distributed.routes import Route, link_in_machine, share_of_network
from vgpu.distributed.timekeeper import KeeperConnection, Post
from vgpu.tensors.cells import is_known

_LOST_KEEPER = "lost the connection to the rank that keeps the simulated clock"


class ConnectedRanks:
    """Connects a `Simulation`, in its thread, to the other ranks of the default group.

    Attributes:
        pending: key -> the op of a collective whose ranks have not met yet.
    """

    def __init__(self, simulation, store, rank, size, timeout):
        self._simulation = simulation
        self.pending = {}
        self._granted = 0.0  # time up to which the keeper allows this rank to simulate
        self._done = {}  # key without its counter -> counter of the last completed collective
        store = dist.PrefixStore(f"{next(_numbers)}", store)
        self._num_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))  # on this node of torchrun
        self._keeper = KeeperConnection(store, rank, size, timeout, self._run_to)

    def may_advance_to(self, seconds):
        """Return whether no meeting can begin before `seconds`; False after waiting for news."""
        if not self.pending or seconds <= self._granted:
            return True
        for kind, *message in self._keeper.ask(seconds):
            if kind == "go":
                (self._granted,) = message
            elif kind == "meet":
                key, start, route, known = message
                if (op := self.pending.pop(key, None)) is not None:
                    op.meet(Route(*route), known)
                    op.ready = start
                    self._simulation.make_ready(op)
            elif kind == "failed":
                key, text = message
                if key in self.pending:
                    self._fail(self.pending.pop(key), text)
            else:
                self._fail_all(_LOST_KEEPER)
        return False

    def _fail_all(self, text):
        for key in list(self.pending):
            self._fail(self.pending.pop(key), text)

    def _fail(self, op, text):
        op.failure = dist.DistBackendError(text)
        op.seconds = 0.0
        self._simulation.make_ready(op)

    def post(self, op):
        """Report to the keeper that an op is ready to begin at `op.start`."""
        now, op.ready = op.ready, op.start
        self.pending[op.key] = op
        index = op.engine.device.model.machine_index
        machine = machine_id(), os.environ.get("GROUP_RANK", "0"), index
        links = link_in_machine(op), share_of_network(op, self._num_here, index)
        try:
            post = Post(op.text, op.ready, machine, *links, has_values(op))
            self._keeper.post(now, op.key, op.members, post)
        except OSError:
            self._fail_all(_LOST_KEEPER)

    def waits_for_values(self, op):
        """Report to the keeper that this rank waits for values of other ranks."""
        self._keeper.send("at", op.start, op.key)

    def done(self, op):
        key = op.key
        self._done[key[:-1]] = key[-1]
        self._keeper.send("at", 0.0, key)

    def _run_to(self, key, is_posted_by_all):
        """Simulate until this rank has posted or completed a collective."""

        def is_ahead():
            posted = key in self.pending and not is_posted_by_all
            return not posted and self._done.get(key[:-1], -1) < key[-1]

        def run():
            self._simulation.run_issued_while(is_ahead)
            if is_ahead():
                self._keeper.send("idle")

        self._simulation.call_soon(run)

    def end(self):
        """Simulate all issued ops, then leave."""
        self._simulation.finish()
        self._keeper.end()

    def leave(self):
        self._keeper.send("end")


_numbers = itertools.count()


def has_values(op):
    """Return whether this rank has the values that other ranks read."""
    return op.engine.clock.values or not op.is_read or all(map(is_known, op.args[1]))
