"""What the messages of a group go over: links inside a machine, network cards between machines."""

from collections import Counter
from typing import NamedTuple

from vgpu.distributed.agreement import NO_LINK, figures_of


class Route(NamedTuple):
    """What the messages of a collective go over.

    Attributes:
        bandwidth: bytes per second that each rank sends, at the narrowest place.
        latency: seconds of a step inside a machine.
        startup: seconds before the first step.
        machines: the number of machines that the ranks are in.
        between: seconds of a step from one machine to another.
        part: bytes per second that each rank sends to other machines while all ranks do.
    """

    bandwidth: float
    latency: float
    startup: float = 0.0
    machines: int = 1
    between: float = 0.0
    part: float = NO_LINK


def way_inside(op):
    """Return bandwidth, latency and start-up of a rank's way to others of its machine.

    A group of k uses what joins them: at most k - 1 times the link between two.
    """
    device = op.engine.device
    gpu, link = device.model.gpu, device.peer_link
    of_pair, latency = figures_of(link)
    rings = getattr(gpu, "collective_link", None)
    if rings is None or op.peer is not None or link is not gpu.peer_link:
        return of_pair, latency, 0.0 if link is None else link.startup
    bandwidth = min(rings.bandwidth, of_pair * (len(op.members) - 1))
    return bandwidth, rings.latency, rings.startup


def way_between(op, num_ranks, host):
    """Return a rank's part of the bandwidth of its machine's network cards, latency and start-up.

    The ranks of a job in one machine are taken to use the network at the same time. So each gets an
    equal part of the cards, and a group gets the parts of all of its ranks. A message has a card to
    itself.

    Args:
        op: the collective.
        num_ranks: how many ranks fill machines in turn, the last of which may have fewer.
        host: the number of the rank's machine among these.
    """
    machine = op.engine.device.model.machine
    if machine.network is None:
        return NO_LINK, 0.0, 0.0
    gpus = machine.gpus or num_ranks
    left = num_ranks - host * gpus
    ranks = min(gpus, left if left > 0 else num_ranks)  # ranks may choose GPUs in another order
    part = machine.network.bandwidth * machine.network_cards / ranks
    if op.peer is not None:
        part = max(part, machine.network.bandwidth)
    return part, machine.network.latency, machine.network.startup


def route(hosts, inside, between):
    """Return the `Route` of a collective from what each of its ranks has.

    Args:
        hosts: the machine of each rank.
        inside, between: of each rank, what `way_inside` and `way_between` return.
    """
    narrowest, latency, startup = _slowest(inside)
    in_each = Counter(hosts)
    if len(in_each) == 1:
        return Route(narrowest, latency, startup)
    part, step, start = _slowest(between)
    parts = (part * in_each[host] for host, (part, *_) in zip(hosts, between, strict=True))
    bandwidth = min(narrowest, *parts)
    return Route(bandwidth, latency, max(startup, start), len(in_each), step, part)


def _slowest(ways):
    bandwidths, latencies, startups = zip(*ways, strict=True)
    return min(bandwidths), max(latencies), max(startups)
