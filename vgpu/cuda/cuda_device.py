"""Virtual GPUs as "cuda" devices: tensors, factories and autocast; names: torch_cuda.py."""

import os

import torch

from vgpu import torch_vgpu, virtual_gpus
from vgpu.operators.autocast import lower
from vgpu.operators.issuing import issue_factory
from vgpu.private.cuda import patch_autocast, patch_messages, register_cuda
from vgpu.private.dispatch import prepare_shape_inference
from vgpu.private.patching import replace
from vgpu.private.registration import name_numbered_devices
from vgpu.private.tensors import patch_fake_tensors, patch_make_wrapper
from vgpu.private.torch_compile import patch_flex_attention
from vgpu.runtime import registry, scheduler
from vgpu.tensors.tensor import REFUSALS, VirtualTensor, with_own_type


def stand_for_cuda(n, **options):
    """Create `n` virtual GPUs that are "cuda" devices for all code of this process; return a list.

    Call it at the start of a process, before `virtual_gpus`, whose options it takes. Raises
    RuntimeError if virtual GPUs exist already, or this machine does not allow it.
    """
    registry.rename("cuda")
    devices = virtual_gpus(n, **options)
    register_cuda(_make, REFUSALS)
    replace(torch.Tensor, cuda=_cuda, type=_type)
    patch_messages(VirtualTensor)
    patch_make_wrapper(with_own_type, report_as_cuda)
    patch_fake_tensors(with_own_type, report_as_cuda)
    patch_flex_attention(VirtualTensor, lower)
    patch_autocast()
    name_numbered_devices("cuda")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_allow_unused_gpus)
    return devices


def _allow_unused_gpus():
    """Allow a fork to use the GPUs if its parent has not used them, like CUDA.

    Runs after `scheduler.note_fork`: after an interrupt in between, the child has no GPUs.
    """
    if not torch_vgpu.has_worked():
        scheduler.forgive_fork()


def _make(func, *args, **kwargs):
    """Issue a factory operator for "cuda"; the first call prepares shape inference."""
    prepare_shape_inference()
    return issue_factory(func, args, kwargs)


def _cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
    """`Tensor.cuda`: return a copy on a GPU, or the tensor itself if it is there already."""
    where = torch.device("cuda", device) if isinstance(device, int) else device
    where = torch.device("cuda" if where is None else where)
    if not registry.is_virtual(where):
        raise RuntimeError(f"Invalid device, must be cuda device: {where}")
    return self.to(where, non_blocking=non_blocking, memory_format=memory_format)


def _type(self, dtype=None, non_blocking=False):
    """`Tensor.type`, with type names such as "torch.cuda.FloatTensor"."""
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


def report_as_cuda(cls):
    """Make a class of tensor wrappers report virtual GPUs as "cuda"."""
    device = cls.device
    cls.device = property(lambda tensor: registry.with_program_type(device.__get__(tensor)))
    cls.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
