"""Making `fully_shard` and `FullyShardedDataParallel` work on virtual GPUs."""

import functools
from types import SimpleNamespace

import torch

from .patching import when_imported


def _when_imported(name, change):
    when_imported(f"torch.distributed.fsdp.{name}", change)


def patch_names_in_fsdp(say):
    """Make `FullyShardedDataParallel` call a GPU by the name that programs know.

    It knows GPUs by their numbers, and `torch.device(0)` has torch's own name for them.

    Args:
        say: function that returns a `torch.device` under the name by which programs know it.
    """
    _when_imported("_init_utils", lambda module: _patch_names(module, say))


def _patch_names(module, say):
    given, computing = module._get_device_from_device_id, module._get_compute_device

    @functools.wraps(given)
    def _get_device_from_device_id(*args):
        device = given(*args)
        return device and say(device)

    @functools.wraps(computing)
    def _get_compute_device(*args):
        *args, handle = args
        current = say(torch.device("vgpu", handle.current_device()))
        return computing(*args, SimpleNamespace(current_device=lambda: current))

    module._get_device_from_device_id = _get_device_from_device_id
    module._get_compute_device = _get_compute_device
