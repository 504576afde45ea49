"""DistributedDataParallel seen from a rank: its batch, its step, its buckets and their order."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from d2lpar.data.batches import check_batch
from d2lpar.processes.collective_bytes import CollectiveBytes
from d2lpar.timelines.timeline import Timeline
from d2lpar.timing import best_seconds


def device_of_rank():
    """Return the rank's own GPU, virtual or real, which `launch` has made the current one."""
    kind = "cuda" if torch.cuda.is_initialized() else "vgpu"
    return torch.device(kind, torch.get_device_module(kind).current_device())


def batch_of_rank(X, y):
    """Return this rank's parts of X (b, ...) and y (b,), on its GPU; sizes differ by at most one.

    Raises ValueError if X and y differ in length.
    """
    check_batch(X, y)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tuple(tensor.tensor_split(world_size)[rank].to(device_of_rank()) for tensor in (X, y))


def time_allreduce(num_bytes):
    """Return the seconds that `all_reduce` takes for a tensor of this size, the best of eight."""
    x = torch.zeros(num_bytes // 4, device=device_of_rank())
    return best_seconds(lambda: dist.all_reduce(x), repeats=8)


def bucket_bytes(net, X, y, bucket_cap_mb):
    """Return the sizes of the buckets of `DistributedDataParallel`, in bytes, in order.

    Args:
        net: a classifier.
        X, y: a batch, (b, ...) and (b,), for every rank.
        bucket_cap_mb: size of a bucket, in MiB.
    """
    device = device_of_rank()
    ddp = DistributedDataParallel(net.to(device), bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):  # after the first step buckets are built anew
        with CollectiveBytes() as counted:
            F.cross_entropy(ddp(X.to(device)), y.to(device)).backward()
    return counted.calls["allreduce"]


def record_step(net, X, y, bucket_cap_mb, buckets=None):
    """Record the second step of `DistributedDataParallel`, which has the final buckets.

    In the first step DDP does not know the order of the gradients yet; it rebuilds the buckets
    at the start of the second forward pass.

    Args:
        net: a classifier, the same on every rank.
        X, y: the whole batch, (b, ...) and (b,).
        bucket_cap_mb: size of a bucket, in MiB.
        buckets: a replacement for DDP: a function of the network and `bucket_cap_mb`, called once.
            Calling `wait()` on the object that it returns ends a backward pass.

    Returns:
        A `Timeline` with the phases "forward" and "backward", and the gradients, on the CPU.
    """
    net = net.to(device_of_rank())
    if buckets is None:
        ddp, wait = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb), lambda: None
    else:
        ddp, wait = net, buckets(net, bucket_cap_mb).wait
    X, y = batch_of_rank(X, y)
    for _ in range(2):
        net.zero_grad()
        dist.barrier()
        with Timeline() as timeline:
            with timeline.mark("forward"):
                loss = F.cross_entropy(ddp(X), y)
            with timeline.mark("backward"):
                loss.backward()
                wait()
    return timeline, [p.grad.cpu() for p in net.parameters()]


def merged_timeline(timelines, phases=True):
    """Return one `Timeline` of all ranks, in which waiting for other ranks is apart from sending.

    A rank's span of a collective begins when this rank is ready. Here it begins when the last rank
    is, and the time before is a span of the kind "wait" on the same row.

    Args:
        timelines: the timelines of all ranks, in the order of ranks, with the same collectives.
        phases: whether to keep the phases that `Timeline.mark` named.
    """
    merged = Timeline.merged(timelines, kinds=("kernel", "collective"))
    if not phases:
        merged.marks.clear()
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


def backward_seconds(timeline):
    """Return the seconds of the phase "backward" of one rank's `Timeline`, messages included."""
    spans = [span for span in timeline.select(mark="backward") if span.kind != "wait"]
    return max(span.end for span in spans) - min(span.start for span in spans)


def gradient_arrivals(net, X, y, beside=0):
    """Return when each gradient is ready in a backward pass that sends nothing, the best of two.

    Args:
        net: a classifier.
        X, y: the whole batch, (b, ...) and (b,).
        beside: bytes of a sum that nobody needs and that travels meanwhile, to see what it costs
            the pass.

    Returns:
        A list of (seconds since the device began the pass, bytes), in the order of arrival.
    """
    net, (X, y) = net.to(device_of_rank()), batch_of_rank(X, y)
    module, arrivals = torch.get_device_module(X.device), []

    def moment():
        event = module.Event(enable_timing=True)
        event.record()
        return event

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: arrivals.append((moment(), p.grad.nbytes)))
    passes = []
    for _ in range(3):  # one to warm up
        net.zero_grad()
        arrivals.clear()
        dist.barrier()
        loss = F.cross_entropy(net(X), y)
        if beside:
            other = dist.all_reduce(torch.ones(beside // 4, device=X.device), async_op=True)
        start = moment()
        loss.backward()
        if beside:
            other.wait()
        module.synchronize()
        passes.append([(start.elapsed_time(event) / 1e3, n) for event, n in arrivals])
    return min(passes[1:], key=lambda arrived: arrived[-1])
