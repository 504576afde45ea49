"""Registers the device type `vgpu` with torch, once in a process."""

import atexit
import functools
import os
import sys
import warnings
from multiprocessing.reduction import ForkingPickler
from time import monotonic

import torch

from vgpu import torch_vgpu
from vgpu.distributed import BACKEND
from vgpu.modelled.simulation import simulator
from vgpu.operators import attention, autocast, checks, comm, copies, special_operators
from vgpu.operators.backward import StreamsOfForward
from vgpu.operators.issuing import dispatch, issue_factory
from vgpu.private import check_python, check_version
from vgpu.private.autograd import patch_backward, patch_distributed_backward
from vgpu.private.dispatch import prepare_shape_inference, trace_as_plain
from vgpu.private.dtensor import patch_dtensor
from vgpu.private.modules import allow_foreach, patch_data_parallel, patch_trunc_normal
from vgpu.private.process_groups import register_process_groups
from vgpu.private.registration import (
    patch_accelerator,
    patch_classes,
    patch_settings,
    register_device_type,
)
from vgpu.private.tensors import patch_data, patch_dlpack, patch_metadata, reduce
from vgpu.runtime import registry, scheduler
from vgpu.runtime.engines import after_fork, before_fork
from vgpu.runtime.interrupts import defer_interrupts
from vgpu.runtime.notebook import adapt_to_notebook
from vgpu.tensors import pinned_memory, storages
from vgpu.tensors.generators import Generator
from vgpu.tensors.tensor import REFUSALS, VirtualTensor, can_become, on_virtual_gpu, set_data


def register():
    """Register the device type `vgpu` with torch, once.

    Raises RuntimeError if this Python or torch is not supported, or has another device type.
    """
    check_python()
    check_version(torch.__version__)
    assert special_operators.tables  # filled by its import
    if torch.distributed.is_available():
        from vgpu.distributed import functional

        assert functional.tables
    global _registered
    if _registered:
        return
    with defer_interrupts():  # an interrupt halfway would break torch
        VirtualTensor.__torch_dispatch__ = classmethod(dispatch)
        VirtualTensor.__reduce_ex__ = reduce
        VirtualTensor.untyped_storage = storages.untyped_storage
        storages.patch_storages()
        if registry.device_type == "vgpu":  # otherwise done by the first tensor, see cuda_device.py
            prepare_shape_inference()
        warning = register_device_type(
            module=torch_vgpu,
            factory=lambda func, *args, **kwargs: issue_factory(func, args, kwargs),
            copy_=lambda target, source, non_blocking=False: copies.copy_(
                None, (target, source, non_blocking), {}
            ),
            is_pinned=pinned_memory.is_pinned,
            pin=pinned_memory.pin,
            restore=storages.restore,
            kernels=(autocast.register, attention.register, checks.register),
            refusals=REFUSALS,
        )
        patch_backward(StreamsOfForward, registry.device_type, registry.with_program_type)
        patch_distributed_backward()
        patch_classes(
            stream=lambda device, priority=0: torch_vgpu.Stream(device, priority),
            event=lambda device, **options: torch_vgpu.Event(**options),
            generator=lambda device: Generator(registry.find(device)),
            is_virtual=registry.is_virtual,
        )
        patch_settings(registry.wait_for_all_devices)
        patch_accelerator(torch_vgpu, registry.device_type)
        allow_foreach(VirtualTensor)
        trace_as_plain(VirtualTensor)
        patch_data(set_data, can_become)
        patch_metadata(on_virtual_gpu)
        patch_dlpack(on_virtual_gpu)
        ForkingPickler.register(VirtualTensor, storages.refuse_sharing)
        patch_data_parallel(
            comm,
            on_virtual_gpu,
            functools.cache(torch_vgpu.Stream),
            registry.device_type,
            lambda modules: scheduler.clock.copy_modules(modules),
            lambda threads: scheduler.clock.shared_by(threads),
        )
        patch_trunc_normal(
            lambda tensor: not on_virtual_gpu(tensor) or registry.find(tensor.device).has_values
        )
        register_process_groups(BACKEND, _new_process_group, registry.is_virtual)
        patch_dtensor(registry.is_virtual)
        atexit.register(_end)
        adapt_to_notebook()
        _registered = True
    if warning is not None:  # last, because it may be raised as an error
        warnings.warn(warning, stacklevel=4)


def note_forks():
    """Register fork hooks, once: a fork waits for kernels; the child is marked as a fork."""
    global _notes_forks
    if not _notes_forks and hasattr(os, "register_at_fork"):
        _notes_forks = True
        os.register_at_fork(after_in_child=scheduler.note_fork)
        os.register_at_fork(
            before=before_fork, after_in_parent=after_fork, after_in_child=after_fork
        )


_registered = _notes_forks = False


def _new_process_group(options, backend_options):
    from vgpu.distributed.process_group import create  # lazy: few programs need it

    return create(options, backend_options)


def _end():
    if scheduler.in_fork():
        return
    scheduler.clock.stop()
    workers = [
        engine
        for device in registry.devices
        for engine in (*device.own_engines, *device.collective_engines)
    ]
    workers.append(simulator)
    with defer_interrupts():  # a thread still in torch would crash the process at exit
        for worker in workers:
            worker.end()
        # After an error, a collective may wait for a rank that never joins.
        deadline = monotonic() + (5.0 if hasattr(sys, "last_value") else 60.0)
        for worker in workers:
            worker.join(max(0.0, deadline - monotonic()))
