"""Parameters and buffers of lazy modules, moved to a virtual GPU before their first use."""

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from vgpu.tensors.tensor import VirtualTensor


def _materialize(self, shape, device=None, dtype=None):
    """Set the shape and allocate memory, in place."""
    self.__class__ = VirtualTensor
    self.data = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)


class UninitializedVirtualParameter(UninitializedParameter, VirtualTensor):
    """A parameter on a virtual GPU without a shape yet."""

    def detach(self):
        """Return the tensor itself, for `nn.Parameter`: there are no values yet."""
        return self

    def requires_grad_(self, requires_grad=True):
        self.requires_grad = requires_grad
        return self

    materialize = _materialize


class UninitializedVirtualBuffer(UninitializedBuffer, VirtualTensor):
    """A buffer on a virtual GPU without a shape yet."""

    materialize = _materialize


def uninitialized(target, source):
    """Turn `target`, a new tensor, into a copy of the uninitialised CPU tensor `source`."""
    is_parameter = isinstance(source, UninitializedParameter)
    target.__class__ = UninitializedVirtualParameter if is_parameter else UninitializedVirtualBuffer
    return target
