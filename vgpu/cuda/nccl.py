"""Redirects the backend "nccl" of torch.distributed to "vccl"."""

import torch.distributed as dist

from vgpu.cuda.as_cuda import report_as_cuda
from vgpu.distributed import BACKEND
from vgpu.private.dtensor import patch_dtensor_class
from vgpu.private.process_groups import patch_process_groups


def redirect_nccl():
    """Make "nccl" the backend of virtual GPUs; `dist.get_backend` still returns "nccl"."""
    if dist.is_available():
        patch_dtensor_class(report_as_cuda)
        patch_process_groups(translate)


def translate(backend):
    """Return the backend that replaces the requested one.

    Translated are "nccl", "gloo" (which accepts GPU tensors, too), pairs such as
    "cpu:gloo,cuda:nccl", and "undefined", the default. Others are returned unchanged.
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
