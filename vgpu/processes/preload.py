"""Imports for the fork server of `launch`, so that its ranks need not import."""
# ruff: noqa: E402

import contextlib
import gc

gc.disable()  # during imports: collections would take a quarter of the time
import torch
import torch.distributed.elastic.agent.server.local_elastic_agent

import vgpu.distributed.process_group  # noqa: F401
from vgpu.devices import backend
from vgpu.private.torch_compile import import_dynamo

import_dynamo()

# In a CUDA build, the device type would change torch's current accelerator.
if not torch.backends.cuda.is_built():
    with contextlib.suppress(RuntimeError):  # an unsupported torch; the ranks report it
        backend.register()

gc.freeze()  # collecting the imported objects takes longer than starting a rank
gc.enable()
