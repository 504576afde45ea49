"""Wrapper tensors, their storages, and how they are pickled."""

import ctypes
import functools
from collections import OrderedDict

import torch

from vgpu.private.patching import when_imported

CPUGenerator = torch._C.Generator
make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
# Context managers; within them torch calls no Python code of ours.
no_dispatch = torch._C._DisableTorchDispatch
no_torch_function_at_all = torch._C.DisableTorchFunction
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
take_tensors, reorder_as = torch._utils._take_tensors, torch._utils._reorder_tensors_as
own_device = torch.Tensor.device.__get__  # a tensor's device as torch's C++ code knows it

_BYTES_OF_TENSOR = 208  # what torch allows a TensorImpl; 2.13 takes 176, the keys are the last


def storage_id(tensor):
    """Return an identity of the storage of a CPU or meta tensor; no two storages share it."""
    return tensor.untyped_storage()._cdata


def generator_id(generator):
    """Return an identity of a generator, the same for all Python objects that stand for it."""
    return generator._cdata


def tensor_string(tensor):
    """Return the text of a CPU tensor that stands between "tensor(" and the closing bracket."""
    return torch._tensor_str._tensor_str(tensor, len("tensor("))


def is_parameter(tensor):
    """Return whether `tensor` counts as an nn.Parameter."""
    return getattr(tensor, "_is_param", False)


def dispatch_keys(tensor):
    """Return the set of dispatch keys of a tensor, a `ctypes` number that can be changed in place.

    The keys decide which kernels torch's C++ code calls for a tensor, and whether its Python class
    is asked. torch's setter of `data` copies the other fields of a tensor, and refuses between
    devices whose keys it does not know.
    """
    return ctypes.c_uint64.from_address(tensor._cdata + _offset_of_keys())


@functools.cache
def _offset_of_keys():
    """Return where in a TensorImpl its keys are: where all of some tensors have the known number.

    Raises:
        RuntimeError: there is no such place, or more than one.
    """
    tensors = (
        torch.empty(2),
        torch.empty(2, device="meta"),
        torch.empty(2, dtype=torch.cfloat).conj(),
    )
    found = [
        offset
        for offset in range(0, _BYTES_OF_TENSOR, 8)
        if all(
            ctypes.c_uint64.from_address(tensor._cdata + offset).value
            == torch._C._dispatch_keys(tensor).raw_repr()
            for tensor in tensors
        )
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the dispatch keys of a tensor in an unknown place "
            f"({found} fit): a tensor cannot become one on another device. "
            "Use a version of torch that this package knows (README.md)"
        )
    return found[0]


def patch_data(set_data, has_compatible_type):
    """Let a tensor take data from another device, as on CUDA; so modules move their parameters.

    Args:
        set_data: function(tensor, new), the setter of `Tensor.data`.
        has_compatible_type: function(tensor, new) that returns whether it takes what torch refuses.
    """
    data, is_compatible = torch.Tensor.data, torch._has_compatible_shallow_copy_type
    torch.Tensor.data = property(data.__get__, set_data, doc=data.__doc__)

    @functools.wraps(is_compatible)
    def _has_compatible_shallow_copy_type(tensor, new):
        return is_compatible(tensor, new) or has_compatible_type(tensor, new)

    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type


def rebuild_tensor_arguments(tensor, values, storage):
    """Return what pickle needs to make a tensor again as torch does for one on CUDA.

    Args:
        tensor: the tensor.
        values: a CPU tensor with its values.
        storage: the untyped storage of `values`, or one that stands for it.

    Returns:
        A function and a tuple of its arguments.
    """
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    layout = values.storage_offset(), tuple(values.shape), values.stride()
    arguments = (typed, *layout, tensor.requires_grad, OrderedDict())
    return torch._utils._rebuild_tensor_v2, arguments


def rebuild_parameter_arguments(tensor):
    """Return what pickle needs to make an nn.Parameter again: a function and its arguments."""
    return torch._utils._rebuild_parameter, (tensor.detach(), tensor.requires_grad, OrderedDict())


def patch_make_wrapper(own_device, report_as_cuda):
    """Make wrapper tensors of virtual GPUs have these devices in torch's C++ code.

    Args:
        own_device: function that returns a device as torch's C++ code knows it.
        report_as_cuda: function that makes a class report such devices as "cuda".
    """
    patched = set()

    @functools.wraps(make_wrapper)
    def _make_wrapper_subclass(cls, *args, **kwargs):
        before, device, after = args[:6], args[6:7], args[7:]  # NestedTensor passes it by position
        device = device[0] if device else kwargs.pop("device", None)
        own = device if device is None else own_device(device)
        if own is not device and cls not in patched:
            patched.add(cls)
            report_as_cuda(cls)
        if len(args) > 6:
            return make_wrapper(cls, *before, own, *after, **kwargs)
        return make_wrapper(cls, *args, device=own, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(_make_wrapper_subclass)


def patch_fake_tensors(own_device, report_as_cuda):
    """Make fake tensors of virtual GPUs have these devices in torch's C++ code.

    Otherwise a backward pass over fake tensors fails: its streams are those of virtual GPUs.

    Args:
        own_device, report_as_cuda: as in `patch_make_wrapper`.
    """
    asks_device = torch.ops.prim.device.default

    def change(module):
        fake, answers = module.FakeTensor, module._DISPATCH_META_HANDLERS
        answer, dispatch = answers[asks_device], fake.__torch_dispatch__.__func__

        @functools.wraps(dispatch)
        def __torch_dispatch__(cls, func, *args, **kwargs):
            result = dispatch(cls, func, *args, **kwargs)
            return own_device(result) if func is asks_device else result

        report_as_cuda(fake)
        fake.__torch_dispatch__ = classmethod(__torch_dispatch__)
        answers[asks_device] = lambda args: own_device(answer(args))

    when_imported("torch._subclasses.fake_tensor", change)
