"""Operators that need more than a plan: random numbers, sizes, waits, and exceptions."""

import torch

from vgpu.operators import gpu_kernels
from vgpu.operators.issuing import Call
from vgpu.operators.plans import aten, operator_of, tables
from vgpu.private.dispatch import function_of, has_products_of_float16, schema_of
from vgpu.tensors import storages
from vgpu.tensors.cells import CPU, META, Cell, TensorLayout, may_have_values, refuse_sparse
from vgpu.tensors.tensor import REFUSALS, VirtualTensor, become, new_tensor, view_as, wrap


def _create_like(func, args, kwargs):
    """Issue `zeros_like(x, device=...)` and similar; on another device only the layout matters."""
    where = kwargs.get("device")
    if where is None or torch.device(where) == args[0].device:
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        cell, layout = args[0]._cell, args[0]._cell.layout
        # Values that are not yet computed are replaced: they are not needed.
        if not isinstance(cell.data, torch.Tensor) and may_have_values(layout):
            placeholder = Cell(layout, layout.empty(CPU))
            args = (wrap(placeholder, args[0]._block), *args[1:])
        return Call(operator_of(func), args, kwargs).issue()
    like = args[0]._cell.layout.empty(CPU)
    return func(like, *args[1:], **kwargs)


def _resize_(func, args, kwargs):
    tensor, size, *_ = args
    if type(size) is VirtualTensor:
        size = size._cell.layout.empty(META)
    meta = tensor._cell.layout.empty(META)
    func(meta, size, **kwargs)
    after = TensorLayout.of(tensor._cell.layout.device, meta)
    grows = after.num_bytes > tensor._block.num_bytes
    if grows and not after.device.has_values:  # it may become too large for values
        larger = new_tensor(after)
        old, new = (x.untyped_storage().flat(x.dtype) for x in (tensor, larger))
        new[: len(old)].copy_(old)
        become(tensor, larger)
        return tensor
    if grows:
        tensor.untyped_storage().resize_(after.num_bytes)
    become(tensor, view_as(tensor, after))
    return tensor


def _set_(func, args, kwargs):
    tensor = args[0]
    source = args[1] if args[1:] else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storages.check_device(tensor, source)
    become(tensor, source)
    return tensor


def _layout_of_as_strided(tensor, size, stride, *offset):
    # torch 2.11 would infer another layout; the kernel for a CPU tensor raises the error.
    if any(n is not None and n < 0 for n in (*stride, *offset)):
        tensor = torch.empty(0)
    return aten.as_strided.default(tensor, size, stride, *offset)


