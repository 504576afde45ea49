"""What CUDA's host checks at the call besides shapes: values that it reads, and determinism.

An operator that fails by its values, such as a Cholesky decomposition, raises at the call: the host
waits for it, as on CUDA, where torch reads its `info`. Where modelled GPUs compute no values, it
cannot fail. What CUDA asserts in a kernel, such as the range of an index, is reported at a later
synchronize.

`torch.use_deterministic_algorithms(True)` refuses what it refuses on CUDA. Source of the names:
`alertNotDeterministic` in aten/src/ATen/native.
"""

import torch

from vgpu.operators.issuing import Call, raise_now
from vgpu.operators.plans import aten, operator_of, tables
from vgpu.private.dispatch import alert_not_deterministic, function_of, tree_leaves
from vgpu.runtime.scheduler import note_sync, wait
from vgpu.tensors.cells import is_known

# Operator -> function of its arguments: whether CUDA's host reads values, which may be wrong.
_READS = {
    name: lambda *args, check_errors="_ex" not in name, **kwargs: check_errors
    for name in """
        _linalg_svd _linalg_eigh linalg_eig _linalg_eigvals linalg_pinv cholesky cholesky_inverse
        linalg_cholesky_ex linalg_inv_ex _linalg_solve_ex linalg_lu_factor_ex linalg_ldl_factor_ex
        linalg_matrix_sqrth linalg_polar _histogramdd_bin_edges linspace logspace
    """.split()
} | {
    "normal": lambda mean, std=1.0, *args, **kwargs: isinstance(std, torch.Tensor),
    "histc": lambda x, bins=100, low=0, high=0, **kwargs: low == high,
    "segment_reduce": lambda *args, unsafe=False, **kwargs: not unsafe,
    "searchsorted": lambda *args, sorter=None, **kwargs: sorter is not None,
}
# Operator -> its name in CUDA's error if it is not deterministic with these arguments, else False.
_NONDETERMINISTIC = {
    name.removesuffix("_out"): lambda *args, name=name: f"{name.lstrip('_')}_cuda"
    for name in """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        avg_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
        upsample_linear1d_backward_out upsample_bilinear2d_backward_out
        upsample_bicubic2d_backward_out upsample_trilinear3d_backward_out
        _upsample_bilinear2d_aa_backward_out _upsample_bicubic2d_aa_backward_out
        reflection_pad1d_backward_out reflection_pad3d_backward_out
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        grid_sampler_2d_backward grid_sampler_3d_backward index_reduce
    """.split()
} | {
    "max_unpool2d": lambda *args: "max_unpooling2d_forward_out",
    "max_unpool3d": lambda *args: "max_unpooling3d_forward_out",
    "put": lambda *args: "put_",
    "_ctc_loss_backward": lambda *args: "ctc_loss_backward_gpu",
    "histc": lambda x, *args: x.is_floating_point() and "_histc_cuda with floating point input",
    "bincount": lambda x, weights=None, *args: weights is not None and "_bincount_cuda",
    "median": lambda x, *dim: dim and "median CUDA with indices output",
    "nanmedian": lambda x, *dim: dim and "median CUDA with indices output",
    "nll_loss2d_forward": lambda *args: args[3] and "nll_loss2d_forward_out_cuda_template",
    "_embedding_bag_backward": lambda *args: args[8] == 2 and "embedding_bag_backward_cuda_max",
    "scatter_reduce": lambda *args: args[4] == "prod" and "scatter_reduce_cuda_prod_",
}


def _issue(func, args, kwargs):
    """Issue an operator after the check of determinism; wait for it if CUDA's host reads values."""
    operator = operator_of(func)
    name = operator.packet.rstrip("_")
    if name in _NONDETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        if caller := _NONDETERMINISTIC[name](*args):
            alert_not_deterministic(caller)
    result = Call(operator, args, kwargs).issue()
    if name in _READS and _READS[name](*args, **kwargs):
        cell = tree_leaves(result)[0]._cell
        writer, device = cell.root().writer, cell.layout.device
        if writer is not None:  # otherwise the host has waited already
            note_sync()
            wait(writer, device.torch_device)
            raise_now(writer, device)
    return result


def _check_errors(func, args, kwargs):
    info, *rest = args
    values = info.cpu()
    if is_known(info._cell):
        func(values, *rest, **kwargs)


# -- integers divided by 0: CUDA raises nothing, and the value is unspecified


def _by_zero(func):
    """Return `func` with divisors 1 in place of 0 where all are integers."""
    plain = function_of(func)

    def run(dividend, divisor, *args, **kwargs):
        if not torch.result_type(dividend, divisor).is_floating_point:
            is_tensor = isinstance(divisor, torch.Tensor)
            divisor = divisor.masked_fill(divisor == 0, 1) if is_tensor else divisor or 1
        return plain(dividend, divisor, *args, **kwargs)

    return run


for _name in (*_READS, *_NONDETERMINISTIC, "one_hot"):  # the parts of one_hot accept any class
    tables.special_names[f"aten::{_name}"] = tables.special_names[f"aten::{_name}_"] = _issue
tables.special[aten._linalg_check_errors.default] = _check_errors
for _func in aten._assert_async.default, aten._assert_async.msg:  # `bool` raises torch's error
    tables.shape[_func] = lambda tensor, *message: None if tensor.numel() == 1 else bool(tensor)
# The CPU's kernel crashes on nan.
tables.run[aten._linalg_eigvals.default] = lambda matrix: aten.linalg_eig.default(matrix)[0]
for _name in "div div_ floor_divide floor_divide_ fmod fmod_ remainder remainder_".split():
    _packet = getattr(aten, _name)
    for _overload in _packet.overloads():
        if not _name.startswith("div") or "mode" in _overload:
            _func = getattr(_packet, _overload)
            tables.run[_func] = _by_zero(_func)


def register(library):
    """Keep torch from taking `one_hot` apart, in a `torch.library.Library`."""
    library.impl("one_hot", aten.one_hot.default, "PrivateUse1")
