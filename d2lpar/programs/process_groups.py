"""The backend "nccl" of torch.distributed, by which programs mean GPUs: the one of virtual GPUs."""

import torch.distributed as dist

from d2lpar.virtual import private
from d2lpar.virtual.as_cuda import say_cuda
from d2lpar.virtual.imports import when_imported

BACKEND = "vccl"  # of virtual GPUs


def let_nccl_mean_ours():
    """Let "nccl" be the backend of virtual GPUs; `dist.get_backend` still says "nccl"."""
    if dist.is_available():
        dist.is_nccl_available = lambda: True
        when_imported("torch.distributed.tensor._api", lambda module: say_cuda(module.DTensor))
        private.patch_process_groups(translate)


def translate(backend):
    """Return the name of a backend, as torch has it for virtual GPUs.

    Args:
        backend: the name that a program gives: "nccl", "gloo", which takes tensors of GPUs, too,
            "cpu:gloo,cuda:nccl", or "undefined" where it gives none.
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
