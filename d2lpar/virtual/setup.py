"""Making virtual GPUs known to torch, once in a process."""

import atexit
import os

import torch

from . import autocast, comm, copies, operators, private, saving, scheduler, storages, vgpu
from . import device as registry
from .backward import StreamsOfForward
from .distributed import BACKEND
from .distributed.dtensor import adapt_dtensor
from .generators import Generator
from .imports import when_imported
from .interrupts import held_back
from .issuing import issue_factory
from .notebook import adapt_to_notebook
from .simulation import simulator
from .tensor import VirtualTensor, is_ours


def register():
    """Make the device type `vgpu` known to torch, once.

    Raises:
        RuntimeError: virtual GPUs are not known to work on this version of torch, or another
            package has added a device type to torch.
    """
    assert operators.tables and storages.resize_  # what importing them filled in
    if torch.distributed.is_available():
        from .distributed import functional

        assert functional.tables
    global _registered
    private.check_version(torch.__version__)
    if _registered:
        return
    with held_back():  # torch would be broken with only half of this done
        if registry.device_type == "vgpu":  # otherwise the first tensor does it, see as_cuda.py
            private.prepare_shape_inference()
        private.register(
            module=vgpu,
            factory=lambda func, *args, **kwargs: issue_factory(func, args, kwargs),
            copy_=lambda target, source, non_blocking=False: copies.copy_(
                None, (target, source, non_blocking), {}
            ),
            is_pinned=copies.is_pinned,
            pin=copies.pin,
            restore=saving.restore,
            autocast=autocast.register,
        )
        private.patch_backward(StreamsOfForward)
        private.patch_classes(
            stream=lambda device, priority=0: vgpu.Stream(device, priority),
            event=lambda device, **options: vgpu.Event(**options),
            generator=lambda device: Generator(registry.find(device)),
            is_virtual=registry.is_virtual,
        )
        private.patch_default_dtype(registry.wait_for_all)
        private.patch_accelerator(vgpu, registry.device_type)
        private.allow_foreach(VirtualTensor)
        private.swap_in_spite_of_weak_references(is_ours)
        private.patch_data_parallel(comm, is_ours, _side_stream, registry.device_type)
        private.register_process_groups(BACKEND, _new_process_group, registry.is_virtual)
        for name in ("_fully_shard._fsdp_init", "_init_utils"):
            when_imported(f"torch.distributed.fsdp.{name}", _adapt_fsdp)
        when_imported("torch.distributed.fsdp._state_dict_utils", _adapt_fsdp_offload)
        when_imported(
            "torch.distributed.fsdp._fully_shard._fsdp_param",
            private.let_fully_shard_take_assigned_parameters,
        )
        adapt_dtensor()
        registry.let_engines_have_their_turn()
        atexit.register(_end)
        adapt_to_notebook()
        _registered = True


def note_forks():
    """Let a fork of this process, which has devices, know that it is one; once."""
    global _notes_forks
    if not _notes_forks and hasattr(os, "register_at_fork"):
        _notes_forks = True
        os.register_at_fork(after_in_child=scheduler.note_fork)


_registered = _notes_forks = False
_side_streams = {}


def _side_stream(device):
    """Return the stream on which nn.DataParallel copies to a device."""
    device = registry.find(device)
    if device.index not in _side_streams:
        _side_streams[device.index] = vgpu.Stream(device.index)
    return _side_streams[device.index]


def _adapt_fsdp(module):
    private.patch_fsdp(module, registry.is_virtual)


def _adapt_fsdp_offload(module):
    from torch.distributed.fsdp import _flat_param

    private.patch_fsdp_offload(_flat_param, module, is_ours, registry.is_virtual)


def _new_process_group(options, backend_options):
    from .distributed.process_group import create  # few programs need it

    return create(options, backend_options)


def _end():
    if scheduler.in_fork():
        return
    workers = [
        engine
        for device in registry.devices
        for engine in (*device.own_engines, *device.collective_engines)
    ]
    workers.append(simulator)
    with held_back():  # a thread that is still in torch would end the process badly
        for worker in workers:
            worker.end()
        for worker in workers:
            worker.join()
