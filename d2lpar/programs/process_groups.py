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
        backend: the name that a program gives: "nccl", "cpu:gloo,cuda:nccl", or "undefined" where
            it gives none.
    """
    if backend == dist.Backend.UNDEFINED:
        return f"cpu:gloo,vgpu:{BACKEND}"
    pairs = [pair.split(":") for pair in backend.split(",")]
    names = {"nccl": BACKEND, "cuda": "vgpu"}
    return ",".join(":".join(names.get(part, part) for part in pair) for pair in pairs)