def _as_strided(func, args, kwargs):
    """Issue an operator on a view that must lie in the storage of its first argument."""
    names = [argument.name for argument in schema_of(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    tensor, size, stride = (given[name] for name in ("self", "size", "stride"))
    view = aten.as_strided(tensor, size, stride, given.get("storage_offset"))
    if func is aten.as_strided_.default:
        become(tensor, view)
        return tensor
    return Call(operator_of(func), args, kwargs).issue()


def _pack_padded_sequence(func, args, kwargs):
    """Run synchronously, as the lengths determine the shapes; batch sizes stay on the CPU."""
    data, sizes = Call(operator_of(func), args, kwargs).run_now()
    return data, sizes.cpu()


def _sparse(func, args, kwargs):
    refuse_sparse(kwargs.get("layout") or torch.sparse_coo)


# -- random operators without a generator in their schema


def _native_dropout(tensor, p, train, generator):
    if train is False or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(tensor), torch.zeros_like(tensor, dtype=torch.bool)
    mask = torch.empty_like(tensor).bernoulli_(1 - p, generator=generator)
    return tensor * mask * (1 / (1 - p)), mask.bool()


# -- float16 products, ten times slower than float32 on most CPUs


def _by_float32(func):
    """Return `func` with float16 products accumulated in float32, as on a GPU, then rounded."""
    plain = function_of(func)

    def run(*args, **kwargs):
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if any(tensor.dtype != torch.float16 for tensor in tensors):
            return plain(*args, **kwargs)
        args = (arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args)
        result = plain(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.half()
        return tuple(None if each is None else each.half() for each in result)

    return run


# -- layouts: operators whose results on the CPU differ from those on `meta`


def _native_batch_norm(tensor, weight, bias, mean, var, training, momentum, eps):
    like = next(each for each in (weight, mean, tensor) if each is not None)
    saved = like.new_empty(tensor.shape[1] if training else 0)
    return torch.empty_like(tensor), saved, torch.empty_like(saved)


def _native_batch_norm_backward(grad, tensor, weight, mean, var, mean_, var_, training, eps, mask):
    like = tensor.new_empty(tensor.shape[1]) if weight is None else weight
    each = tensor, like, like
    return tuple(torch.empty_like(t) if on else None for t, on in zip(each, mask, strict=True))


def _native_batch_norm_no_stats(tensor, weight, bias, training, momentum, eps):
    return _native_batch_norm(tensor, weight, bias, None, None, True, momentum, eps)


def _convolution(tensor, weight, *args):
    """Return an empty result in the memory format of images or weights, as on CUDA and CPU."""
    out = aten.convolution.default(tensor, weight, *args)
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if out.dim() == dims and any(
            each.is_contiguous(memory_format=layout) and not each.is_contiguous()
            for each in (tensor, weight)
        ):
            return out.contiguous(memory_format=layout)
    return out


def _native_layer_norm(tensor, shape, weight, bias, eps):
    like, n = tensor if weight is None else weight, len(shape)
    saved = like.new_empty((*tensor.shape[:-n], *(1,) * n))
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return out, saved, torch.empty_like(saved)


def _native_group_norm(tensor, weight, *args):
    out, *saved = aten.native_group_norm.default(tensor, weight, *args)
    like = tensor if weight is None else weight
    return out, *(each.to(like.dtype) for each in saved)


def _native_group_norm_backward(grad, tensor, *args):
    grads = aten.native_group_norm_backward.default(grad, tensor, *args)
    return tuple(
        each if each is None or index else each.to(tensor.dtype) for index, each in enumerate(grads)
    )


tables.shape.update(
    {
        aten.native_batch_norm.default: _native_batch_norm,
        aten.native_batch_norm_backward.default: _native_batch_norm_backward,
        aten._native_batch_norm_legit.default: _native_batch_norm,
        aten._native_batch_norm_legit.no_stats: _native_batch_norm_no_stats,
        aten.convolution.default: _convolution,
        aten.native_layer_norm.default: _native_layer_norm,
        aten.native_group_norm.default: _native_group_norm,
        aten.native_group_norm_backward.default: _native_group_norm_backward,
        aten.as_strided.default: _layout_of_as_strided,
        aten.native_dropout.default: lambda x, *_: (x.clone(), x.clone().bool()),
        # torch 2.11 has none
        aten._transformer_encoder_layer_fwd.default: lambda source, *_: torch.empty_like(source),
    }
)
tables.special.update(
    {
        aten._sparse_coo_tensor_unsafe.default: _sparse,
        aten._sparse_compressed_tensor_unsafe.default: _sparse,
        aten._pack_padded_sequence.default: _pack_padded_sequence,
        aten.resize_.default: _resize_,
        aten.resize_as_.default: _resize_,
        aten.set_.source_Tensor: _set_,
        aten.set_.default: _set_,
        aten.set_.source_Storage: storages.set_storage,
        aten.set_.source_Storage_storage_offset: storages.set_storage,
        aten.as_strided_.default: _as_strided,
        aten.as_strided_copy.default: _as_strided,
        aten.as_strided_copy.out: _as_strided,
        aten.as_strided_scatter.default: _as_strided,
        aten.as_strided_scatter.out: _as_strided,
    }
)
tables.special_names["quantized"] = REFUSALS["Quantized"]
for _name in (
    "quantize_per_tensor quantize_per_tensor_dynamic quantize_per_channel "
    "_make_per_tensor_quantized_tensor _make_per_channel_quantized_tensor"
).split():
    tables.special_names[f"aten::{_name}"] = REFUSALS["Quantized"]
for _name in (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like "
    "new_empty new_empty_strided new_zeros new_ones new_full"
).split():
    _packet = getattr(aten, _name)
    for _overload in _packet.overloads():
        if "out" not in _overload:
            tables.special[getattr(_packet, _overload)] = _create_like

_random = {
    aten.native_dropout.default: _native_dropout,
    aten.rand_like.default: aten.rand_like.generator,
    aten.randn_like.default: aten.randn_like.generator,
    aten.randint_like.default: aten.randint_like.generator,
    aten.randint_like.low_dtype: aten.randint_like.low_generator_dtype,
}
tables.run.update(_random)
tables.random.update(_random)
if not has_products_of_float16():
    for _name in "mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward":
        _func = getattr(aten, _name).default
        tables.run[_func] = _by_float32(_func)
_of_gpus = {
    aten._thnn_fused_lstm_cell.default: gpu_kernels.lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: gpu_kernels.lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gpu_kernels.gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gpu_kernels.gru_cell_backward,
    aten.batch_norm_stats.default: gpu_kernels.batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: gpu_kernels.batch_norm_gather_stats,
    aten.batch_norm_elemt.default: gpu_kernels.batch_norm_normalize,
    aten.batch_norm_backward_reduce.default: gpu_kernels.batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: gpu_kernels.batch_norm_backward,
}
tables.run.update(_of_gpus)
tables.shape.update(_of_gpus)
tables.keyed_by_value.update({"arange", "range", "linspace", "logspace", "histc"})
tables.allocating.update(
    {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
)
tables.synchronous.update(
    "allclose equal _embedding_bag _embedding_bag_forward_only multilabel_margin_loss_forward "
    "tensor_split".split()
)
tables.cpu_arguments.update(
    dict.fromkeys(("index", "index_put_", "index_put", "_index_put_impl_"), "move"),
    _pack_padded_sequence="keep",
    tensor_split="keep",
)
tables.bit_views.update({aten._conj.default, aten._neg_view.default})
