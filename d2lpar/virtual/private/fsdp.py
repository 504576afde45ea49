"""Making `fully_shard` and `FullyShardedDataParallel` work on virtual GPUs."""

import contextlib
import functools
from types import SimpleNamespace

import torch

from .modules import without_swapping
from .patching import when_imported


def patch_fsdp(is_ours, is_virtual):
    """Make both kinds of FSDP work on virtual GPUs, once they are imported.

    Args:
        is_ours: function that returns whether a tensor is on a virtual GPU.
        is_virtual: function that returns whether a `torch.device` is one.
    """
    for name in ("_fully_shard._fsdp_init", "_init_utils"):
        _when_imported(name, lambda module: _patch_moves(module, is_virtual))
    _when_imported("_state_dict_utils", lambda module: _patch_offload(module, is_ours, is_virtual))
    _when_imported("_fully_shard._fsdp_param", _patch_assignment)


def _when_imported(name, change):
    when_imported(f"torch.distributed.fsdp.{name}", change)


def _patch_assignment(module):
    """Allow `load_state_dict(assign=True)` to replace parameters of `fully_shard`, as on CUDA."""
    module.FSDPParam.reset_sharded_param = without_swapping(module.FSDPParam.reset_sharded_param)


def _patch_moves(module, is_virtual):
    """Make FSDP move what lies on the CPU to a virtual GPU, as it does to others."""
    move = module._move_states_to_device

    @functools.wraps(move)
    def _move_states_to_device(params, buffers, device):
        for tensor in (*params, *buffers) if device is not None and is_virtual(device) else ():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                moved = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)
        move(params, buffers, device)

    module._move_states_to_device = _move_states_to_device


def _patch_offload(state_dicts, is_ours, is_virtual):
    """Move state dicts of `FullyShardedDataParallel` to the CPU parameter by parameter.

    torch moves the flat parameter by its `data`, which a tensor on a virtual GPU cannot take.
    """
    from torch.distributed.fsdp import _flat_param

    to_cpu = _flat_param.FlatParamHandle.to_cpu
    finish = state_dicts._common_unshard_post_state_dict_hook

    @functools.wraps(to_cpu)
    def _to_cpu(self):
        return contextlib.nullcontext() if is_virtual(self.device) else to_cpu(self)

    @functools.wraps(finish)
    def _common_unshard_post_state_dict_hook(module, fsdp_state, state_dict, prefix, param_hook):
        def hook(state_dict, prefix, fqn):
            param_hook(state_dict, prefix, fqn)
            if fsdp_state._state_dict_config.offload_to_cpu and is_ours(state_dict[fqn]):
                state_dict[fqn] = state_dict[fqn].cpu()

        return finish(module, fsdp_state, state_dict, prefix, hook)

    _flat_param.FlatParamHandle.to_cpu = _to_cpu
    state_dicts._common_unshard_post_state_dict_hook = _common_unshard_post_state_dict_hook


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
