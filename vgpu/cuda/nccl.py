"""The backend "nccl" of torch.distributed, by which programs mean GPUs, becomes "vccl"."""

import torch.distributed as dist

from vgpu.cuda.as_cuda import say_cuda
from vgpu.distributed import BACKEND
from vgpu.private.dtensor import patch_dtensor_class
from vgpu.private.process_groups import patch_process_groups


def redirect_nccl():
    """Make "nccl" the backend of virtual GPUs; `dist.get_backend` still says "nccl"."""
    if dist.is_available():
        patch_dtensor_class(say_cuda)
        patch_process_groups(translate)


def translate(backend):
    """Return the backend that a program gets instead of the one that it names.

    It translates "nccl", "gloo" (which takes GPU tensors, too), pairs such as "cpu:gloo,cuda:nccl"
    and, where a program names none, "undefined". Other backends stay.
    """
    if backend in (dist.Backend.UNDEFINED, dist.Backend.GLOO):
        return f"cpu:gloo,vgpu:{BACKEND}"
    if backend == dist.Backend.NCCL:
        return BACKEND
    names = dict(pair.split(":") for pair in backend.split(",") if ":" in pair)
    if names.get("cuda") not in (dist.Backend.NCCL, dist.Backend.GLOO):
        return backend
    del names["cuda"]
    names["vgpu"] = BACKEND
    return ",".join(map(":".join, names.items()))
