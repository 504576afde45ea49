"""The collectives of this process on a modelled clock: posted, met, and run."""

import os

import torch.distributed as dist

from .. import private
from .agreement import host_number
from .timekeeper import Member


class Meetings:
    """What connects a `Simulation` to those of the other ranks; its thread uses this.

    Args:
        simulation: the `Simulation`.
        timeout: a timedelta, how long a rank waits for others.
    """

    def __init__(self, simulation, timeout):
        self._simulation = simulation
        self._pending = {}  # key -> the op that was posted
        self._leave = 0.0  # seconds that may be gone to whatever is pending
        self._done = {}  # key without its number -> the number of the last that was done
        store = dist.PrefixStore(f"{next(_numbers)}", private.default_store())
        self._member = Member(store, dist.get_rank(), dist.get_world_size(), timeout, self._run_to)

    def may_go_to(self, seconds):
        """Return whether no meeting can come before `seconds`; wait for news where that is open."""
        if not self._pending or seconds <= self._leave:
            return True
        for kind, *message in self._member.ask(seconds):
            if kind == "go":
                (self._leave,) = message
            elif kind == "meet":
                key, start, bandwidth, latency = message
                if key in self._pending:
                    op = self._pending.pop(key)
                    op.kwargs["call"].meet(op, bandwidth, latency)
                    op.ready = start
                    self._simulation.make_ready(op)
            elif kind == "failed":
                key, text = message
                if key in self._pending:
                    self._fail(self._pending.pop(key), text)
            else:
                self._fail_all("the connection to rank 0, which keeps the time, is lost")
        return False

    def _fail_all(self, text):
        for key in list(self._pending):
            self._fail(self._pending.pop(key), text)

    def _fail(self, op, text):
        op.kwargs["call"].failure = dist.DistBackendError(text)
        op.seconds = 0.0
        self._simulation.make_ready(op)

    def post(self, op):
        """Tell the keeper of the time that an op is ready at `op.start`."""
        call, model = op.kwargs["call"], op.engine.device.model
        op.ready = op.start
        self._pending[call.key] = op
        link, network = (
            link and (link.bandwidth, link.latency)
            for link in (op.engine.device.peer_link, model.machine.network)
        )
        host = host_number(), os.environ.get("GROUP_RANK", "0"), model.host
        self._member.post(call.key, call.members, call.text, op.ready, host, link, network)

    def waits_for_values(self, op):
        """Tell the keeper that this rank waits for values of others, at the time of the op."""
        self._member.waits_for_values(op.kwargs["call"].key, op.start)

    def done(self, op):
        """Tell the keeper that this rank needs nothing more of a collective."""
        key = op.kwargs["call"].key
        self._done[key[:-1]] = key[-1]
        self._member.done(key)

    def has_done_its_part(self, key):
        """Return whether this rank has posted a collective that it has not met, or has done it."""
        return key in self._pending or self._done.get(key[:-1], -1) >= key[-1]

    def _run_to(self, key):
        """Simulate, in its thread, until this rank has done its part in a collective."""
        self._simulation.ask(self._simulation.run_while, lambda: not self.has_done_its_part(key))

    def end(self):
        """Simulate all that was issued, and leave."""
        self._simulation.finish()
        self._member.end()


def _count():
    number = 0
    while True:
        yield number
        number += 1


_numbers = _count()
