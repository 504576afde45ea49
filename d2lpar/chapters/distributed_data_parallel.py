"""Chapter 07: the GPU and the batch of a rank, and the merged timeline of all ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist

from d2lpar.data.batches import check_batch
from d2lpar.timelines.timeline import Phase, Timeline, shifted


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
    """Return one `Timeline` of the ranks of this machine, on their common clock.

    It has kernels and collectives; phases get their rank as a prefix, "rank 1 forward". A rank's
    span of a collective begins when that rank is ready. Here it begins when the last rank is ready,
    after a span of kind "wait" in the same row.

    Args:
        timelines: the timelines in the order of ranks, with the same collectives; each rank has its
            own GPU.
    """
    spans, marks, collectives = [], [], []
    origin = min(timeline.origin for timeline in timelines)
    for rank, timeline in enumerate(timelines):
        delay = origin - timeline.origin
        ran = [shifted(s, delay) for s in timeline.spans if s.kind in ("kernel", "collective")]
        collectives.append([span for span in ran if span.engine == "collectives"])
        spans += ran
        for name, start, end in timeline.marks:
            marks.append(Phase(f"rank {rank} {name}", start - delay, end - delay))
    for same in zip(*collectives, strict=False):
        start = max(span.start for span in same)
        for span in same:
            if span.start < start < span.end:
                spans.remove(span)
                spans.append(replace(span, name="other ranks", kind="wait", end=start, num_bytes=0))
                spans.append(replace(span, start=start))
    devices = dict.fromkeys(span.device for span in spans)
    end = max(timeline.origin + timeline.seconds for timeline in timelines)
    return Timeline.from_spans(spans, marks, devices, origin, end, timelines[0].hardware)
