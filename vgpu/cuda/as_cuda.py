"""Virtual GPUs that PyTorch calls "cuda": tensors, autocast, and what torch makes for a device.

The names of `torch.cuda` are in `vgpu.cuda.cuda_names`.
"""

import os

import torch

from vgpu import torch_module, virtual_gpus
from vgpu.operators.autocast import lower
from vgpu.operators.issuing import issue_factory
from vgpu.private.compiling import patch_flex_attention
from vgpu.private.cuda import patch_autocast, register_cuda
from vgpu.private.dispatch import prepare_shape_inference
from vgpu.private.patching import replace
from vgpu.private.registration import name_numbered_devices
from vgpu.private.tensors import patch_fake_tensors, patch_make_wrapper
from vgpu.runtime import registry, scheduler
from vgpu.tensors import saving
from vgpu.tensors.tensor import VirtualTensor, own_device, refuse_nested


def stand_for_cuda(n, **options):
    """Return `n` new virtual GPUs that are "cuda" devices for all code of this process, a list.

    Call it at the start of a process, before there are virtual GPUs. It takes the options of
    `virtual_gpus`.

    Raises:
        RuntimeError: there are virtual GPUs already, or this machine does not allow it.
        ValueError, TypeError: as `virtual_gpus`.
    """
    registry.rename("cuda")
    devices = virtual_gpus(n, **options)
    register_cuda(_make, lambda func, *args, **kwargs: refuse_nested(func))
    replace(torch.Tensor, cuda=_cuda, type=_type)
    replace(torch.UntypedStorage, cuda=_storage_to_cuda)
    patch_make_wrapper(own_device, say_cuda)
    patch_fake_tensors(own_device, say_cuda)
    patch_flex_attention(VirtualTensor, lower)
    patch_autocast()
    name_numbered_devices("cuda")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forgive_fork)
    return devices


def _forgive_fork():
    """Allow a child of a process that has not used its GPUs to use them, as CUDA does.

    It runs after `scheduler.note_fork`: an interrupt leaves the child without GPUs.
    """
    if not torch_module.has_worked():
        scheduler.forgive_fork()


def _make(func, *args, **kwargs):
    """Issue an operator that makes a tensor on "cuda".

    The first call prepares shape inference, so that a process without such tensors does not wait.
    """
    prepare_shape_inference()
    return issue_factory(func, args, kwargs)


def _cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
    """Return a copy of this tensor on a GPU, or the tensor itself if it is there already."""
    where = torch.device("cuda", device) if isinstance(device, int) else device
    where = torch.device("cuda" if where is None else where)
    if not registry.is_virtual(where):
        raise RuntimeError(f"Invalid device, must be cuda device: {where}")
    return self.to(where, non_blocking=non_blocking, memory_format=memory_format)


def _type(self, dtype=None, non_blocking=False):
    """`Tensor.type`, which knows types such as "torch.cuda.FloatTensor" by their names."""
    if dtype is None:
        return _plain_type(self).replace("torch.vgpu.", "torch.cuda.")
    name = f"{dtype.__module__}.{dtype.__name__}" if isinstance(dtype, type) else dtype
    if isinstance(name, str) and name.startswith("torch.cuda."):
        device = self.device if self.is_cuda else "cuda"
        name = name.replace("torch.cuda.", "torch.")
        dtype = _plain_type(torch.empty(0), name).dtype
        return self.to(device, dtype, non_blocking=non_blocking)
    return _plain_type(self, dtype, non_blocking)


_plain_type = torch.Tensor.type


def called_cuda(device):
    """Return a device under the name by which programs know it."""
    return torch.device("cuda", device.index) if device.type == "vgpu" else device


def say_cuda(cls):
    """Make tensors of a class that wraps virtual tensors report "cuda" as their device."""
    device = cls.device
    cls.device = property(lambda tensor: called_cuda(device.__get__(tensor)))
    cls.is_cuda = property(lambda tensor: tensor.device.type == "cuda")


def _storage_to_cuda(self, device=None, non_blocking=False):
    """Return a storage on a GPU, as a `map_location` of torch.load does."""
    where = torch.device("cuda", device) if isinstance(device, int) else device
    return saving.restore(self, str("cuda" if where is None else where))
