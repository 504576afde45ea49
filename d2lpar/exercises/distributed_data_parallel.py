"""Reference solutions for exercise notebook 07."""

import contextlib
import itertools

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from d2lpar.exercises.marks import reference
from d2lpar.models import resnet18
from d2lpar.timelines.timeline import Timeline
from vgpu import CollectiveBytes, equal_ranks, virtual_gpus


@reference
def dealt(n, k, rank):
    """Return the examples that DistributedSampler assigns to a rank."""
    return list(DistributedSampler(range(n), num_replicas=k, rank=rank, shuffle=False))


@reference
def bytes_of_step(skip, compress=False, num_parts=4, k=4):
    """Return the bytes that a rank passes to all_reduce, and those that it sends."""
    (gpu,) = virtual_gpus(1, model="v100", values=False)
    with equal_ranks(k):
        net = DistributedDataParallel(nn.Linear(1000, 1000, bias=False).to(gpu))
        X = torch.zeros(8, 1000, device=gpu)
        if compress:
            net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with CollectiveBytes() as counted, Timeline() as timeline:
            for part in range(num_parts):
                last = part == num_parts - 1
                with net.no_sync() if skip and not last else contextlib.nullcontext():
                    net(X).sum().backward()
    spans = timeline.select(kind="collective", name="all_reduce")
    return sum(counted.calls["allreduce"]), sum(span.num_bytes for span in spans)


@reference
def weights_of_one(w, parts, lr, gradient):
    """Return the weights after the rounds of all ranks, computed on one device."""
    for r in range(max(map(len, parts))):
        X, y = (torch.cat(each) for each in zip(*(p[r] for p in parts if r < len(p)), strict=True))
        w = w - lr / len(X) * gradient(w, X, y)
    return w


@reference
def shortest(ready, num_bytes, end_of, sum_seconds):
    """Return the milliseconds of the best plan, by brute force."""
    times = []
    for cuts in itertools.product((False, True), repeat=len(ready) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ready)]
        plan = [b - a for a, b in itertools.pairwise(edges)]
        times.append(1e3 * end_of(plan, ready, num_bytes, sum_seconds))
    return min(times)


@reference
def resnet_gradients():
    """Return times and sizes of ResNet-18's gradients, and the milliseconds of the best plan.

    The last is a result of the solution: there are too many plans for brute force.
    """
    with torch.device("meta"):
        sizes = [p.nbytes for p in reversed(list(resnet18(10).parameters()))]
    return [40e-3 * (i + 1) / len(sizes) for i in range(len(sizes))], sizes, 41.98483264
