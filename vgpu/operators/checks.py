"""What CUDA's host checks at the call besides shapes: values that it reads, and determinism.

An operator that fails by its values, such as a Cholesky decomposition, raises at the call: the host
waits for it, as on CUDA, where torch reads its `info`. Where modelled GPUs compute no values, it
cannot fail. What CUDA asserts in a kernel, such as the range of an index, is reported at a later
synchronize.

`torch.use_deterministic_algorithms(True)` refuses what it refuses on CUDA. Source of the names:
`alertNotDeterministic` in aten/src/ATen/native.
"""

import warnings
from operator import attrgetter

import torch

from vgpu.operators.issuing import Call, raise_now
from vgpu.operators.plans import aten, operator_of, tables
from vgpu.private.dispatch import function_of, tree_leaves
from vgpu.runtime.scheduler import note_sync, wait
from vgpu.tensors.cells import is_known

# Operator -> function of its arguments: whether CUDA's host reads values, which may be wrong.
_READS = {
    **dict.fromkeys(
        "_linalg_svd _linalg_eigh linalg_eig _linalg_eigvals linalg_lstsq linalg_pinv cholesky "
        "cholesky_inverse".split(),
        lambda *args, **kwargs: True,
    ),
    **dict.fromkeys(
        "linalg_cholesky_ex linalg_inv_ex _linalg_solve_ex linalg_lu_factor_ex "
        "linalg_ldl_factor_ex".split(),
        lambda *args, check_errors=False, **kwargs: check_errors,
    ),
    "normal": lambda mean, std=1.0, *args, **kwargs: isinstance(std, torch.Tensor),
    "histc": lambda x, bins=100, low=0, high=0, **kwargs: low == high,
    "segment_reduce": lambda *args, unsafe=False, **kwargs: not unsafe,
    "searchsorted": lambda *args, sorter=None, **kwargs: sorter is not None,
}
# Operator that is not deterministic on CUDA -> its name in CUDA's error.
_CALLERS = {
    **{
        name: f"{name.lstrip('_')}_cuda"
        for name in """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        avg_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        grid_sampler_2d_backward grid_sampler_3d_backward index_reduce
    """.split()
    },
    **{
        name: f"{name.lstrip('_')}_out_cuda"
        for name in """
        upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
        upsample_trilinear3d_backward _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa_backward reflection_pad1d_backward reflection_pad3d_backward
    """.split()
    },
    "max_unpool2d": "max_unpooling2d_forward_out",
    "max_unpool3d": "max_unpooling3d_forward_out",
    "put": "put_",
    "put_": "put_",
    "index_reduce_": "index_reduce_cuda",
    "histc": "_histc_cuda with floating point input",
    "bincount": "_bincount_cuda",
    "median": "median CUDA with indices output",
    "nanmedian": "median CUDA with indices output",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "_embedding_bag_backward": "embedding_bag_backward_cuda_max",
    "scatter_reduce": "scatter_reduce_cuda_prod_",
    "scatter_reduce_": "scatter_reduce_cuda_prod_",
}
# Operator of these -> function of its arguments: whether it is one of those.
_ONLY_IF = {
    "histc": lambda x, *args, **kwargs: x.is_floating_point(),
    "bincount": lambda x, weights=None, *args, **kwargs: weights is not None,
    "median": lambda x, dim=None, *args, **kwargs: dim is not None,
    "nanmedian": lambda x, dim=None, *args, **kwargs: dim is not None,
    "nll_loss2d_forward": lambda x, target, weight, reduction, *args, **kwargs: reduction != 0,
    "_embedding_bag_backward": lambda *args, **kwargs: args[8] == 2,  # mode="max"
    "scatter_reduce": lambda x, dim, index, source, reduce, **kwargs: reduce == "prod",
    "scatter_reduce_": lambda x, dim, index, source, reduce, **kwargs: reduce == "prod",
}


def _issue(func, args, kwargs):
    operator = operator_of(func)
    name = operator.packet
    if name in _CALLERS and torch.are_deterministic_algorithms_enabled():
        if name not in _ONLY_IF or _ONLY_IF[name](*args, **kwargs):
            _alert(_CALLERS[name])
    result = Call(operator, args, kwargs).issue()
    if name in _READS and _READS[name](*args, **kwargs):
        cell = tree_leaves(result)[0]._cell
        writer, device = cell.root().writer, cell.layout.device
        if writer is not None:  # otherwise the host has waited already
            note_sync()
            wait(writer, device.torch_device)
            raise_now(writer, device)
    return result


def _alert(caller):
    """Refuse, or warn of, an operator that is not deterministic, in torch's words."""
    text = (
        f"{caller} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True{})'. {}ou can {}file an issue at "
        "https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic "
        "support for this operation."
    )
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(text.format(", warn_only=True", "Y", ""), stacklevel=4)
        return
    cure = (
        "You can turn off determinism just for this operation, or you can use the "
        "'warn_only=True' option, if that's acceptable for your application. Y"
    )
    raise RuntimeError(text.format("", cure, "also "))


def _check_errors(func, args, kwargs):
    info, *rest = args
    values = info.cpu()
    if is_known(info._cell):
        func(values, *rest, **kwargs)


def _check_assert(tensor, *message):
    if tensor.numel() != 1:
        bool(tensor)  # raises torch's error


# -- integers divided by 0: CUDA raises nothing, and the value is unspecified


def _by_zero(func):
    """Return `func` with divisors 1 in place of 0 where all are integers."""
    plain = function_of(func)

    def run(dividend, divisor, *args, **kwargs):
        if not any(map(_is_float, (dividend, divisor))):
            if isinstance(divisor, torch.Tensor):
                divisor = divisor.masked_fill(divisor == 0, 1)
            else:
                divisor = divisor or 1
        return plain(dividend, divisor, *args, **kwargs)

    return run


def _is_float(value):
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, float)


_names = (*_READS, *_CALLERS, "one_hot")  # one_hot as a whole: its parts accept any class
tables.special_names.update({f"aten::{name}": _issue for name in _names})
tables.special[aten._linalg_check_errors.default] = _check_errors
tables.shape[aten._assert_async.default] = tables.shape[aten._assert_async.msg] = _check_assert
# The CPU's kernel crashes on nan.
tables.run[aten._linalg_eigvals.default] = lambda matrix: aten.linalg_eig.default(matrix)[0]
for _name in """
    div.Tensor_mode div.Scalar_mode div.out_mode div_.Tensor_mode div_.Scalar_mode
    floor_divide.default floor_divide.Scalar floor_divide.out
    floor_divide_.Tensor floor_divide_.Scalar
    fmod.Tensor fmod.Scalar fmod.Tensor_out fmod.Scalar_out fmod_.Tensor fmod_.Scalar
    remainder.Tensor remainder.Scalar remainder.Tensor_out remainder.Scalar_out
    remainder.Scalar_Tensor remainder_.Tensor remainder_.Scalar
""".split():
    _func = attrgetter(_name)(aten)
    tables.run[_func] = _by_zero(_func)


def register(library):
    """Keep torch from taking `one_hot` apart, in a `torch.library.Library`."""
    library.impl("one_hot", aten.one_hot.default, "PrivateUse1")
