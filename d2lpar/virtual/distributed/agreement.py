"""Before values move, ranks compare what they were asked to do, and agree when it begins."""

import contextlib
import platform
import time
import zlib
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

_TEXT = 2048  # bytes of a rank's text in an error
_LATE = 2.0  # seconds in which other ranks may say that they wait, too
_FIELDS = "call", "ready", "bandwidth", "latency", "host", "failed"
NO_LINK = float("inf")


class CollectiveTimeout(dist.DistBackendError):
    """A rank has waited too long for others.

    Attributes:
        call: a text of what it waits in.
        missing: the ranks that do not wait for anything, as in the default group.
    """

    def __init__(self, text, call="", missing=()):
        super().__init__(text)
        self.call, self.missing = call, tuple(missing)


def host_number():
    """Return a number of this machine since it was started: ranks with the same share a clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            name = file.read()
    except OSError:
        name = platform.node()
    return zlib.crc32(name.encode())


def figures_of(link):
    """Return bandwidth and latency of a `Link`, or of None, which has no limit."""
    return (NO_LINK, 0.0) if link is None else (link.bandwidth, link.latency)


@dataclass
class Agreement:
    """What the ranks of an exchange have agreed on.

    Attributes:
        start: when the last of them was ready, seconds of the wall clock.
        bandwidth: of the slowest link, bytes per second; infinite where no rank has a limit.
        latency: of the slowest, seconds.
    """

    start: float
    bandwidth: float
    latency: float


class Table:
    """The ranks of a process group, and how to reach them.

    Args:
        store: the store of the group.
        rank, size: of this process in the group.
        global_ranks: the rank of each in the default group.
        timeout: a timedelta, how long a rank waits for the others.
    """

    def __init__(self, store, rank, size, global_ranks, timeout):
        self.store, self.rank, self.size = store, rank, size
        self.global_ranks = list(global_ranks) or list(range(size))
        self.timeout = timeout
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._host = host_number()

    def set_timeout(self, timeout):
        """Let a rank wait so long for the others, a timedelta."""
        self.timeout = self.gloo.options._timeout = timeout

    def agree(self, call, ready, link, failure):
        """Compare calls with all other ranks.

        Args:
            call: a text of what this rank does.
            ready: when its inputs were, seconds.
            link: its `Link`, or None for no limit.
            failure: an exception because of which it cannot take part, or None.

        Returns:
            An `Agreement`.

        Raises:
            CollectiveTimeout: a rank did not come in time.
            dist.DistBackendError: calls differ, or a rank cannot take part.
        """
        rows = [torch.empty(len(_FIELDS), dtype=torch.float64) for _ in range(self.size)]
        with self._complaining(call):
            self.gloo.allgather([rows], [self._row(call, ready, link, failure)]).wait()
        table = torch.stack(rows)
        if failure is not None or self._disagree(table):
            text = call if failure is None else f"{call}, but cannot: {failure}"
            raise self._disagreement(text, call)
        return self._agreement(table, ready)

    def agree_with(self, other, sends, call, ready, link, failure, tag):
        """Do the same with one other rank, before a message.

        Args:
            other: its rank in the group.
            sends: whether this rank is the one that sends.
            call, ready, link, failure: as of `agree`.
            tag: that of the message.
        """
        row = self._row(call, ready, link, failure)
        its = torch.empty_like(row)
        name = self.global_ranks[other]
        own = f"send of {call} to rank {name}" if sends else f"recv of {call} from rank {name}"
        with self._complaining(own):
            if sends:
                self.gloo.send([row], other, 4 * tag).wait()
                self.gloo.recv([its], other, 4 * tag + 1).wait()
            else:
                self.gloo.recv([its], other, 4 * tag).wait()
                self.gloo.send([row], other, 4 * tag + 1).wait()
        table = torch.stack([row, its])
        if failure is not None or self._disagree(table):
            if failure is not None:
                own += f", but cannot: {failure}"
            text = self._texts_of_two(own, other, sends, 4 * tag + 2)
            raise dist.DistBackendError(text)
        return self._agreement(table, ready)

    def _row(self, call, ready, link, failure):
        call = zlib.crc32(call.encode())
        row = call, ready, *figures_of(link), self._host, failure is not None
        return torch.tensor(row, dtype=torch.float64)

    @staticmethod
    def _disagree(table):
        return bool((table[:, 0] != table[0, 0]).any() or table[:, 5].any())

    @staticmethod
    def _agreement(table, ready):
        one_clock = bool((table[:, 4] == table[0, 4]).all())
        start = table[:, 1].max().item() if one_clock else max(ready, perf_counter())
        return Agreement(start, table[:, 2].min().item(), table[:, 3].max().item())

    # -- errors

    def _disagreement(self, text, call):
        texts = [torch.empty(_TEXT, dtype=torch.uint8) for _ in range(self.size)]
        with self._complaining(call):
            self.gloo.allgather([texts], [_as_bytes(text)]).wait()
        groups = {}
        for rank, other in enumerate(texts):
            groups.setdefault(_as_text(other), []).append(rank)
        return dist.DistBackendError(self._told(groups))

    def _texts_of_two(self, own, other, sends, tag):
        mine, its = _as_bytes(own), torch.empty(_TEXT, dtype=torch.uint8)
        with self._complaining(own):
            if sends:
                self.gloo.send([mine], other, tag).wait()
                self.gloo.recv([its], other, tag).wait()
            else:
                self.gloo.recv([its], other, tag).wait()
                self.gloo.send([mine], other, tag).wait()
        return self._told({own: [self.rank], _as_text(its): [other]})

    def _told(self, groups):
        lines = ["the ranks disagree:"]
        for text, ranks in sorted(groups.items(), key=lambda item: item[1]):
            lines.append(f"  {self._names(ranks)}: {text}")
        return "\n".join(lines)

    def _names(self, ranks):
        names = ", ".join(str(self.global_ranks[rank]) for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {names}"

    @contextlib.contextmanager
    def _complaining(self, call):
        """Say which ranks are missing when gloo gives up."""
        try:
            yield
        except RuntimeError as error:
            raise self._failed(call, error) from None

    def _failed(self, call, error):
        reason = " ".join(str(error).split())
        seconds = self.timeout.total_seconds()
        late = "imed out" in reason or "timeout" in reason
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
        """Return lines on what the other ranks wait for, and those that say nothing.

        Where a connection is lost, one that waited for the same has given up.
        """
        keys = [f"waits/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], call)
        others = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + _LATE
        while time.monotonic() < deadline and not self.store.check([keys[r] for r in others]):
            time.sleep(0.05)
        lines, silent = [], []
        for rank in others:
            if self.store.check([keys[rank]]):
                its = self.store.get(keys[rank]).decode()
                if its != call:
                    lines.append(f"{self._names([rank])} waits in {its}")
                elif not late:
                    lines.append(f"{self._names([rank])} has waited in it, and given up")
            else:
                silent.append(rank)
        if silent:
            lines.insert(0, f"{self._names(silent)} did not come")
        return lines, silent


def _as_bytes(text):
    data = text.encode()[:_TEXT].ljust(_TEXT)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _as_text(data):
    return bytes(data.numpy()).decode(errors="replace").rstrip()
