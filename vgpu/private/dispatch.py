"""Schemas and kernels of operators, shape inference, and autocast."""

import functools
from operator import attrgetter

import torch
from torch._prims_common import alert_not_deterministic  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
from torch.utils._pytree import (  # noqa: F401
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from vgpu.private.patching import when_imported


def trace_as_plain(cls):
    """Let `make_fx` take constants of a tensor class as it takes a `torch.Tensor`."""
    when_imported(
        "torch.fx.experimental.proxy_tensor",
        lambda module: setattr(module, "HANDLED_TYPES", (*module.HANDLED_TYPES, cls)),
    )


def is_composite(func):
    """Return whether the operator `func` is a composite, which without autograd stays whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def has_products_of_float16():
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def python_kernel(func):
    """Return function(func, args, kwargs) that calls the kernel in Python for GPUs; or None."""
    for key in "PrivateUse1", "CUDA", "CompositeExplicitAutograd":
        if f"{func.name().replace('::', '/')}/{key}" in torch.library._impls:
            of_key = getattr(torch._C.DispatchKey, key)
            return lambda func, args, kwargs: func._op_dk(of_key, *args, **kwargs)
    return None


def check_kernel(func, tensors):
    """Raise NotImplementedError if an operator has no CPU kernel, or CUDA none for integers.

    Virtual GPUs run CPU kernels.
    """
    name = func.name()
    if not name.startswith("aten::"):
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
        if not has_kernel(name, "CPU") and has_kernel(name, "CUDA"):
            raise NotImplementedError(
                f"the operator {name} has a kernel for CUDA only; virtual GPUs run CPU kernels: "
                f'add one by torch.library.impl("{name}", "CPU", function), or run it on a '
                "machine with a real GPU"
            )
    kernel = _ONLY_FLOATS.get(name[6:].partition(".")[0].rstrip("_"))
    dtypes = {tensor.dtype for tensor in tensors} if kernel else ()
    if len(dtypes) == 1 and not any(x.is_floating_point or x.is_complex for x in dtypes):
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{type_name(dtypes.pop())}'")


def type_name(dtype):
    """Return the name of a dtype in torch's errors, such as "Float" or "Short"."""
    kind = torch.empty(0, dtype=dtype, device="cpu").type()
    return kind.removeprefix("torch.").removesuffix("Tensor")


# Operators that take integers on the CPU only -> their kernel for CUDA, see OpInfo.dtypesIfCUDA.
_ONLY_FLOATS = {
    **dict.fromkeys(("mm", "addmm"), "addmm_cuda"),
    **dict.fromkeys(("bmm", "baddbmm", "addbmm", "_trilinear"), "baddbmm_cuda"),
    **dict.fromkeys(("mv", "addmv"), "addmv_impl_cuda"),
    "dot": "dot",
    "native_dropout": "fused_dropout",
    "vdot": "vdot",
    "convolution": "slow_conv2d_cuda",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "max_pool3d_with_indices": "max_pool3d_with_indices_out_frame",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "avg_pool3d": "avg_pool3d_out_cuda",
}


def lacks_shape_inference(func, error):
    """Return whether `func` raised `error` because it has no kernel for meta tensors."""
    custom = torch._library.custom_ops.OPDEFS.get(func.name())
    lacks = custom is not None and custom._abstract_fn is None
    return lacks or isinstance(error, NotImplementedError)


schema_of = attrgetter("_schema")  # of an operator
# The C++ function of an operator, which hashes faster than the operator.
function_of = attrgetter("_op")


def below_autocast():
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


@functools.cache
def prepare_shape_inference():
    """Run a shape inference: the first one imports modules, for a second or two."""
    torch.ones(1, device="meta") + 1


def tf32_is_allowed():
    """Return whether torch allows TF32 in matrix products, and in convolutions."""
    try:
        return torch._C._get_cublas_allow_tf32(), torch._C._get_cudnn_allow_tf32()
    except RuntimeError:  # the program has used torch's newer names, which exclude these
        backends = torch.backends
        precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
        return tuple(precision == "tf32" for precision in precisions)
