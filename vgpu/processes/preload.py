"""Imports of the server from which `launch` forks its ranks, which saves each of them the time."""
# ruff: noqa: E402

import contextlib
import gc

gc.disable()  # until all is imported: collections would take a quarter of the time
import torch
import torch.distributed.elastic.agent.server.local_elastic_agent

import vgpu.distributed.process_group  # noqa: F401
from vgpu.private.compiling import import_dynamo
from vgpu.runtime import backend

import_dynamo()

# Beside CUDA the device type would change what torch takes for the accelerator.
if not torch.backends.cuda.is_built():
    with contextlib.suppress(RuntimeError):  # a rank reports that this torch is not supported
        backend.register()

gc.freeze()  # what was imported stays: a collection of it takes longer than the start of a rank
gc.enable()
