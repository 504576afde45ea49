"""Chapter 10: split layers over devices.

`copied` and `summed` take a list `parts` with one tensor per device of this process. They are f and
g of Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053): the backward pass of each is the
forward pass of the other. Only sums communicate; each is a barrier for all devices. Every device
computes the loss:

    losses = [loss(output, y.to(output.device)) for output in outputs]
    torch.autograd.backward(losses)
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from d2lpar.chapters.pipeline_parallelism import (
    one_forward_one_backward,
    pipeline_step,
    split_into_stages,
)
from d2lpar.collectives import CollectiveCounter, allgather, allreduce
from d2lpar.timelines.timeline import Timeline
from vgpu import equal_ranks, virtual_gpus

__all__ = [
    "CollectiveCounter",
    "allgather",
    "copied",
    "record_pipeline_step",
    "record_step",
    "split_cross_entropy",
    "summed",
]


def _sum(parts):
    """Return the sum of `parts`, on every device."""
    sums = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    allreduce(sums, "ring")
    return tuple(sums)


class _Step(torch.autograd.Function):
    """Forward is `change`, backward `change_back` of the gradients."""

    @staticmethod
    def forward(ctx, change, change_back, *parts):
        ctx.change_back = change_back
        return change(parts)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.change_back(gradients)


def copied(parts):
    """Pass a replicated tensor to layers that differ by device; backward sums its gradients.

    Args:
        parts: equal tensors, one per device.

    Returns:
        The same tensors, a tuple.
    """
    return _Step.apply(lambda parts: tuple(part.view_as(part) for part in parts), _sum, *parts)


def summed(parts):
    """Sum terms; backward passes the gradient of the sum to every term.

    Args:
        parts: tensors of one shape, one per device.

    Returns:
        The sum, on every device: a tuple.
    """
    return _Step.apply(_sum, tuple, *parts)


def split_cross_entropy(outputs, labels, group):
    """Return the mean cross-entropy of logits split by classes over the ranks of a group.

    Ranks exchange three numbers per example: the largest logit, the sum of the exponentials and
    the logit of the label. Backward does not communicate.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

    Args:
        outputs: logits (..., num_classes / world_size) of this rank's classes, in rank order.
        labels: class indices (...), among all classes.
        group: a process group.
    """
    return _SplitCrossEntropy.apply(outputs, labels, group)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, labels, group):
        num_classes = outputs.shape[-1]
        labels = labels.unsqueeze(-1) - group.rank() * num_classes
        here = (labels >= 0) & (labels < num_classes)
        labels = labels.clamp(0, num_classes - 1)
        z = outputs.to(torch.promote_types(outputs.dtype, torch.float32), copy=True)
        largest = z.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z -= largest
        chosen = z.gather(-1, labels) * here
        z.exp_()
        both = torch.stack([z.sum(-1, keepdim=True), chosen])
        dist.all_reduce(both, group=group)
        total, chosen = both
        ctx.save_for_backward(z.div_(total), labels, here)  # the softmax
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, labels, here = ctx.saved_tensors
        softmax.scatter_add_(-1, labels, -here.to(softmax.dtype))
        return softmax.mul_(gradient / here.numel()), None, None


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
