"""Routes of messages: links inside a machine, network cards between machines."""

from collections import Counter
from typing import NamedTuple

from vgpu.distributed.agreement import NO_LINK, bandwidth_and_latency


class Route(NamedTuple):
    """Bandwidth and latency of a collective's messages."""

    bandwidth: float  # bytes/s of each rank at the bottleneck
    latency: float  # seconds per step inside a machine
    startup: float = 0.0  # seconds before the first step
    machines: int = 1  # number of machines
    between: float = 0.0  # seconds per step from one machine to another
    part: float = NO_LINK  # bytes/s of each rank to other machines while all ranks send


def link_in_machine(op):
    """Return bandwidth, latency and start-up of a rank's links inside its machine.

    A group of k ranks uses all links that join them: at most k - 1 times the link of a pair.
    """
    device = op.engine.device
    gpu, link = device.model.gpu, device.peer_link
    of_pair, latency = bandwidth_and_latency(link)
    rings = gpu.collective_link
    if rings is None or op.peer is not None or link is not gpu.peer_link:
        return of_pair, latency, 0.0 if link is None else link.startup
    bandwidth = min(rings.bandwidth, of_pair * (len(op.members) - 1))
    return bandwidth, rings.latency, rings.startup


def share_of_network(op, num_ranks, machine_index):
    """Return a rank's share of its machine's network bandwidth, latency and start-up.

    All ranks of a machine are assumed to use the network at the same time. Each gets an equal share
    of the cards; a group gets the shares of all its ranks. A message gets a whole card. `num_ranks`
    ranks fill machines in turn, so the last may have fewer.
    """
    machine = op.engine.device.model.machine
    if machine.network is None:
        return NO_LINK, 0.0, 0.0
    gpus = machine.gpus or num_ranks
    left = num_ranks - machine_index * gpus
    ranks = min(gpus, left if left > 0 else num_ranks)  # GPUs may be chosen in any order
    part = machine.network.bandwidth * machine.network_cards / ranks
    if op.peer is not None:
        part = max(part, machine.network.bandwidth)
    return part, machine.network.latency, machine.network.startup


def route(machines, inside, between):
    """Return the `Route` of a collective, from machine, link and network share of each rank."""
    narrowest, latency, startup = _slowest(inside)
    in_each = Counter(machines)
    if len(in_each) == 1:
        return Route(narrowest, latency, startup)
    part, step, start = _slowest(between)
    parts = (part * in_each[machine] for machine, (part, *_) in zip(machines, between, strict=True))
    bandwidth = min(narrowest, *parts)
    return Route(bandwidth, latency, max(startup, start), len(in_each), step, part)


def _slowest(links):
    bandwidths, latencies, startups = zip(*links, strict=True)
    return min(bandwidths), max(latencies), max(startups)
