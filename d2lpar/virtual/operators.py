"""Operators that need more than a plan: copies, random numbers, waits, and exceptions."""

import torch
from torch.nn.parameter import UninitializedTensorMixin

from . import device as registry
from . import lazy, recurrent, saving
from .engine import Op, wait
from .tensor import (
    CPU,
    META,
    Call,
    Meta,
    VirtualTensor,
    _become,
    aten,
    info_of,
    new_tensor,
    raise_now,
    run_copy,
    tables,
    two_devices,
    wrap,
)


def is_pinned(tensor):
    """Return whether a CPU tensor lies in memory that was pinned for virtual GPUs."""
    return getattr(tensor.untyped_storage(), "_vgpu_pinned", False)


def pin(tensor):
    """Mark the memory of a CPU tensor as pinned and return the tensor."""
    tensor.untyped_storage()._vgpu_pinned = True
    return tensor


def issue_factory(func, args, kwargs):
    """Issue an operator none of whose arguments lies on a virtual GPU: `empty`, `zeros`, ..."""
    where = kwargs.get("device")
    where = torch.device("vgpu") if where is None else torch.device(where)
    return Call(info_of(func), args, kwargs, registry.find(where)).issue()


# -- copies


def _copy_(func, args, kwargs):
    target, source, *rest = args
    if isinstance(source, UninitializedTensorMixin):
        return lazy.uninitialized(target, source)
    non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
    copy(target, source, non_blocking)
    return target


def copy(target, source, non_blocking=False, new=False):
    """Copy the values of `source` into `target` (`new` or not); one of them is on a virtual GPU.

    On one device this is a kernel. From and to the CPU it is a copy on the current stream, which
    the host waits for unless it is `non_blocking` and the CPU's side is pinned.
    """
    if target.shape != source.shape:
        torch.empty(source.shape, device=META).expand(target.shape)  # raises what the CPU raises
    num_bytes = source.numel() * source.dtype.itemsize
    if type(target) is not VirtualTensor:
        device = source._meta.device
        pinned = is_pinned(target)
        op = _issue_copy(device, device.d2h, target, source._cell, num_bytes, pinned)
        op.source, op.target = device.torch_device, CPU
    elif type(source) is not VirtualTensor:
        if source.device.type != "cpu":
            raise two_devices(target.device, source.device)
        device = target._meta.device
        pinned = is_pinned(source)
        if source.requires_grad:
            source = source.detach()
        op = _issue_copy(device, device.h2d, target._cell, source, num_bytes, pinned)
        op.source, op.target = CPU, device.torch_device
    elif target._meta.device is source._meta.device:
        device = target._meta.device
        op = Op("aten.copy_", "kernel", None, device.compute, run_copy)
        op.args = (target._cell, source._cell)
        op.stream = device.current_stream()
        op.stream.issue(op)
        return
    else:
        _copy_between(target, source, num_bytes, new)
        return
    if not (non_blocking and pinned):
        wait(op, device.torch_device)
        raise_now(op, device)


def _issue_copy(device, engine, target, source, num_bytes, pinned, after=(), out=None):
    stream = device.current_stream()
    op = Op("copy", "copy", stream, engine, run_copy, (target, source), out=out)
    op.num_bytes = num_bytes
    link = device.peer_link if engine is device.p2p else device.link
    if link is not None:
        op.hold = link.seconds(num_bytes, pinned)
    op.source = op.target = device.torch_device
    return stream.issue(op, after)


def _copy_between(target, source, num_bytes, new):
    """Copy from one device to another, as CUDA does: on the source's stream, after the work of
    the target's current stream, which in turn waits for the copy."""
    device, other = source._meta.device, target._meta.device
    target_stream = other.current_stream()
    after = () if target_stream.last is None else (target_stream.last,)
    op = _issue_copy(
        device,
        device.p2p,
        target._cell,
        source._cell,
        num_bytes,
        pinned=True,
        after=after,
        out=target._cell if new else None,
    )
    op.target = other.torch_device
    target_stream.wait_for(op)


