"""Virtual GPUs that PyTorch calls "cuda": tensors, autocast, and what torch makes for a device.

The names of `torch.cuda` are no matter of this module: `d2lpar.programs.cuda_names` has them.
"""

import functools
import os

import torch

from . import device as registry
from . import private, saving, scheduler, vgpu, virtual_gpus
from .imports import when_imported
from .issuing import issue_factory
from .tensor import DeviceStorage, VirtualTensor


def stand_for_cuda(n, **options):
    """Make `n` virtual GPUs that are "cuda" devices for all code of this process.

    This is for the start of a process: there must be no virtual GPUs yet.

    Args:
        n: how many.
        **options: those of `virtual_gpus`.

    Returns:
        A list of devices: [device(type='cuda', index=0), ...].

    Raises:
        RuntimeError: there are virtual GPUs already, or this machine is none that they can stand
            for CUDA's on.
        ValueError, TypeError: as `virtual_gpus`.
    """
    registry.rename("cuda")
    devices = virtual_gpus(n, **options)
    private.register_cuda(_make)
    VirtualTensor.device = property(lambda self: self._cell.layout.device.torch_device)
    VirtualTensor.is_cuda = True
    VirtualTensor.to = _to
    DeviceStorage.device = property(_device_of_storage)
    DeviceStorage.is_cuda = True
    torch.Tensor.cuda = _cuda
    torch.Tensor.type = _type
    torch.UntypedStorage.cuda = _storage_to_cuda
    private.patch_make_wrapper(_own, say_cuda)
    _let_autocast_know()
    when_imported("torch.distributed.fsdp._init_utils", _say_cuda_in_fsdp)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forgive_fork)
    return devices


def _forgive_fork():
    """Let a child of a process that has not used its GPUs use them, as CUDA does.

    It runs behind `scheduler.note_fork`: an interrupt leaves the child without GPUs.
    """
    if not vgpu.has_worked():
        scheduler.forgive_fork()


def _make(func, *args, **kwargs):
    """Issue an operator that makes a tensor on "cuda".

    The first one prepares shape inference. A process that makes none shall start as fast as ever.
    """
    private.prepare_shape_inference()
    return issue_factory(func, args, kwargs)


def _own(device):
    """Return a device as torch's C++ code knows it, with its index, if it is a virtual GPU."""
    if isinstance(device, (str, torch.device)):
        where = torch.device(device)
        if registry.is_virtual(where):
            return registry.find(where).own_torch_device
    return device


def _to(self, *args, **kwargs):
    """`Tensor.to` of a tensor on a virtual GPU: "cuda" is where it may be already."""
    if "device" in kwargs:
        kwargs["device"] = _own(kwargs["device"])
    elif args:
        args = _own(args[0]), *args[1:]
    return torch.Tensor.to(self, *args, **kwargs)


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
    """Let tensors of a class that wraps tensors of ours say that they are on "cuda"."""
    device = cls.device
    cls.device = property(lambda tensor: called_cuda(device.__get__(tensor)))
    cls.is_cuda = property(lambda tensor: tensor.device.type == "cuda")


def _say_cuda_in_fsdp(module):
    private.patch_names_in_fsdp(module, called_cuda)


def _device_of_storage(storage):
    return called_cuda(torch.UntypedStorage.device.__get__(storage))


def _storage_to_cuda(self, device=None, non_blocking=False):
    """Return a storage on a GPU, as a `map_location` of torch.load does."""
    where = torch.device("cuda", device) if isinstance(device, int) else device
    return saving.restore(self, str("cuda" if where is None else where))


def _let_autocast_know():
    """Let autocast("cuda") be that of the type by which torch's C++ code knows our tensors."""

    def translated(function):
        @functools.wraps(function)
        def call(device_type="cuda", *args, **kwargs):
            return function("vgpu" if device_type == "cuda" else device_type, *args, **kwargs)

        return call

    for name in (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
    ):
        setattr(torch, name, translated(getattr(torch, name)))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cuda")
    init = torch.amp.autocast.__init__

    @functools.wraps(init)
    def __init__(self, device_type, *args, **kwargs):
        init(self, "vgpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.amp.autocast.__init__ = __init__
