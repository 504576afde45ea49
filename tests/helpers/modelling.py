"""Modelled GPUs whose kernels take as long as a test says, so that schedules are whole numbers."""

import contextlib
import math
from datetime import timedelta

import torch
from torch.distributed import HashStore

import d2lpar
from vgpu import Link, clock, virtual_gpus
from vgpu.distributed.timekeeper import KEY, KeeperConnection
from vgpu.modelled.hardware import Machine
from vgpu.modelled.kernels import kernel_of
from vgpu.modelled.modelled_gpu import GPU
from vgpu.runtime.streams import StreamQueue

BYTE_A_SECOND = Link(1.0)


class Fixed(GPU):
    """A GPU whose kernels all take `seconds`; by default a collective keeps none of it busy."""

    def __init__(self, seconds=0.0, link=None, peer_link=None, multiprocessors=math.inf, **more):
        figures = 2**40, 1.0, {"float32": 1.0}, multiprocessors, link, peer_link
        super().__init__("fixed", *figures, **more)
        vars(self).update(seconds=seconds, kernels=[])  # what it was asked for

    def kernel_seconds(self, kernel):
        self.kernels.append(kernel)
        return self.seconds


def member_of(port, secret, rank=0, size=1, seconds=20):
    """Return a rank that joins the keeper of the simulated clock at a port of this machine."""
    store = HashStore()
    store.add(f"{KEY}/ranks", 1)
    store.set(KEY, f"127.0.0.1 {port} {secret.decode()}")
    return KeeperConnection(store, rank, size, timedelta(seconds=seconds), lambda *what: None)


def fixed_gpus(n, seconds=0.0, link=None, peer_link=None, launch=0.0, values=True, **machine):
    """Return `n` modelled GPUs of one Machine, see `Fixed`; all else takes no time."""
    gpu = Fixed(seconds, link, peer_link)
    return virtual_gpus(n, model=Machine(gpu, host=launch, **machine), values=values)


@contextlib.contextmanager
def noted(note):
    """Call `note(op)` for each op that is issued in the block."""
    issue = StreamQueue.issue

    def noting(stream, op, *args):
        note(op)
        return issue(stream, op, *args)

    StreamQueue.issue = noting
    try:
        yield
    finally:
        StreamQueue.issue = issue


@contextlib.contextmanager
def schedule():
    """Give a list that holds, after the block, (device, engine, start, end) in order of issue."""
    found, ops = [], []
    with noted(ops.append):
        yield found
        d2lpar.synchronize()
    found += [(op.engine.device.index, op.engine.name, op.start, op.end) for op in ops]


def times(found):
    return [span[2:] for span in found]


def sleep(device, seconds, stream=None):
    """Issue a kernel of exactly `seconds`."""
    with torch.vgpu.device(device), torch.vgpu.stream(stream):
        torch.vgpu._sleep(seconds)


def room(num_bytes, device="cpu"):
    """Return an empty tensor of so many bytes, without an op; on the CPU it is pinned."""
    tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


@contextlib.contextmanager
def kernels():
    """Give a list that holds the `Kernel` of each op that was issued in the block."""
    found = []

    def note(op):
        if op.kind == "kernel":
            found.append(kernel_of(op))

    with noted(note):
        yield found


def flops(found):
    return sum(product.flops for kernel in found for product in kernel.products)


def seconds_of(work):
    torch.vgpu.synchronize()
    start = clock()
    work()
    torch.vgpu.synchronize()
    return clock() - start
