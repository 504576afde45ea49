"""Copies on a device, between devices, and from and to pinned or pageable CPU memory."""

import torch
from torch.nn.parameter import UninitializedTensorMixin

from vgpu.operators.issuing import Call, raise_now, two_devices_error
from vgpu.operators.plans import aten, operator_of, tables
from vgpu.runtime import registry, scheduler, threads
from vgpu.runtime.scheduler import Op, note_sync, wait
from vgpu.runtime.threads import issue_op
from vgpu.tensors import lazy
from vgpu.tensors.cells import CPU, META, Cell, TensorLayout, Unavailable, fetch, is_known, revive
from vgpu.tensors.pinned_memory import is_pinned, pin
from vgpu.tensors.tensor import VirtualTensor, new_tensor, refuse_without_values


def copy(target, source, non_blocking=False, new=False):
    """Copy the values of a tensor to another one; at least one of them is on a virtual GPU.

    On one device this is a kernel. From and to the CPU it is a copy on the current stream, for
    which the host waits unless it is `non_blocking` and the CPU memory is pinned. Changes of the
    tensors' `data` after the issue do not affect it. A `target` that is `new`, created for this
    copy, inherits a failure of `source`.

    Raises:
        RuntimeError: the shapes do not fit, elements share memory, or `source` is neither on a
            virtual GPU nor on the CPU.
        torch.AcceleratorError: the host waited, and an op on the device has failed.
    """
    if target.shape != source.shape:
        torch.empty(source.shape, device=META).expand(target.shape)  # raises the CPU's error
    if type(target) is VirtualTensor:
        inside = type(source) is VirtualTensor and source._block is target._block
        if inside or 0 in target._cell.layout.stride:
            other = source if inside else torch.zeros((), device=CPU)
            Call(operator_of(aten.copy_.default), (target, other), {}).check()
    if type(target) is not VirtualTensor:
        device, pinned = source._cell.layout.device, is_pinned(target)
        op = _copy_op(device.d2h, device.link, target.detach(), source, pinned)
    elif type(source) is not VirtualTensor:
        if source.is_meta:
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # torch's message
        if source.device.type != "cpu":
            raise two_devices_error(target.device, source.device)
        device, pinned = target._cell.layout.device, is_pinned(source)
        op = _copy_op(device.h2d, device.link, target, source.detach(), pinned)
    elif target._cell.layout.device is source._cell.layout.device:
        device = target._cell.layout.device
        op = Op("aten.copy_", "kernel", device.compute, _run, (target._cell, source._cell))
        issue_op(op, device)
        target._cell.root().writer = op
        return
    else:
        _copy_between(target, source, new)
        return
    if not non_blocking:
        note_sync()
    issue_op(op, device)
    if type(target) is VirtualTensor:
        target._cell.root().writer = op
    if not (non_blocking and pinned):
        wait(op, device.torch_device)
        raise_now(op, device)


def _copy_op(engine, link, target, source, pinned=True):
    ends = [getattr(tensor, "_cell", tensor) for tensor in (target, source)]
    op = Op("copy", "copy", engine, _run, ends)
    op.num_bytes = source.numel() * source.dtype.itemsize
    op.target, op.source = target.device, source.device
    if link is not None:
        op.seconds = link.seconds(op.num_bytes, pinned)
    return op


def _copy_between(target, source, new):
    """Copy from one device to another, as on CUDA: on the current stream of the source.

    The copy waits for the current stream of the target, which then waits for the copy.
    """
    device, other = source._cell.layout.device, target._cell.layout.device
    stream, then = device.current_stream(), other.current_stream()
    op = _copy_op(device.p2p, device.link_to(other), target, source)
    op.receiver = other.p2p
    op.out = target._cell if new else None
    after = then.tail()
    if threads.thread.current is not None:
        after += threads.thread.current.after(stream, op)
    stream.issue(op, after, then)
    target._cell.root().writer = op


def _run(op):
    """Run a copy to the first argument from the second; `op.out` inherits its failure."""
    try:
        revive(op.args[0])
        target, source = (fetch(value) if type(value) is Cell else value for value in op.args)
    except Unavailable as unavailable:
        if op.out is None:
            raise
        op.out.data = unavailable.missing
    else:
        target.copy_(source)


# -- the operators that copy


def copy_(func, args, kwargs):
    target, source, *rest = args
    if isinstance(source, UninitializedTensorMixin):
        return lazy.uninitialized(target, source)
    copy(target, source, kwargs.get("non_blocking", rest[0] if rest else False))
    return target


def _foreach_copy_(func, args, kwargs):
    targets, sources, *rest = args
    non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
    for target, source in zip(targets, sources, strict=True):
        copy(target, source, non_blocking)


def _to_copy(func, args, kwargs):
    (source,) = args
    where = kwargs.get("device")
    where = source.device if where is None else torch.device(where)
    if registry.is_virtual(where):
        where = registry.find(where).torch_device
    if where == source.device:
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        return Call(operator_of(func), args, kwargs).issue()
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    dtype = kwargs.get("dtype") or source.dtype
    layout = source._cell.layout
    like = torch.empty_like(layout.empty(META), dtype=dtype, memory_format=memory_format)
    non_blocking = kwargs.get("non_blocking", False)
    if registry.is_virtual(where):
        target = new_tensor(TensorLayout.of(registry.find(where), like))
    else:
        target = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=where)
        if non_blocking:
            pin(target)
        scheduler.clock.host_allocates(target.nbytes)
    copy(target, source, non_blocking, new=True)
    return target


def _local_scalar_dense(func, args, kwargs):
    (source,) = args
    target = torch.empty((), dtype=source.dtype)
    copy(target, source.reshape(()) if source.dim() else source)
    if source._cell.layout.device.has_values or is_known(source._cell):
        return target.item()
    if source.dtype == torch.bool:
        refuse_without_values("item of a bool")
    return float("nan")


tables.special.update(
    {
        aten.copy_.default: copy_,
        aten._to_copy.default: _to_copy,
        aten._foreach_copy_.default: _foreach_copy_,
        aten._local_scalar_dense.default: _local_scalar_dense,
    }
)
