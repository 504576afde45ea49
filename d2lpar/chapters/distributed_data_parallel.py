"""Chapter 07: the GPU and the batch of a rank, and the merged timeline of all ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist

from d2lpar.data.batches import check_batch
from d2lpar.timelines.timeline import Timeline


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
