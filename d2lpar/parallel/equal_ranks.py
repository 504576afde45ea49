"""One rank that stands for many equal ones, on one modelled GPU.

The ranks of a data-parallel or tensor-parallel job do the same work at the same time. So one of
them tells how long a step takes. Its collectives move nothing: they keep the links of the device
busy for as long as a formula says, one of those in `costs` for example.
"""

import weakref

import torch

MIB = 2**20


class EqualRanks:
    """A group of `k` equal ranks, of which one device runs the work of one.

    Args:
        device: a modelled GPU.
        k: number of ranks.
        seconds: function of the bytes of a tensor: what its sum over the ranks takes.

    Raises:
        ValueError: `k` is not a positive number of ranks.
    """

    def __init__(self, device, k, seconds):
        if not isinstance(k, int) or k < 1:
            raise ValueError(f"the number of ranks is a positive whole number: got {k!r}")
        self.device = torch.device(device)
        self.k = k
        self._seconds = seconds
        self._stream = torch.vgpu.Stream(self.device)

    def allreduce(self, num_bytes):
        """Sum a tensor of `num_bytes` over the ranks behind what the device was given so far.

        It runs on a stream of its own; the current stream goes on.

        Returns:
            An event at its end.
        """
        self._stream.wait_stream(torch.vgpu.current_stream(self.device))
        with self._stream:
            if self.k > 1:
                torch.vgpu._exchange("allreduce", self._seconds(num_bytes), num_bytes)
            return self._stream.record_event()


class Buckets:
    """The gradients of a module in buckets that are summed as backward fills them, as DDP does it.

    Parameters go into buckets in the reverse order of their registration. When the last gradient
    of a bucket is there, its sum begins, beside the rest of backward.

    Args:
        net: a module on the device of `ranks`.
        ranks: `EqualRanks`.
        bucket_mib: size of a bucket, MiB.
        first_mib: size of the first bucket; that of DDP is small, so that sums begin early.
    """

    def __init__(self, net, ranks, bucket_mib=25, first_mib=1):
        self._ranks = ranks
        self._buckets, room = [], 0
        for parameter in reversed([p for p in net.parameters() if p.requires_grad]):
            if parameter.nbytes > room or parameter.dtype != self._buckets[-1][0].dtype:
                room = (bucket_mib if self._buckets else first_mib) * MIB
                self._buckets.append([])
            self._buckets[-1].append(parameter)
            room -= parameter.nbytes
        self._flats = [
            torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=ranks.device)
            for bucket in self._buckets
        ]
        self._missing = [len(bucket) for bucket in self._buckets]
        self._arrivals = {}  # number of a bucket -> event
        own = weakref.ref(self)  # a hook that held its parameter would keep it for ever
        for i, bucket in enumerate(self._buckets):
            for view, parameter in zip(self._views(i), bucket, strict=True):
                parameter.register_post_accumulate_grad_hook(_hook(own, i, view))

    def _views(self, i):
        """Return the parts of bucket `i`, one with the shape of each of its parameters."""
        bucket = self._buckets[i]
        parts = self._flats[i].split([parameter.numel() for parameter in bucket])
        return [part.view(p.shape) for part, p in zip(parts, bucket, strict=True)]

    def _fill(self, i, view, gradient):
        torch.mul(gradient, 1 / self._ranks.k, out=view)
        self._missing[i] -= 1
        if self._missing[i] == 0:
            self._arrivals[i] = self._ranks.allreduce(self._flats[i].nbytes)

    def finish(self):
        """Let the current stream wait for the sums, and copy them to the gradients.

        Raises:
            RuntimeError: a parameter has got no gradient since the last call, or more than one.
        """
        if any(self._missing):
            expected = sum(map(len, self._buckets))
            raise RuntimeError(
                f"{expected - sum(self._missing)} gradients came for {expected} parameters: each "
                "needs one in every step, from one backward pass"
            )
        for i, arrival in self._arrivals.items():
            arrival.wait()
            for view, parameter in zip(self._views(i), self._buckets[i], strict=True):
                parameter.grad.copy_(view)
            self._missing[i] = len(self._buckets[i])
        self._arrivals = {}


def _hook(own, i, view):
    def ready(parameter):
        own()._fill(i, view, parameter.grad)

    return ready
