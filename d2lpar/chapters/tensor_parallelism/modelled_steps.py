"""Training steps of several modelled H100s: forward and backward pass, without the update."""

from collections.abc import Callable

import torch

from d2lpar.chapters.pipeline_parallelism import (
    one_forward_one_backward,
    pipeline_step,
    split_into_stages,
)
from d2lpar.timelines.timeline import Timeline
from vgpu import equal_ranks, virtual_gpus


def _h100s(k, peer_link):
    figures = {"model": "h100", "values": False, "host": 0.0}  # Python takes no time
    return virtual_gpus(k, **figures, **({} if peer_link is None else {"peer_link": peer_link}))


def record_step(way, net_on: Callable, shape, k, peer_link=None):
    """Record a step of `k` ranks that do the same, of which one is simulated.

    Args:
        way: a function that prepares the network of a rank, such as `DistributedDataParallel`.
        net_on: a function that makes the network on a device.
        shape: of the input of each rank, in bfloat16.
        k: number of ranks, each with a GPU.
        peer_link: the `Link` between GPUs; None for the NVLink of a machine with eight H100s.

    Returns:
        The `Timeline` of the third step: in the second, DDP rebuilds its buckets.
    """
    [gpu] = _h100s(1, peer_link)
    with equal_ranks(k):
        net = way(net_on(gpu))
        X = torch.zeros(shape, dtype=torch.bfloat16, device=gpu)

        def step():
            net.zero_grad()
            net(X).sum().backward()

        return Timeline.of(step, warmups=2)


def record_pipeline_step(net_on: Callable, shape, k, num_micro_batches, peer_link=None):
    """Record a step of a pipeline with `k` stages of equally many layers, by the schedule 1F1B.

    Args:
        net_on: a function that makes the network, an `nn.Sequential`, on a device.
        shape: of the whole input, in bfloat16.
        k: number of stages, each with a GPU.
        num_micro_batches: number of micro-batches.
        peer_link: as in `record_step`.

    Returns:
        The `Timeline` of a step.
    """
    gpus = _h100s(k, peer_link)
    net = net_on(gpus[0])
    stages = split_into_stages(net, range(len(net) // k, len(net), len(net) // k), gpus)
    X = torch.zeros(shape, dtype=torch.bfloat16, device=gpus[0])
    labels = torch.zeros(len(X), device=gpus[-1])
    schedule = one_forward_one_backward(k, num_micro_batches)
    with Timeline() as timeline:
        pipeline_step(stages, X, labels, lambda Y, _: Y.sum(), schedule)
    return timeline
