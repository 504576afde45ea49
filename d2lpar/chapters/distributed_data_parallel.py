"""Chapter 07: the GPU and the batch of a rank, and the merged timeline of all ranks."""

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from d2lpar.collectives import allreduce
from d2lpar.data.batches import check_batch, split_batch
from d2lpar.timelines.timeline import Timeline
from d2lpar.training import sgd


def device_of_rank():
    """Return the GPU of this rank, virtual or real: the current device, set by `launch`."""
    kind = "cuda" if torch.cuda.is_initialized() else "vgpu"
    return torch.device(kind, torch.get_device_module(kind).current_device())


def batch_of_rank(X, y):
    """Return this rank's parts of a batch, on its GPU; sizes differ by at most one.

    Args:
        X, y: the whole batch, (b, ...) and (b,).

    Raises:
        ValueError: X and y differ in length.
    """
    check_batch(X, y)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tuple(tensor.tensor_split(world_size)[rank].to(device_of_rank()) for tensor in (X, y))


def merged_timeline(timelines):
    """Return one `Timeline` of all ranks that separates waiting for other ranks from sending.

    A rank's span of a collective begins when that rank is ready. Here it begins when the last rank
    is ready, after a span of kind "wait" in the same row.

    Args:
        timelines: the timelines in the order of ranks, with the same collectives.
    """
    merged = Timeline.merged(timelines, kinds=("kernel", "collective"))
    each = [merged.select(device, engine="collectives") for device in merged.devices]
    for same in zip(*each, strict=False):
        start = max(span.start for span in same)
        for span in same:
            if span.start < start < span.end:
                place = merged.spans.index(span)
                waiting = replace(span, name="other ranks", kind="wait", end=start, num_bytes=0)
                merged.spans[place : place + 1] = waiting, replace(span, start=start)
    merged.spans.sort(key=lambda span: (span.start, span.end))
    return merged


def replicas_of(net, devices):
    return [copy.deepcopy(net).to(device) for device in devices]


def backward_of(parts):
    """Compute the summed gradients of each replica; `parts` are triples (replica, X, y)."""
    for replica, X, y in parts:
        F.cross_entropy(replica(X), y, reduction="sum").backward()


def data_parallel_step(net, X, y, devices, lr):
    """Take the step of chapter 05: one replica per device, gradients summed over devices.

    Args:
        net: a classifier; it is not changed.
        X, y: a batch, (b, ...) and (b,), on any device.
        devices: a list of devices.
        lr: learning rate.

    Returns:
        The new parameters, a list of tensors on the CPU.
    """
    replicas = replicas_of(net, devices)
    backward_of(zip(replicas, *split_batch(X, y, devices), strict=True))
    for arrays in zip(*(replica.parameters() for replica in replicas), strict=True):
        allreduce([p.grad for p in arrays])
    sgd(replicas[0].parameters(), lr, batch_size=len(X))
    return [p.detach().cpu() for p in replicas[0].parameters()]
