"""Patches of torch.nn.init, nn.DataParallel and optimizers for virtual GPUs."""

import functools
import sys

import torch
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities


def allow_foreach(tensor_class):
    """Allow the foreach kernels of optimizers and `clip_grad_norm_`, as on CUDA."""
    of_optimizers.append(tensor_class)
    of_utilities.append(tensor_class)


def patch_trunc_normal(have_values):
    """Make `trunc_normal_` draw once unless `have_values(tensor)`: torch's version reads."""
    original = torch.nn.init._no_grad_trunc_normal_

    @functools.wraps(original)
    def trunc_normal(tensor, mean, std, a, b, generator=None):
        if have_values(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator).clamp_(a, b)

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal


def patch_data_parallel(comm, on_virtual_gpu, get_stream, device_type, copying, sharing):
    """Make nn.DataParallel work on virtual GPUs, with a module `comm` in place of torch's.

    `copying` is called with the number of copied modules, `sharing` with that of threads that share
    Python's lock; it returns a context manager.
    """
    from torch.nn.parallel import _functions
    from torch.nn.parallel import comm as torch_comm

    # torch.nn.parallel.data_parallel is a function, which hides the module
    data_parallel = vars(sys.modules["torch.nn.parallel.data_parallel"])

    for name in ("gather", "broadcast", "broadcast_coalesced", "reduce_add_coalesced"):
        theirs, ours = getattr(torch_comm, name), getattr(comm, name)
        setattr(torch_comm, name, _choose(theirs, ours, on_virtual_gpu))
    torch_comm.scatter = comm.scatter
    data_parallel["_get_available_device_type"] = lambda: device_type
    torch._utils._get_available_device_type = lambda: device_type
    _functions._get_stream = get_stream
    replicate, parallel_apply = data_parallel["replicate"], data_parallel["parallel_apply"]

    @functools.wraps(replicate)
    def counted_replicate(network, devices, detach=False):
        replicas = replicate(network, devices, detach)
        # After the call: it copies the modules once it has launched the copies of the parameters.
        copying(len(devices) * sum(1 for _ in network.modules()))
        return replicas

    @functools.wraps(parallel_apply)
    def shared_parallel_apply(modules, *args, **kwargs):
        with sharing(len(modules)):
            return parallel_apply(modules, *args, **kwargs)

    data_parallel |= {"replicate": counted_replicate, "parallel_apply": shared_parallel_apply}


def _choose(theirs, ours, test):
    @functools.wraps(theirs)
    def function(tensors, *args, **kwargs):
        return (ours if test(tensors) else theirs)(tensors, *args, **kwargs)

    return function
