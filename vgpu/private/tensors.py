"""Wrapper tensors, their storages, and pickling."""

import ctypes
import functools
from collections import OrderedDict
from operator import attrgetter

import torch

from vgpu.private.patching import replace, when_imported

CPUGenerator = torch._C.Generator
make_wrapper = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
# Context managers within which torch does not call our Python code.
no_dispatch = torch._C._DisableTorchDispatch
no_torch_function_at_all = torch._C.DisableTorchFunction
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
take_tensors, reorder_as = torch._utils._take_tensors, torch._utils._reorder_tensors_as
device_in_cpp = torch.Tensor.device.__get__  # a tensor's device in torch's C++ code
dlpack_device = torch._C._torchDeviceToDLDevice
generator_id = attrgetter("_cdata")  # equal for all Python objects of a generator

_BYTES_OF_TENSOR = 208  # torch's limit for a TensorImpl; 176 in 2.13, the keys at the end


def storage_id(tensor):
    """Return a unique identifier of the storage of a CPU or meta tensor."""
    return tensor.untyped_storage()._cdata


def tensor_string(tensor):
    """Return the text of a CPU tensor between "tensor(" and ")"."""
    return torch._tensor_str._tensor_str(tensor, len("tensor("))


def is_parameter(tensor):
    return getattr(tensor, "_is_param", False)


def extra_attributes(tensor):
    return {
        name: value for name, value in tensor.__dict__.items() if name not in ("_cell", "_block")
    }


def dispatch_keys(tensor):
    """Return the dispatch keys of a tensor, a `ctypes` number that can be changed in place.

    The keys determine which kernels torch's C++ code calls, and whether it calls the Python class.
    torch's setter of `data` copies the other fields of a tensor, and refuses devices with unknown
    keys.
    """
    return ctypes.c_uint64.from_address(tensor._cdata + _offset_of_keys())


@functools.cache
def _offset_of_keys():
    """Return the offset of the keys in a TensorImpl, at which all test tensors have theirs."""
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
            f"torch {torch.__version__} stores the dispatch keys of a tensor at an unknown offset "
            f"({found} fit), so a tensor cannot change its device. "
            "Use a supported version of torch (README.md)"
        )
    return found[0]


def patch_data(set_data, has_compatible_type):
    """Allow `Tensor.data` from another device, as on CUDA; modules move parameters by it."""
    data, is_compatible = torch.Tensor.data, torch._has_compatible_shallow_copy_type
    torch.Tensor.data = property(data.__get__, set_data, doc=data.__doc__)

    @functools.wraps(is_compatible)
    def _has_compatible_shallow_copy_type(tensor, new):
        return is_compatible(tensor, new) or has_compatible_type(tensor, new)

    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type


def reduce(tensor, protocol):
    """Return the pickle representation of a tensor on a virtual GPU, as torch does on CUDA."""
    if is_parameter(tensor):
        arguments = tensor.detach(), tensor.requires_grad, OrderedDict()
        state = extra_attributes(tensor)
        state.pop("_is_param", None)
        if state:
            return torch._utils._rebuild_parameter_with_state, (*arguments, state)
        return torch._utils._rebuild_parameter, arguments
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    arguments = tensor._typed_storage(), *layout, tensor.requires_grad, OrderedDict()
    metadata = torch._utils.get_tensor_metadata(tensor)
    return torch._utils._rebuild_tensor_v2, (*arguments, metadata) if metadata else arguments


def patch_metadata(on_virtual_gpu):
    """Let torch.load conjugate and negate tensors for which `on_virtual_gpu` is true."""
    set_metadata = torch._utils.set_tensor_metadata

    def set_tensor_metadata(tensor, metadata):
        if not on_virtual_gpu(tensor):
            return set_metadata(tensor, metadata)
        if metadata.get("conj"):
            tensor.data = tensor.data.conj()
        if metadata.get("neg"):
            tensor.data = tensor.data._neg_view()

    torch._utils.set_tensor_metadata = set_tensor_metadata


def patch_dlpack(on_virtual_gpu):
    """Let a tensor on a virtual GPU stand for its DLPack capsule, which only torch can read."""

    def exporting(export):
        def _to_dlpack(tensor, *, dl_device=None, copy=None, **flags):  # of torch 2.15: read_only
            if not on_virtual_gpu(tensor) or dl_device not in (None, tensor.__dlpack_device__()):
                return export(tensor, dl_device=dl_device, copy=copy, **flags)
            return tensor.clone() if copy else tensor.detach()

        return _to_dlpack

    from_dlpack = torch._C._from_dlpack
    to_dlpack = exporting(torch._C._to_dlpack)
    replace(
        torch._C,
        _to_dlpack=to_dlpack,
        _to_dlpack_versioned=exporting(torch._C._to_dlpack_versioned),
        _from_dlpack=lambda data: data if isinstance(data, torch.Tensor) else from_dlpack(data),
    )
    torch.to_dlpack = torch.utils.dlpack.to_dlpack = to_dlpack


def patch_make_wrapper(with_own_type, report_as_cuda):
    """Make wrapper tensors of virtual GPUs have these devices in torch's C++ code.

    `with_own_type` returns a device as that code knows it; `report_as_cuda` makes a class report
    such devices as "cuda".
    """
    patched = set()

    @functools.wraps(make_wrapper)
    def _make_wrapper_subclass(cls, *args, **kwargs):
        before, device, after = args[:6], args[6:7], args[7:]  # NestedTensor passes it by position
        device = device[0] if device else kwargs.pop("device", None)
        own = device if device is None else with_own_type(device)
        if own is not device and cls not in patched:
            patched.add(cls)
            report_as_cuda(cls)
        if len(args) > 6:
            return make_wrapper(cls, *before, own, *after, **kwargs)
        return make_wrapper(cls, *args, device=own, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(_make_wrapper_subclass)


def patch_fake_tensors(with_own_type, report_as_cuda):
    """Make fake tensors of virtual GPUs have these devices in torch's C++ code.

    Otherwise a backward pass over fake tensors fails: its streams are those of virtual GPUs.
    """
    asks_device = torch.ops.prim.device.default

    def change(module):
        fake, answers = module.FakeTensor, module._DISPATCH_META_HANDLERS
        answer, dispatch = answers[asks_device], fake.__torch_dispatch__.__func__

        @functools.wraps(dispatch)
        def __torch_dispatch__(cls, func, *args, **kwargs):
            result = dispatch(cls, func, *args, **kwargs)
            return with_own_type(result) if func is asks_device else result

        report_as_cuda(fake)
        fake.__torch_dispatch__ = classmethod(__torch_dispatch__)
        answers[asks_device] = lambda args: with_own_type(answer(args))

    when_imported("torch._subclasses.fake_tensor", change)
