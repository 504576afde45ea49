"""Parameters and buffers of lazy modules that are moved to a virtual GPU before their first use."""

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .tensor import VirtualTensor


class UninitializedVirtualParameter(UninitializedParameter, VirtualTensor):
    """A parameter on a virtual GPU whose shape is not known yet."""

    def detach(self):
        """Return the tensor itself, for nn.Parameter to mark it: there are no values yet."""
        return self

    def requires_grad_(self, requires_grad=True):
        self.requires_grad = requires_grad
        return self

    def materialize(self, shape, device=None, dtype=None):
        _materialize(self, shape, device, dtype)


class UninitializedVirtualBuffer(UninitializedBuffer, VirtualTensor):
    """A buffer on a virtual GPU whose shape is not known yet."""

    def materialize(self, shape, device=None, dtype=None):
        _materialize(self, shape, device, dtype)


def _materialize(tensor, shape, device, dtype):
    tensor.__class__ = VirtualTensor
    tensor.data = torch.empty(shape, device=device or tensor.device, dtype=dtype or tensor.dtype)


def uninitialized(target, source):
    """Make `target`, a new tensor, the counterpart of the uninitialised CPU tensor `source`."""
    is_parameter = isinstance(source, UninitializedParameter)
    target.__class__ = UninitializedVirtualParameter if is_parameter else UninitializedVirtualBuffer
    return target
