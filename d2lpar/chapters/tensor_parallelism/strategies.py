"""One network split over devices in three ways, by data, by layers and inside its layers.

`split_by_data`, `split_by_layers` and `split_inside_layers` set a split up and return it as a
`SplitNetwork`; all take the same step, plain SGD on the mean cross-entropy of a batch. `step_cost`
measures it.
"""

import copy
import functools
import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from d2lpar.chapters.distributed_data_parallel import backward_of, replicas_of
from d2lpar.chapters.pipeline_parallelism import (
    one_forward_one_backward,
    pipeline_step,
    split_layers,
)
from d2lpar.chapters.tensor_parallelism.sharded_layers import tensor_parallel, unsplit
from d2lpar.collectives import CollectiveCounter, allreduce
from d2lpar.data.batches import split_batch
from d2lpar.timelines.timeline import Timeline
from d2lpar.timing import best_seconds
from d2lpar.training import sgd


class SplitNetwork(NamedTuple):
    """A network on several devices: `step` trains it, `unsplit` returns it in one piece."""

    step: Callable
    unsplit: Callable


class StepCost(NamedTuple):
    """What a step costs.

    Attributes:
        memory: the most bytes that one device held during the step.
        num_bytes: bytes sent between devices.
        num_messages: the number of copies that sent them.
        num_barriers: how many times all devices waited for each other, see `CollectiveCounter`.
        seconds: the best of several steps.
    """

    memory: int
    num_bytes: int
    num_messages: int
    num_barriers: int
    seconds: float


def split_by_data(net, X, y, devices, lr):
    """Put a replica on each device, and sum all gradients over the devices in one ring.

    The gradients of a replica lie side by side in one tensor.

    Args:
        net: a classifier; it stays as it is.
        X, y: a batch, (b, ...) and (b,), on any device.
        devices: a list of devices.
        lr: learning rate.

    Returns:
        A `SplitNetwork`.
    """
    replicas = replicas_of(net, devices)
    gradients = [
        _side_by_side(replica, device) for replica, device in zip(replicas, devices, strict=True)
    ]
    parts = list(zip(replicas, *split_batch(X, y, devices), strict=True))

    def step():
        backward_of(parts)
        allreduce(gradients, "ring")
        for replica in replicas:
            sgd(replica.parameters(), lr, batch_size=len(X))

    return SplitNetwork(step, lambda: copy.deepcopy(replicas[0]).cpu())


def _side_by_side(net, device):
    """Allocate the gradients of a network as views of one flat tensor of zeros; return it."""
    params = list(net.parameters())
    sizes = [param.numel() for param in params]
    flat = torch.zeros(sum(sizes), dtype=params[0].dtype, device=device)
    for param, piece in zip(params, flat.split(sizes), strict=True):
        param.grad = piece.view_as(param)
    return flat


def split_by_layers(net, X, y, devices, lr, cuts, num_micro_batches):
    """Make a pipeline with a stage on each device and the schedule 1F1B; return a `SplitNetwork`.

    Args:
        net, X, y, devices, lr: as for `split_by_data`; the network is an `nn.Sequential`.
        cuts: the indices of the layers with which the second, third, ... stage begin.
        num_micro_batches: into how many parts the batch is split.

    Raises:
        ValueError: the cuts do not make a stage with parameters for each device, or the batch has
            fewer examples than micro-batches.
    """
    stages = split_layers(net, cuts, devices)
    schedule = one_forward_one_backward(len(stages), num_micro_batches)
    X, y = X.to(devices[0]), y.to(devices[-1])

    def step():
        pipeline_step(stages, X, y, F.cross_entropy, schedule)
        for stage in stages:
            sgd(stage.parameters(), lr, batch_size=1)  # the loss is a mean already

    def whole():
        return nn.Sequential(*(m for stage in stages for m in copy.deepcopy(stage).cpu()))

    return SplitNetwork(step, whole)


def split_inside_layers(net, X, y, devices, lr):
    """Split the layers in pairs, by outputs and by inputs; return a `SplitNetwork`.

    Arguments are as for `split_by_data`. Errors, and networks that split, are as for
    `tensor_parallel`.
    """
    split = tensor_parallel(net, devices)
    X, y = ([tensor.to(device) for device in devices] for tensor in (X, y))

    def step():
        losses = [F.cross_entropy(*pair) for pair in zip(split(X), y, strict=True)]
        torch.autograd.backward(losses)
        sgd(split.parameters(), lr, batch_size=1)

    return SplitNetwork(step, functools.partial(unsplit, split))


def step_cost(way, net, X, y, devices, lr, **options):
    """Measure a step, after two that are not counted.

    Args:
        way: `split_by_data`, `split_by_layers` or `split_inside_layers`, which gets the other
            arguments.

    Returns:
        The `StepCost`, and the network after three steps, on the CPU. What the devices held before
        the network was split does not count as memory.
    """
    accel = torch.get_device_module(devices[0])
    gc.collect()  # what is garbage already should not be freed during the step
    empty = [accel.memory_allocated(device) for device in devices]
    split = way(net, X, y, devices, lr, **options)
    for _ in range(2):
        split.step()
    for device in devices:
        accel.reset_peak_memory_stats(device)
    with Timeline() as timeline, CollectiveCounter() as counter:
        split.step()
    peaks = [accel.max_memory_allocated(device) for device in devices]
    trained, messages = split.unsplit(), timeline.select(kind="copy")
    cost = StepCost(
        memory=max(peak - before for peak, before in zip(peaks, empty, strict=True)),
        num_bytes=sum(span.num_bytes for span in messages),
        num_messages=len(messages),
        num_barriers=counter.barriers,
        seconds=best_seconds(split.step, repeats=4),
    )
    return cost, trained
