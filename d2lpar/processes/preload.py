"""What the server has loaded from which `launch` forks its ranks: each rank is spared the time."""

import contextlib

import torch
import torch._dynamo
import torch.distributed.elastic.agent.server.local_elastic_agent

import d2lpar.processes.rank
import d2lpar.virtual.distributed.process_group  # noqa: F401
from d2lpar.virtual import setup

# Beside CUDA the device type would change what torch takes for the accelerator.
if not torch.backends.cuda.is_built():
    with contextlib.suppress(RuntimeError):  # a rank shall say that this torch is not known
        setup.register()
