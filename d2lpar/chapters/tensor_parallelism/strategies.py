"""Compare data, pipeline and tensor parallelism of one network.

`split_by_data`, `split_by_layers` and `split_inside_layers` return a `SplitNetwork`; all take
the same step, plain SGD on the mean cross-entropy of a batch. `step_cost` measures it.
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
    """A network split over devices: `step()` trains it, `unsplit()` returns it on the CPU."""

    step: Callable
    unsplit: Callable


class StepCost(NamedTuple):
    """The cost of a step.

    Attributes:
        memory: the peak of the bytes on one device.
        num_bytes: bytes sent between devices.
        num_messages: number of copies between devices.
        num_barriers: number of collectives, see `CollectiveCounter`.
        seconds: the fastest of several steps.
    """

    memory: int
    num_bytes: int
    num_messages: int
    num_barriers: int
    seconds: float


def split_by_data(net, X, y, devices, lr):
    """Copy the network to each device; one ring sums all gradients, stored in one flat tensor.

    Args:
        net: a classifier; it is not changed.
        X, y: a batch, (b, ...) and (b,), on any device.
        devices: a list of devices.
        lr: learning rate.

    Returns:
        A `SplitNetwork`.
    """
    replicas = replicas_of(net, devices)
    gradients = [
        _flat_gradients(replica, device) for replica, device in zip(replicas, devices, strict=True)
    ]
    parts = list(zip(replicas, *split_batch(X, y, devices), strict=True))

    def step():
        backward_of(parts)
        allreduce(gradients, "ring")
        for replica in replicas:
            sgd(replica.parameters(), lr, batch_size=len(X))

    return SplitNetwork(step, lambda: copy.deepcopy(replicas[0]).cpu())


def _flat_gradients(net, device):
    """Allocate the gradients of a network as views of one flat tensor; return that tensor."""
    params = list(net.parameters())
    sizes = [param.numel() for param in params]
    flat = torch.zeros(sum(sizes), dtype=params[0].dtype, device=device)
    for param, piece in zip(params, flat.split(sizes), strict=True):
        param.grad = piece.view_as(param)
    return flat


def split_by_layers(net, X, y, devices, lr, cuts, num_micro_batches):
    """Build a pipeline with one stage per device and the schedule 1F1B; return a `SplitNetwork`.

    Args:
        net, X, y, devices, lr: as in `split_by_data`; the network is an `nn.Sequential`.
        cuts: the indices of the first layers of the second, third, ... stage.
        num_micro_batches: number of micro-batches.

    Raises:
        ValueError: the number of stages is not that of devices, a stage has no parameters, or the
            batch has fewer examples than micro-batches.
    """
    stages = split_layers(net, cuts, devices)
    schedule = one_forward_one_backward(len(stages), num_micro_batches)
    X, y = X.to(devices[0]), y.to(devices[-1])

    def step():
        pipeline_step(stages, X, y, F.cross_entropy, schedule)
        for stage in stages:
            sgd(stage.parameters(), lr, batch_size=1)  # the loss is already a mean

    def whole():
        return nn.Sequential(*(m for stage in stages for m in copy.deepcopy(stage).cpu()))

    return SplitNetwork(step, whole)


def split_inside_layers(net, X, y, devices, lr):
    """Split the layers in pairs, by outputs and by inputs; return a `SplitNetwork`.

    Args:
        net, X, y, devices, lr: as in `split_by_data`; the network as in `tensor_parallel`.

    Raises:
        TypeError, ValueError: as in `tensor_parallel`.
    """
    split = tensor_parallel(net, devices)
    X, y = ([tensor.to(device) for device in devices] for tensor in (X, y))

    def step():
        losses = [F.cross_entropy(*pair) for pair in zip(split(X), y, strict=True)]
        torch.autograd.backward(losses)
        sgd(split.parameters(), lr, batch_size=1)

    return SplitNetwork(step, functools.partial(unsplit, split))


def step_cost(way, net, X, y, devices, lr, **options):
    """Measure a step, after two warm-up steps.

    Args:
        way: `split_by_data`, `split_by_layers` or `split_inside_layers`.
        net, X, y, devices, lr, options: the arguments of `way`.

    Returns:
        The `StepCost`, and the network after three steps, on the CPU. Memory allocated before the
        split does not count.
    """
    accel = torch.get_device_module(devices[0])
    gc.collect()  # otherwise garbage may be freed during the step
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