def _to_copy(func, args, kwargs):
    (source,) = args
    where = kwargs.get("device")
    where = source.device if where is None else torch.device(where)
    if where.type == "vgpu" and where.index is None:
        where = registry.current().torch_device
    if where == source.device:
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        return Call(info_of(func), args, kwargs).issue()
    memory_format = kwargs.get("memory_format") or torch.preserve_format
    dtype = kwargs.get("dtype") or source.dtype
    like = torch.empty_like(source._meta.empty(META), dtype=dtype, memory_format=memory_format)
    non_blocking = kwargs.get("non_blocking", False)
    if where.type == "vgpu":
        target = new_tensor(registry.find(where), like)
    else:
        target = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=where)
        if non_blocking:
            pin(target)
    copy(target, source, non_blocking, new=True)
    return target


def _foreach_copy_(func, args, kwargs):
    targets, sources, *rest = args
    non_blocking = kwargs.get("non_blocking", rest[0] if rest else False)
    for target, source in zip(targets, sources, strict=True):
        copy(target, source, non_blocking)
    return targets


def _local_scalar_dense(func, args, kwargs):
    (source,) = args
    target = torch.empty((), dtype=source.dtype)
    copy(target, source.reshape(()) if source.dim() else source)
    return target.item()


def _create_like(func, args, kwargs):
    """`zeros_like(x, device=...)` and its kin: on another device only the layout matters."""
    where = kwargs.get("device")
    if where is None or torch.device(where) == args[0].device:
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        return Call(info_of(func), args, kwargs).issue()
    like = args[0]._meta.empty(CPU)
    return func(like, *args[1:], **kwargs)


def _resize_(func, args, kwargs):
    tensor, size, *_ = args
    meta = tensor._meta.empty(META)
    func(meta, size, **kwargs)
    after = Meta.of(tensor._meta.device, meta)
    if after.num_bytes <= tensor._block.num_bytes:
        return Call(info_of(func), args, kwargs).issue()
    old, count = tensor._cell, tensor._block.num_bytes // tensor.dtype.itemsize
    larger = new_tensor(tensor._meta.device, meta)
    if count:
        flat = torch.as_strided(larger, (count,), (1,), 0)
        copy(flat, torch.as_strided(wrap(tensor._meta, old, tensor._block), (count,), (1,), 0))
    _become(tensor, larger._meta, larger._cell, larger._block)
    return tensor


def _set_(func, args, kwargs):
    tensor, *rest = args
    if not rest:
        rest = [torch.empty(0, dtype=tensor.dtype, device=tensor.device)]
    if type(rest[0]) is not VirtualTensor:
        raise NotImplementedError("set_ on a virtual GPU takes a tensor of the same device")
    source = rest[0]
    if len(rest) > 1:
        source = torch.as_strided(source, rest[2], rest[3] if len(rest) > 3 else None, rest[1])
    _become(tensor, source._meta, source._cell, source._block)
    return tensor


def _pack_padded_sequence(func, args, kwargs):
    """The sizes of the batches stay on the CPU, as on CUDA; the lengths decide the shapes."""
    data, sizes = Call(info_of(func), args, kwargs).run_now()
    return data, sizes.cpu()


# -- random numbers: operators whose schema has no generator


def _native_dropout(tensor, p, train, generator):
    if train is False or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(tensor), torch.zeros_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor).bernoulli_(1 - p, generator=generator)
    return tensor * mask * (1 / (1 - p)), mask.bool()


def _rand_like(tensor, generator, **options):
    return torch.empty_like(tensor, **options).uniform_(generator=generator)


def _randn_like(tensor, generator, **options):
    return torch.empty_like(tensor, **options).normal_(generator=generator)


def _randint_like(tensor, high, generator, **options):
    return torch.empty_like(tensor, **options).random_(0, high, generator=generator)


