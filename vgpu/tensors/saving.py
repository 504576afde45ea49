"""Saving, loading and pickling, by storages, as on CUDA."""

import re

from vgpu.private.tensors import is_parameter, rebuild_parameter_arguments, rebuild_tensor_arguments
from vgpu.runtime import registry
from vgpu.tensors.storages import copy_to


def reduce(tensor):
    """Return the pickle representation of `tensor`, the same as for a tensor on CUDA."""
    if is_parameter(tensor):
        return rebuild_parameter_arguments(tensor)
    return rebuild_tensor_arguments(tensor)


def refuse_sharing(tensor):
    """Raise RuntimeError: processes cannot share a tensor on a virtual GPU.

    On CUDA `torch.multiprocessing` shares it; a copy here would hide writes of the other process.
    """
    raise RuntimeError(
        f"a tensor on {tensor.device} cannot be shared with another process, which has its own "
        "virtual GPUs: send tensor.cpu(), or use torch.distributed"
    )


def restore(storage, location):
    """Return a copy of a CPU storage read by torch.load on its virtual GPU `location` ("vgpu:0").

    Returns None for another location; raises RuntimeError if this process has no such device.
    """
    if re.fullmatch(rf"(vgpu|{registry.device_type})(:[0-9]+)?", location):
        return copy_to(storage, location)
