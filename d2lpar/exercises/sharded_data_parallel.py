"""Reference solutions for exercise notebook 08."""

import math
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline
from vgpu import equal_ranks, virtual_gpus


@reference
def chunk_of_rank(n, k, rank):
    """Return start, stop and padding of a rank's shard, as torch.chunk divides n numbers."""
    chunks = torch.arange(n).chunk(k)
    starts = [int(chunk[0]) for chunk in chunks]
    start, stop = ([*starts, *[n] * (k + 1 - len(starts))][rank + i] for i in range(2))
    return start, stop, len(chunks[0]) - (stop - start)


@reference
def held_gigabytes(k):
    """Return what a rank holds of 7 billion parameters, worked out by hand."""
    return {8: [112.0, 38.5, 26.25, 14.0], 64: [112.0, 29.3125, 15.53125, 1.75]}[k]


@reference
def ranks_needed():
    """Return the numbers of ranks for 30 billion parameters in 80 GB under ZeRO-2 and ZeRO-3.

    ZeRO-2 leaves 20 GB for 420 / k, and ZeRO-3 needs 480 / k.
    """
    return 21, 6


@reference
def bytes_out(way, k=8):
    """Return the bytes that leave a rank in a step of four layers of 1,000 x 1,000 weights."""
    (gpu,) = virtual_gpus(1, model="v100", values=False)
    with equal_ranks(k):
        net = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(4))).to(gpu)
        params = list(net.parameters())
        if way == "ddp":
            net = DistributedDataParallel(net)
        elif way != "zero1":
            for module in (*net, net):
                fully_shard(module, reshard_after_forward=way == "resharded")
        with Timeline() as timeline:
            net(torch.zeros(8, 1000, device=gpu)).sum().backward()
            if way == "zero1":
                parts = list(torch.cat([p.grad.flatten() for p in params]).chunk(k))
                mine = torch.empty_like(parts[0])
                dist.reduce_scatter(mine, parts)
                dist.all_gather(parts, mine)
        return sum(span.num_bytes for span in timeline.select(kind="collective"))


@reference
def weights_of_one(net, batches, new_optimizer, factor=1, keep=False):
    """Return the weights, flat, after steps on one device.

    `factor` multiplies the gradients. `keep` adds each step's gradients to those before.
    """
    optimizer = new_optimizer(net.parameters())
    for X, y in batches:
        if not keep:
            optimizer.zero_grad()
        (factor * nn.functional.cross_entropy(net(X), y)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@reference
def fewest_tokens(params, k, flops, bandwidth, latency):
    """Return the smallest number of tokens, with exact arithmetic."""
    ring = (k - 1) * (Fraction(latency) + Fraction(2 * params, k) / Fraction(bandwidth))
    return math.ceil(ring * Fraction(flops) / (2 * params))


@reference
def simulated(gather, compute, limit):
    """Return the time of a forward pass, by a simulation in steps of 1 ms; whole milliseconds."""
    gather_left, compute_left, time = list(gather), list(compute), 0
    while any(compute_left):
        gathered = sum(left == 0 for left in gather_left)
        computed = sum(left == 0 for left in compute_left)
        if gathered < len(gather) and gathered - computed < limit:
            gather_left[gathered] -= 1
        if computed < gathered:
            compute_left[computed] -= 1
        time += 1
    return time
