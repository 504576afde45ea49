"""Ranks compare their calls before an exchange of values, and agree on its start."""

import contextlib
import platform
import re
import time
import zlib
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

_TEXT_BYTES = 2048  # of a rank's text in an error message
_REPLY_SECONDS = 2.0  # for other ranks to report what they wait for
NO_LINK = float("inf")


class CollectiveTimeout(dist.DistBackendError):
    """Other ranks did not join a collective in time.

    Attributes:
        call: a description of the collective.
        missing: the ranks that did not join, numbered as in the default group.
    """

    def __init__(self, text, call="", missing=()):
        super().__init__(text)
        self.call, self.missing = call, tuple(missing)


def is_gloo_timeout(text):
    """Return whether an error message is gloo's for a time-out, which has no exception type."""
    return bool(re.search("gloo.*(Timed out waiting|timeout caused)", text, re.DOTALL))


def is_lost_connection(text):
    """Return whether an error message is gloo's for a lost peer."""
    return bool(re.search("gloo.*Connection (closed|reset) by peer", text, re.DOTALL))


def ranks_text(ranks):
    """Return "rank 1" or "ranks 0, 2"."""
    names = list(map(str, ranks))
    return f"rank{'s' * (len(names) > 1)} {', '.join(names)}"


def disagreement_text(calls):
    """Return the error message for ranks with different calls, given {rank: call}."""
    ranks_of = {}
    for rank, call in sorted(calls.items()):
        ranks_of.setdefault(call, []).append(rank)
    lines = (f"  {ranks_text(ranks)}: {call}" for call, ranks in ranks_of.items())
    return "\n".join(["the ranks disagree:", *lines])


def machine_id():
    """Return an identifier of this machine's boot; ranks with equal ones share a clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            name = file.read()
    except OSError:
        name = platform.node()
    return zlib.crc32(name.encode())


def bandwidth_and_latency(link):
    """Return bandwidth and latency of a `Link`; None is an unlimited link."""
    return (NO_LINK, 0.0) if link is None else (link.bandwidth, link.latency)


@dataclass
class Agreement:
    """The start and the link of an exchange, equal on all ranks."""

    start: float  # `perf_counter` seconds at which the last rank was ready
    bandwidth: float  # the lowest among the ranks' links, bytes/s; infinite if none has a limit
    latency: float  # the highest among the ranks' links, seconds

    @classmethod
    def of(cls, table, ready):
        """Return the agreement of ranks from their rows; `ready` is this rank's time."""
        one_clock = bool((table[:, 4] == table[0, 4]).all())
        start = table[:, 1].max().item() if one_clock else max(ready, perf_counter())
        return cls(start, table[:, 2].min().item(), table[:, 3].max().item())


class GlooConnections:
    """The ranks of a process group, and their gloo connections."""

    def __init__(self, store, rank, size, global_ranks, timeout):
        self.store, self.rank, self.size = store, rank, size
        self.global_ranks = global_ranks
        self.timeout = timeout
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.machine = machine_id()

    def set_timeout(self, timeout):
        self.timeout = timeout
        self.gloo.set_timeout(timeout)

    def agree(self, call, ready, link, failure):
        """Compare calls with all other ranks and return the `Agreement`.

        `call` describes this rank's call, whose inputs were ready at the second `ready`; `failure`
        is the exception that prevents it from taking part, or None. Raises CollectiveTimeout if a
        rank did not join in time, dist.DistBackendError if calls differ or a rank cannot take part.
        """

        def gather(mine):
            rows = [torch.empty_like(mine) for _ in range(self.size)]
            self.gloo.allgather([rows], [mine]).wait()
            return rows

        return self._agree(call, ready, link, failure, self.global_ranks, gather)

    def agree_with(self, other, sends, call, ready, link, failure):
        """Return the `Agreement` with one rank on a message, which this rank sends or receives."""
        tags = iter(((0, 1), (2, 2)))

        def swap(mine):
            (there, back), theirs = next(tags), torch.empty_like(mine)
            if sends:
                self.gloo.send([mine], other, there).wait()
                self.gloo.recv([theirs], other, back).wait()
            else:
                self.gloo.recv([theirs], other, there).wait()
                self.gloo.send([mine], other, back).wait()
            return [mine, theirs]

        ranks = [self.global_ranks[rank] for rank in (self.rank, other)]
        name = f"send of {call} to" if sends else f"recv of {call} from"
        name = f"{name} rank {ranks[1]}"
        return self._agree(name, ready, link, failure, ranks, swap, call)

    def _agree(self, call, ready, link, failure, ranks, exchange, common=None):
        """Exchange rows by `exchange`; if ranks disagree, exchange texts and raise.

        `common` is the part of the call that is equal on all ranks, by default all of it.
        """
        number = zlib.crc32((common or call).encode())
        row = number, ready, *bandwidth_and_latency(link), self.machine, failure is not None
        row = torch.tensor(row, dtype=torch.float64)
        try:
            table = torch.stack(exchange(row))
            if not ((table[:, 0] != table[0, 0]).any() or table[:, 5].any()):
                return Agreement.of(table, ready)
            text = call if failure is None else f"{call}, but cannot: {failure}"
            data = bytearray(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))
            found = exchange(torch.frombuffer(data, dtype=torch.uint8))
            texts = [bytes(each.numpy()).decode(errors="replace").rstrip() for each in found]
        except RuntimeError as error:  # a gloo error
            raise self._failed(call, error) from None
        raise dist.DistBackendError(disagreement_text(dict(zip(ranks, texts, strict=True))))

    # -- errors

    def _names(self, ranks):
        return ranks_text(self.global_ranks[rank] for rank in ranks)

    def _failed(self, call, error):
        """Return an exception that names the missing ranks, given a gloo error."""
        reason = " ".join(str(error).split())
        seconds = self.timeout.total_seconds()
        late = is_gloo_timeout(reason)
        if late:
            text = f"{self._names([self.rank])} waited {seconds:g} s in {call}"
        else:
            text = f"{self._names([self.rank])} lost a connection in {call} ({reason:.200})"
        silent = []
        with contextlib.suppress(RuntimeError):
            lines, silent = self._others(call, late)
            text += "".join(f"\n  {line}" for line in lines)
        if late:
            return CollectiveTimeout(text, call, [self.global_ranks[rank] for rank in silent])
        return dist.DistBackendError(text)

    def _others(self, call, late):
        """Return lines on what other ranks wait for, and the ranks that do not answer.

        After a lost connection, ranks in the same call have raised an error, too.
        """
        keys = [f"waits/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], call)
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _REPLY_SECONDS
        while time.monotonic() < deadline and not self.store.check([keys[r] for r in others]):
            time.sleep(0.05)
        lines, silent = [], []
        for rank in others:
            if self.store.check([keys[rank]]):
                its = self.store.get(keys[rank]).decode()
                if its != call:
                    lines.append(f"{self._names([rank])} waits in {its}")
                elif not late:
                    lines.append(f"{self._names([rank])} waited in it and gave up")
            else:
                silent.append(rank)
        if silent:
            lines.insert(0, f"{self._names(silent)} did not join")
        return lines, silent
