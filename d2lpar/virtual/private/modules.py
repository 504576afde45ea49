"""Making nn.Module, nn.DataParallel and optimizers work with tensors on virtual GPUs."""

import functools
import sys
import threading
from types import FunctionType, SimpleNamespace

import torch
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_utilities


def patch_swap_tensors(is_ours):
    """Make swap_tensors, by which modules move, do what a change of `data` does on CUDA.

    It is allowed despite weak references, which stay valid because the object is the same. And the
    first tensor keeps its attributes (`bias._no_weight_decay`) but those that hold its values.

    Args:
        is_ours: function that tells whether a tensor is on a virtual GPU.
    """
    swap = torch.utils.swap_tensors
    none = SimpleNamespace(getweakrefs=lambda tensor: ())
    swap_all = FunctionType(swap.__code__, {**swap.__globals__, "weakref": none}, swap.__name__)

    @functools.wraps(swap)
    def swap_tensors(t1, t2):
        of_values = {"_cell", "_block", "_is_param", *vars(t2)}
        vars(t2).update({name: vars(t1)[name] for name in vars(t1).keys() - of_values})
        return (swap_all if is_ours(t1) or is_ours(t2) else swap)(t1, t2)

    torch.utils.swap_tensors = swap_tensors


def swap_when_modules_move():
    """Make `module.to` swap parameters, since assigning `data` cannot move a virtual tensor.

    `load_state_dict` would swap them, too, which is refused where DDP holds them. Now it copies,
    as on CUDA, unless the program has asked for swapping before.
    """
    may_swap = torch.__future__.get_swap_module_params_on_conversion
    if may_swap():
        return
    torch.__future__.get_swap_module_params_on_conversion = functools.wraps(may_swap)(
        lambda: _here.swaps and may_swap()
    )
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.nn.Module._load_from_state_dict = without_swapping(torch.nn.Module._load_from_state_dict)


class _Here(threading.local):
    swaps = True  # whether modules swap parameters in this thread


_here = _Here()


def without_swapping(function):
    """Return a function that does the same, while modules do not swap parameters."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        before, _here.swaps = _here.swaps, False
        try:
            return function(*args, **kwargs)
        finally:
            _here.swaps = before

    return call


def allow_foreach(tensor_class):
    """Allow the foreach kernels of optimizers and `clip_grad_norm_`, as on CUDA."""
    of_optimizers.append(tensor_class)
    of_utilities.append(tensor_class)


def patch_data_parallel(comm, is_ours, get_stream, device_type, copying, sharing):
    """Give nn.DataParallel what it has for CUDA only.

    Args:
        comm: a module with scatter, gather, broadcast and the two coalesced functions.
        is_ours: function that tells whether tensors are on virtual GPUs.
        get_stream: function of a device that returns a side stream for copies to it.
        device_type: what programs call the devices.
        copying: function called with the number of modules that are copied.
        sharing: function of a number of threads that returns a context manager, for the time in
            which they share Python's lock.
    """
    from torch.nn.parallel import _functions
    from torch.nn.parallel import comm as torch_comm

    # torch.nn.parallel.data_parallel is the function of this name
    data_parallel = vars(sys.modules["torch.nn.parallel.data_parallel"])

    for name in ("gather", "broadcast", "broadcast_coalesced", "reduce_add_coalesced"):
        setattr(torch_comm, name, _choose(getattr(torch_comm, name), getattr(comm, name), is_ours))
    torch_comm.scatter = comm.scatter
    data_parallel["_get_available_device_type"] = lambda: device_type
    torch._utils._get_available_device_type = lambda: device_type
    _functions._get_stream = get_stream
    replicate, parallel_apply = data_parallel["replicate"], data_parallel["parallel_apply"]

    @functools.wraps(replicate)
    def counted_replicate(network, devices, detach=False):
        copying(len(devices) * sum(1 for _ in network.modules()))
        return replicate(network, devices, detach)

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
