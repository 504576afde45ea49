"""Kernels measured once, alone, on one device, so that a simulation can use their times."""

import time
from collections import defaultdict
from itertools import pairwise
from statistics import fmean, median

import torch

from vgpu.modelled.host import EAGER
from vgpu.modelled.kernels import describe_kernel, kernel_of
from vgpu.modelled.links import Link
from vgpu.operators.plans import operator_of
from vgpu.private.dispatch import TorchDispatchMode, keep_cuda_busy, tree_map_only
from vgpu.runtime import registry, scheduler
from vgpu.tensors.cells import Cell, TensorLayout


def calibrate(program, device="vgpu:0", repeats=3):
    """Time the kernels of a program, one at a time, on one device; simulations can then use them.

        times = calibrate(step, "vgpu:0")       # each kernel alone
        devices = virtual_gpus(8, model=times)  # eight such devices, on enough cores

    Args:
        program: a function without arguments that works on `device`, called `repeats` + 2 times.
        device: a virtual GPU on the wall clock, or a CUDA GPU.
        repeats: how often each kernel is timed at least; the median counts.

    Returns:
        A `Calibration`.

    Raises:
        ValueError: `repeats` is below 1, the device is not such a GPU, or no kernel ran on it.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1: got {repeats}")
    if not callable(program):
        raise TypeError(f"calibrate takes a function without arguments: got {program!r}")
    kind = str(device).partition(":")[0]
    if kind == "vgpu" and not registry.count or kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"there is no device {device} to calibrate")
    device = torch.device(device)
    if device.type == "cuda":
        timing = _TimingCuda(device)
    elif device.type == "vgpu":
        timing = _TimingVirtual(registry.find(device))
    else:
        raise ValueError(f"kernels are timed on a virtual or a CUDA GPU, not on {device}")
    accel = torch.get_device_module(device)
    program()
    accel.synchronize(device)
    with timing:
        for _ in range(repeats):
            program()
    if not timing.seconds:
        raise ValueError(f"the program ran no kernels on {device}")
    return Calibration(
        f"calibrated {accel.get_device_name(device)}",
        {kernel: median(times) for kernel, times in timing.seconds.items()},
        timing.launch_seconds(program),
        accel.get_device_properties(device).total_memory,
        *timing.links(),
    )


def _usual_gap(moments):
    """Return the mean time between moments, without pauses: gaps of more than ten medians."""
    gaps = [later - earlier for earlier, later in pairwise(sorted(moments))]
    if not gaps:
        return EAGER.operator
    limit = 10 * median(gaps)
    return fmean(gap for gap in gaps if gap <= limit)


class Calibration:
    """A GPU whose kernels take the times that were measured; see `calibrate`.

    A kernel that was not measured takes the time of the measured kernel of the same operator that
    is nearest in FLOPs (or bytes), scaled by these. Where its operator was not measured at all, it
    takes as long per byte as all kernels without products of matrices do together. `estimated`
    holds such kernels.

    Attributes:
        name, memory: the name of the device that was measured, and its memory in bytes.
        link, peer_link: its `Link`s to the CPU and to other devices, or None.
        host: the seconds that the host takes to issue an operator.
        seconds: a dict from the signatures of kernels to seconds.
        estimated: signatures of kernels that were asked for and had not been measured.
    """

    def __init__(self, name, seconds, launch_seconds, memory, link, peer_link):
        self.name, self.memory, self.link, self.peer_link = name, memory, link, peer_link
        self.host = launch_seconds
        self.seconds = {kernel.signature: taken for kernel, taken in seconds.items()}
        self.estimated = set()
        self._by_name = {}
        for kernel, taken in seconds.items():
            self._by_name.setdefault(kernel.name, []).append((kernel, taken))
        others = {kernel: taken for kernel, taken in seconds.items() if not kernel.products}
        num_bytes = sum(kernel.num_bytes for kernel in others)
        self._seconds_per_byte = sum(others.values()) / max(num_bytes, 1)

    def kernel_seconds(self, kernel):
        """Return how long a `Kernel` takes."""
        taken = self.seconds.get(kernel.signature)
        if taken is not None:
            return taken
        self.estimated.add(kernel.signature)
        known = self._by_name.get(kernel.name)
        if not known:
            return kernel.num_bytes * self._seconds_per_byte
        work = _work(kernel)
        nearest, taken = min(known, key=lambda pair: abs(_work(pair[0]) - work))
        return taken * work / _work(nearest)

    def rows(self):
        """Return rows of a table about it: pairs of strings."""
        return [
            (
                "calibrated",
                f"{len(self.seconds)} kernels measured, {len(self.estimated)} estimated from "
                f"these; {self.host * 1e6:.3g} µs to issue an operator",
            )
        ]


def _work(kernel):
    flops = sum(product.flops for product in kernel.products or ())
    return max(flops or kernel.num_bytes, 1)


class _Timing(TorchDispatchMode):
    """Time each operator, and make the host wait after it.

    Attributes:
        seconds: a dict from `Kernel`s to lists of seconds.
    """

    def __init__(self):
        super().__init__()
        self.seconds = defaultdict(list)


class _TimingVirtual(_Timing):
    def __init__(self, device):
        super().__init__()
        if device.model is not None:
            raise ValueError(f"{device.torch_device} is modelled: its kernels cannot be measured")
        self._device = device
        self._copied = {}  # name of an engine -> bytes and seconds

    def __enter__(self):
        scheduler.watch(self._watch)
        return super().__enter__()

    def __exit__(self, *exception):
        scheduler.watch(None)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._device.synchronize()
        return result

    def launch_seconds(self, program):
        """Return the seconds that issuing an operator takes while the host does not wait."""
        issued = []
        scheduler.watch(lambda op: issued.append(op.issued))
        try:
            program()
            self._device.synchronize()
        finally:
            scheduler.watch(None)
        return _usual_gap(issued)

    def _watch(self, op):
        """Note the time of an op that has run; called by its engine."""
        if op.kind == "kernel" and op.engine is self._device.compute:
            self.seconds[kernel_of(op)].append(op.end - op.start)
        elif op.kind == "copy":
            num_bytes, seconds = self._copied.get(op.engine.name, (0, 0.0))
            self._copied[op.engine.name] = num_bytes + op.num_bytes, seconds + op.end - op.start

    def links(self):
        """Return the links to the CPU and to other devices; measured ones where unlimited."""
        link = self._device.link or self._measured("h2d", "d2h")
        return link, self._device.peer_link or self._measured("p2p")

    def _measured(self, *engines):
        copied = [self._copied[name] for name in engines if name in self._copied]
        num_bytes, seconds = map(sum, zip(*copied, strict=True)) if copied else (0, 0)
        return Link(num_bytes / seconds, name="measured") if num_bytes else None


class _TimingCuda(_Timing):
    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_cuda_busy(100_000)  # so that the operator is issued before its start
        start.record()
        result = func(*args, **(kwargs or {}))
        end.record()
        torch.cuda.synchronize(self._device)
        operator, given = operator_of(func), []
        cells = tree_map_only(
            torch.Tensor, lambda tensor: _cell(tensor, given), (args, kwargs or {})
        )
        out = tree_map_only(torch.Tensor, lambda tensor: _new_cell(tensor, given), result)
        written = [position for position, _ in operator.written]
        kernel = describe_kernel(operator.name, *cells, out, written)
        self.seconds[kernel].append(start.elapsed_time(end) / 1e3)
        return result

    def launch_seconds(self, program):
        issued = []

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                issued.append(time.perf_counter())
                return func(*args, **(kwargs or {}))

        with Noting():
            program()
        torch.cuda.synchronize(self._device)
        return _usual_gap(issued)

    def links(self):
        """Return None for both: copies are not measured, `virtual_gpus` is given the links."""
        return None, None


def _cell(tensor, given):
    """Note a CUDA tensor in `given`; return the cell that stands for it in a description."""
    given.append(tensor)
    return Cell(TensorLayout.of(None, tensor))


def _new_cell(tensor, given):
    """Return the cell of a new tensor; None for one of `given`, or a view of one."""
    storages = [other.untyped_storage().data_ptr() for other in given]
    return (
        None
        if tensor.untyped_storage().data_ptr() in storages
        else Cell(TensorLayout.of(None, tensor))
    )
