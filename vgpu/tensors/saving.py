"""Saving, loading and pickling, by CPU storages marked with the tensor's device."""

import re

import torch

from vgpu.private.tensors import is_parameter, rebuild_parameter_arguments, rebuild_tensor_arguments
from vgpu.runtime import registry
from vgpu.tensors.tensor import become, copy_to_device


class VirtualStorage(torch.UntypedStorage):
    """A CPU storage that represents one on a virtual GPU."""

    @property
    def device(self):
        return self._device


def _mark(storage, device):
    storage.__class__ = VirtualStorage
    storage._device = device
    return storage


def reduce(tensor):
    """Return the pickle representation of `tensor`, the same as for a tensor on CUDA."""
    if is_parameter(tensor):
        return rebuild_parameter_arguments(tensor)
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    storage = _mark(values.untyped_storage(), tensor.device)
    return rebuild_tensor_arguments(tensor, values, storage)


def refuse_sharing(tensor):
    """Raise RuntimeError: processes cannot share a tensor on a virtual GPU.

    On CUDA `torch.multiprocessing` shares it; a copy here would hide writes of the other process.
    """
    raise RuntimeError(
        f"a tensor on {tensor.device} cannot be shared with another process, which has its own "
        "virtual GPUs: send tensor.cpu(), or use torch.distributed"
    )


def restore(storage, location):
    """Return a CPU storage read by torch.load, marked with its virtual GPU `location` ("vgpu:0").

    Returns None for another location; raises RuntimeError if this process has no such device.
    """
    if re.fullmatch(rf"(vgpu|{registry.device_type})(:[0-9]+)?", location):
        return _mark(storage, registry.find(location).torch_device)


def set_storage(func, args, kwargs):
    """Implement `tensor.set_(storage[, offset, size, stride])` for a storage marked by `restore`.

    Tensors set to the same storage share its memory. Raises RuntimeError if the storage is not
    marked, or marked with another device than the tensor's.
    """
    tensor, storage, *layout = args
    if type(storage) is not VirtualStorage or storage.device != tensor.device:
        raise RuntimeError(
            f"Attempted to set the storage of a tensor on device {tensor.device} to a storage on "
            f"different device {storage.device}"
        )
    if not hasattr(storage, "_tensor"):
        values = torch.empty(0, dtype=torch.uint8).set_(storage)
        storage._tensor = copy_to_device(values, registry.find(tensor.device))
    values = storage._tensor.view(tensor.dtype)
    if layout:
        offset, size, *stride = layout
        like = torch.empty(size, device="meta")
        values = values.as_strided(size, stride[0] if stride else like.stride(), offset)
    become(tensor, values)
    return tensor
