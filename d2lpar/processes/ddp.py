"""DistributedDataParallel seen from a rank: its batch, its phases, its buckets and when they go."""

import contextlib
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from d2lpar.data.batches import check_batch
from d2lpar.processes.collective_bytes import CollectiveBytes
from d2lpar.timelines.timeline import Mark
from d2lpar.timing import best_seconds


def batch_of_rank(X, y):
    """Return this rank's part of a batch, on its GPU where it has one.

    Args:
        X, y: inputs (b, ...) and labels (b,); parts differ by one example at most.

    Returns:
        Both parts.

    Raises:
        ValueError: X and y differ in length.
    """
    check_batch(X, y)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tuple(tensor.tensor_split(world_size)[rank].to(_device()) for tensor in (X, y))


def _device():
    """Return the rank's own GPU, which `launch` has made the current one, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def time_allreduce(num_bytes):
    """Return the seconds that `all_reduce` takes for a tensor of this size, the best of eight."""
    x = torch.zeros(num_bytes // 4, device=_device())
    return best_seconds(lambda: dist.all_reduce(x), repeats=8)


def bucket_bytes(net, X, y, bucket_cap_mb):
    """Return the sizes of the buckets of `DistributedDataParallel`, in bytes, in order.

    Args:
        net: a classifier.
        X, y: a batch, (b, ...) and (b,), for every rank.
        bucket_cap_mb: size of a bucket, in MiB.
    """
    ddp = DistributedDataParallel(net.to(_device()), bucket_cap_mb=bucket_cap_mb)
    for _ in range(2):  # after the first step buckets are built anew
        with CollectiveBytes() as counted:
            F.cross_entropy(ddp(X.to(_device())), y.to(_device())).backward()
    return counted.calls["allreduce"]


def record_step(net, X, y, bucket_cap_mb, link=None):
    """Take two steps of `DistributedDataParallel`, and record the second, whose buckets are final.

    Args:
        net: a classifier, the same on every rank.
        X, y: the whole batch, (b, ...) and (b,).
        bucket_cap_mb: size of a bucket, in MiB.
        link: as of `StepRecorder`.

    Returns:
        The marks "forward", "backward" and those of the buckets; and the gradients, on the CPU.
    """
    ddp = DistributedDataParallel(net.to(_device()), bucket_cap_mb=bucket_cap_mb)
    X, y = batch_of_rank(X, y)
    recorder = StepRecorder(link)
    recorder.record_buckets(ddp)
    for _ in range(2):
        net.zero_grad()
        dist.barrier()
        recorder.clear()
        with recorder.mark("forward"):
            loss = F.cross_entropy(ddp(X), y)
        with recorder.mark("backward"):
            loss.backward()
    return recorder.marks, [p.grad.cpu() for p in net.parameters()]


def rank_rows(ranks):
    """Return what `plot_schedule` draws: each rank, waiting after its last gradient, and its link.

    Args:
        ranks: what `record_step` returned on each rank.
    """
    rows = {}
    for rank, ((forward, backward, *sent), _) in enumerate(ranks):
        computed = max(mark.start for mark in sent)
        waits = Mark("waits", computed, backward.end)
        rows[f"rank {rank}"] = [forward, backward._replace(end=computed), waits]
        rows[f"rank {rank}'s link"] = sent
    return rows


def gradient_arrivals(net, X, y):
    """Return when each gradient is there in a backward pass that sends nothing.

    Args:
        net: a classifier.
        X, y: the whole batch, (b, ...) and (b,).

    Returns:
        A list of (seconds since the backward pass began, bytes), in the order of arrival.
    """
    net, (X, y) = net.to(_device()), batch_of_rank(X, y)
    recorder = StepRecorder()

    def note(p):
        with recorder.mark(f"gradient {p.grad.nbytes}"):
            pass

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(note)
    for _ in range(2):
        net.zero_grad()
        loss = F.cross_entropy(net(X), y)
        dist.barrier()
        recorder.clear()
        with recorder.mark("backward"):
            loss.backward()
    backward, *gradients = recorder.marks
    return [(mark.end - backward.start, int(mark.name.split()[1])) for mark in gradients]


class StepRecorder:
    """Record the phases of a rank's training step, and when each bucket of DDP is sent.

        recorder = StepRecorder()
        recorder.record_buckets(net)
        with recorder.mark("backward"):
            loss.backward()
        return recorder.marks

    Args:
        link: a `Link` between processes on CPUs that share one memory. gloo sums each bucket as
            ever; then its gradients are kept back until the link would have carried the bytes of
            a ring, 2 (k-1)/k times those of the bucket, one bucket after the other, each from
            when this rank had it ready.

    Raises:
        ValueError: a link, and the rank has a CUDA GPU, which has a link of its own.
    """

    def __init__(self, link=None):
        self._on_cuda = torch.cuda.is_initialized()
        if link is not None and self._on_cuda:
            raise ValueError(f"{link} is for processes on CPUs: this rank has a CUDA GPU")
        self.link = link
        self._free_at = 0.0
        self._moments = []
        if self._on_cuda:
            torch.cuda.synchronize()
            self._origin = self._now()
        self._started = time.perf_counter()

    def _now(self):
        """Return this moment: of the host's clock, or of the current CUDA stream."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def marks(self):
        """What was recorded: `Mark`s in seconds of `time.perf_counter`, ordered by start.

        All processes of a machine share that clock.
        """
        moments = list(self._moments)
        if self._on_cuda:
            torch.cuda.synchronize()
            moments = [
                (name, *(self._started + self._origin.elapsed_time(e) / 1e3 for e in events))
                for name, *events in moments
            ]
        return sorted((Mark(*moment) for moment in moments), key=lambda mark: mark[1:])

    def clear(self):
        """Forget what was recorded."""
        self._moments.clear()

    @contextlib.contextmanager
    def mark(self, name):
        """Give a name to what this rank does in a block."""
        start = self._now()
        try:
            yield
        finally:
            self._moments.append((name, start, self._now()))

    def record_buckets(self, net):
        """Record every bucket of a `DistributedDataParallel` as "bucket 0", "bucket 1" and so on.

        A bucket's mark starts when its last gradient is there and ends when the sum is. The
        communication hook of `net` is set here.
        """

        def recorded(_, bucket):
            name, start = f"bucket {bucket.index()}", self._now()
            arrival = self._arrival(bucket.buffer().nbytes)

            def note(future):
                time.sleep(max(0.0, arrival - time.perf_counter()))
                self._moments.append((name, start, self._now()))
                return future.value()

            return allreduce_hook(None, bucket).then(note)

        net.register_comm_hook(None, recorded)

    def _arrival(self, num_bytes):
        """Return when the link has carried the bytes, after those that came before."""
        if self.link is None:
            return 0.0
        k = dist.get_world_size()
        start = max(time.perf_counter(), self._free_at)
        self._free_at = start + self.link.seconds(2 * (k - 1) * num_bytes // k)
        return self._free_at
