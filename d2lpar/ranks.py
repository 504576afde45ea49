"""What a rank of a process group does in a training step: its phases, its buckets, its bytes."""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from d2lpar.timing import Mark


class StepRecorder:
    """Record the phases of a rank's training step, and when each bucket of DDP is sent.

        recorder = StepRecorder()
        recorder.watch(net)
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

    def watch(self, net, hook=allreduce_hook, state=None):
        """Record every bucket of a `DistributedDataParallel` as "bucket 0", "bucket 1" and so on.

        A bucket's mark starts when its last gradient is there and ends when the sum is.

        Args:
            net: the network; its communication hook is set here.
            hook, state: the communication hook that sends the bucket.
        """

        def recorded(_, bucket):
            name, start = f"bucket {bucket.index()}", self._now()
            arrival = self._arrival(bucket.buffer().nbytes)

            def note(future):
                time.sleep(max(0.0, arrival - time.perf_counter()))
                self._moments.append((name, start, self._now()))
                return future.value()

            return hook(state, bucket).then(note)

        net.register_comm_hook(None, recorded)

    def _arrival(self, num_bytes):
        """Return when the link has carried the bytes, after those that came before."""
        if self.link is None:
            return 0.0
        k = dist.get_world_size()
        start = max(time.perf_counter(), self._free_at)
        self._free_at = start + self.link.seconds(2 * (k - 1) * num_bytes // k)
        return self._free_at


class CollectiveBytes:
    """Count the bytes that a rank hands to collectives in a block.

        with CollectiveBytes() as counted:
            loss.backward()
        counted.total

    For a collective whose input and output differ in size the larger counts. Of the calls that a
    communication hook makes when a message has arrived, in a thread of the process group, those of
    `torch.distributed.all_reduce` are counted.

    Attributes:
        calls: a dict from the collective's name to the list of its sizes in bytes, by call.
    """

    def __init__(self):
        self.calls = {}

    @property
    def total(self):
        """The sum over all calls."""
        return sum(map(sum, self.calls.values()))

    def __enter__(self):
        self._all_reduce, thread = dist.all_reduce, threading.get_ident()

        def all_reduce(*args, **kwargs):
            mine = threading.get_ident() == thread
            with contextlib.nullcontext() if mine else _Counting(self.calls):
                return self._all_reduce(*args, **kwargs)

        self._mode = _Counting(self.calls)
        self._mode.__enter__()
        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        dist.all_reduce = self._all_reduce
        self._mode.__exit__(*error)


class _Counting(TorchDispatchMode):
    """Sees what a thread hands to collectives: also what C++ does, as DDP's buckets."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = (
                sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
                for value in (*args, *(kwargs or {}).values())
            )
            self.calls.setdefault(func.__name__.split(".")[0].strip("_"), []).append(max(sizes))
        return func(*args, **(kwargs or {}))
