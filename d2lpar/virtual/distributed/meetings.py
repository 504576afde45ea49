"""The collectives of this process on a modelled clock: posted, met, and run."""

import itertools
import os

import torch.distributed as dist

from ..simulation import is_known
from .agreement import figures_of, host_number
from .timekeeper import Member

_LOST = "the connection to the rank that keeps the time is lost"


class Meetings:
    """What connects a `Simulation` to those of the other ranks; its thread uses this.

    Args:
        simulation: the `Simulation`.
        store, rank, size: of the default process group.
        timeout: a timedelta, how long a rank waits for others.

    Attributes:
        pending: key -> the op of a collective that was posted and has not met.
    """

    def __init__(self, simulation, store, rank, size, timeout):
        self._simulation = simulation
        self.pending = {}
        self._leave = 0.0  # seconds that may be gone to whatever is pending
        self._done = {}  # key without its number -> the number of the last that was done
        store = dist.PrefixStore(f"{next(_numbers)}", store)
        self._member = Member(store, rank, size, timeout, self._run_to)

    def may_go_to(self, seconds):
        """Return whether no meeting can come before `seconds`; wait for news where that is open."""
        if not self.pending or seconds <= self._leave:
            return True
        for kind, *message in self._member.ask(seconds):
            if kind == "go":
                (self._leave,) = message
            elif kind == "meet":
                key, start, *met = message
                if key in self.pending:
                    op = self.pending.pop(key)
                    op.kwargs["call"].meet(op, *met)
                    op.ready = start
                    self._simulation.make_ready(op)
            elif kind == "failed":
                key, text = message
                if key in self.pending:
                    self._fail(self.pending.pop(key), text)
            else:
                self._fail_all(_LOST)
        return False

    def _fail_all(self, text):
        for key in list(self.pending):
            self._fail(self.pending.pop(key), text)

    def _fail(self, op, text):
        op.kwargs["call"].failure = dist.DistBackendError(text)
        op.seconds = 0.0
        self._simulation.make_ready(op)

    def post(self, op):
        """Tell the keeper of the time that an op is ready at `op.start`."""
        call, model = op.kwargs["call"], op.engine.device.model
        now, op.ready = op.ready, op.start
        self.pending[call.key] = op
        link = figures_of(op.engine.device.peer_link)
        network = _beyond_host(op)
        host = host_number(), os.environ.get("GROUP_RANK", "0"), model.host
        known = _has_values(op)
        try:
            self._member.post(
                now, call.key, call.members, call.text, op.ready, host, link, network, known
            )
        except OSError:
            self._fail_all(_LOST)

    def waits_for_values(self, op):
        """Tell the keeper that this rank waits for values of others, at the time of the op."""
        self._member.waits_for_values(op.kwargs["call"].key, op.start)

    def done(self, op):
        """Tell the keeper that this rank needs nothing more of a collective."""
        key = op.kwargs["call"].key
        self._done[key[:-1]] = key[-1]
        self._member.done(key)

    def _run_to(self, key, is_posted_by_all):
        """Simulate, in its thread, until this rank has posted a collective, or has done it."""

        def is_ahead():
            posted = key in self.pending and not is_posted_by_all
            return not posted and self._done.get(key[:-1], -1) < key[-1]

        def run():
            self._simulation.run_while(is_ahead)
            if is_ahead():
                self._member.is_idle()

        self._simulation.ask(run)

    def end(self):
        """Simulate all that was issued, and leave."""
        self._simulation.finish()
        self._member.end()

    def leave(self):
        """Leave: the time is kept in another way now."""
        self._member.leave()


_numbers = itertools.count()


def _beyond_host(op):
    """Return bandwidth and latency on the way to a GPU of another host: over link and network."""
    device = op.engine.device
    ways = figures_of(device.peer_link), figures_of(device.model.machine.network)
    return min(way[0] for way in ways), max(way[1] for way in ways)


def _has_values(op):
    """Return whether this rank has the values that others read."""
    simulation = op.engine.simulation
    return simulation.values or not op.kwargs["call"].gives or all(map(is_known, op.args[1]))


class EqualRanks:
    """In the place of `Meetings` where one rank stands for many equal ones.

    Args:
        simulation: the `Simulation`.
    """

    pending = ()

    def __init__(self, simulation):
        self._simulation = simulation

    def may_go_to(self, seconds):
        """Return True: all ranks are ready when this one is."""
        return True

    def post(self, op):
        """Let a collective begin when this rank is ready."""
        call, device = op.kwargs["call"], op.engine.device
        k, op.ready = len(call.members), op.start
        one_host = k <= (device.model.machine.gpus or k)
        link = figures_of(device.peer_link) if one_host else _beyond_host(op)
        call.meet(op, *link, _has_values(op))
        self._simulation.make_ready(op)

    def waits_for_values(self, op):
        """Do nothing: there is nobody else."""

    done = waits_for_values

    def leave(self):
        """Do nothing either."""

    def end(self):
        """Simulate all that was issued."""
        self._simulation.finish()