def _randint_like_low(tensor, low, high, generator, **options):
    return torch.empty_like(tensor, **options).random_(low, high, generator=generator)


# -- layouts: operators whose results on the CPU differ from those foreseen for `meta`


def _native_batch_norm(tensor, weight, bias, mean, var, training, momentum, eps):
    saved = tensor.new_empty(tensor.shape[1] if training else 0)
    return torch.empty_like(tensor), saved, torch.empty_like(saved)


def _native_batch_norm_no_stats(tensor, weight, bias, training, momentum, eps):
    return _native_batch_norm(tensor, weight, bias, None, None, True, momentum, eps)


def _nll_loss(func):
    """`func` for `meta` tensors, refusing a dtype of the targets that only its kernel refuses."""

    def shape(tensor, target, *args):
        if target.dtype not in (torch.int64, torch.uint8):
            raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
        return func(tensor, target, *args)

    return shape


tables.shape.update(
    {
        aten.nll_loss_forward.default: _nll_loss(aten.nll_loss_forward.default),
        aten.nll_loss2d_forward.default: _nll_loss(aten.nll_loss2d_forward.default),
        aten.native_batch_norm.default: _native_batch_norm,
        aten._native_batch_norm_legit.default: _native_batch_norm,
        aten._native_batch_norm_legit.no_stats: _native_batch_norm_no_stats,
    }
)
tables.special.update(
    {
        aten.copy_.default: _copy_,
        aten._to_copy.default: _to_copy,
        aten._foreach_copy_.default: _foreach_copy_,
        aten._local_scalar_dense.default: _local_scalar_dense,
        aten._pack_padded_sequence.default: _pack_padded_sequence,
        aten.resize_.default: _resize_,
        aten.set_.source_Tensor: _set_,
        aten.set_.source_Tensor_storage_offset: _set_,
        aten.set_.default: _set_,
        aten.set_.source_Storage: saving.set_storage,
        aten.set_.source_Storage_storage_offset: saving.set_storage,
    }
)
for _packet in (
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
):
    for _overload in _packet.overloads():
        if "out" not in _overload:
            tables.special[getattr(_packet, _overload)] = _create_like

tables.run.update(
    {
        aten.native_dropout.default: _native_dropout,
        aten.rand_like.default: _rand_like,
        aten.randn_like.default: _randn_like,
        aten.randint_like.default: _randint_like,
        aten.randint_like.low_dtype: _randint_like_low,
    }
)
tables.random.update(tables.run)
tables.run.update(
    {
        aten._thnn_fused_lstm_cell.default: recurrent.lstm_cell,
        aten._thnn_fused_lstm_cell_backward_impl.default: recurrent.lstm_cell_backward,
        aten._thnn_fused_gru_cell.default: recurrent.gru_cell,
        aten._thnn_fused_gru_cell_backward.default: recurrent.gru_cell_backward,
    }
)
tables.shape.update(
    {
        aten._thnn_fused_gru_cell.default: recurrent.gru_cell,
        aten._thnn_fused_gru_cell_backward.default: recurrent.gru_cell_backward,
    }
)
tables.keyed_by_value.update({"arange", "range", "linspace", "logspace"})
tables.allocating.update(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
)
tables.waiting.update(
    {
        "equal",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "multilabel_margin_loss_forward",
        "tensor_split",
    }
)
tables.same_dtype.update(
    {
        "mm",
        "mv",
        "addmm",
        "addmv",
        "addbmm",
        "convolution",
        "binary_cross_entropy",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "_index_put_impl_",
    }
)
tables.cpu_arguments.update(
    {
        "index": "move",
        "index_put_": "move",
        "index_put": "move",
        "_index_put_impl_": "move",
        "_pack_padded_sequence": "keep",
        "tensor_split": "keep",
    }
)
tables.bit_views.update({aten._conj.default, aten._neg_view.default})
