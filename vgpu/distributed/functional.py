"""Collectives of torch.ops._c10d_functional on virtual GPUs; DTensor uses them.

They return new tensors without waiting; `wait_tensor` makes the current stream wait. The calling
thread issues them through the process group. A kernel would block the device's engine until the
other ranks join.
"""

import torch
import torch.distributed as dist

from vgpu.distributed.work import wait_for_writer
from vgpu.operators.plans import tables
from vgpu.private.process_groups import options, resolve_process_group, wait_on_first_use


def _issues(name):
    """Decorate the function that issues the operator of this name."""

    def register(function):
        tables.special_names[name] = lambda func, args, kwargs: function(*args, **kwargs)
        return function

    return register


def _issues_in_place(name):
    """Decorate the function that issues `name_` and, on copies of its tensors, `name`."""

    def register(function):
        _issues(name)(lambda tensors, *args: function(_copy(tensors), *args))
        return _issues(name + "_")(function)

    return register


def _group(name):
    """Return the process group with a name; newer torch may pass the group itself."""
    return resolve_process_group(name) if isinstance(name, str) else name


def _reduction(kind, reduce_op):
    """Return options with a reduce op, which may be given by name, such as "sum"."""
    if isinstance(reduce_op, str):
        named = getattr(dist.ReduceOp, reduce_op.upper(), None)
        if named is None:
            raise ValueError(f"unknown reduce op: {reduce_op!r}")
        reduce_op = dist.ReduceOp(named)
    return options(kind, reduceOp=reduce_op)


def _copy(value):
    """Return a dense copy of a tensor, or of each tensor in a list."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return [*map(_copy, value)]


def _empty(tensor, rows):
    """Return an empty tensor like this one, with another number of rows."""
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _part(name, rows, k):
    if rows % k:
        raise ValueError(f"{name}: {rows} rows must be divisible by {k} ranks")
    return rows // k


@_issues_in_place("_c10d_functional::all_reduce")
def all_reduce_(tensor, reduce_op, group_name):
    _group(group_name).allreduce([tensor], _reduction(dist.AllreduceOptions, reduce_op))
    return tensor


@_issues_in_place("_c10d_functional::all_reduce_coalesced")
def all_reduce_coalesced_(tensors, reduce_op, group_name):
    opts = _reduction(dist.AllreduceCoalescedOptions, reduce_op)
    _group(group_name).allreduce_coalesced(tensors, opts)
    return tensors


@_issues_in_place("_c10d_functional::broadcast")
def broadcast_(tensor, src, group_name):
    _group(group_name).broadcast([tensor], options(dist.BroadcastOptions, rootRank=src))
    return tensor


@_issues("_c10d_functional::all_gather_into_tensor_out")
@_issues("_c10d_functional::all_gather_into_tensor")
def all_gather_into_tensor(tensor, group_size, group_name, out=None):
    """Return the tensors of all ranks, concatenated, in `out` if given."""
    if out is None:
        out = _empty(tensor, tensor.shape[0] * group_size)
    _group(group_name)._allgather_base(out, tensor.contiguous())
    return out


@_issues("_c10d_functional::all_gather_into_tensor_coalesced")
def all_gather_into_tensor_coalesced(tensors, group_size, group_name):
    outputs = [_empty(tensor, tensor.shape[0] * group_size) for tensor in tensors]
    tensors = [tensor.contiguous() for tensor in tensors]
    _group(group_name).allgather_into_tensor_coalesced(outputs, tensors)
    return outputs


@_issues("_c10d_functional::reduce_scatter_tensor_out")
@_issues("_c10d_functional::reduce_scatter_tensor")
def reduce_scatter_tensor(tensor, reduce_op, group_size, group_name, out=None):
    """Return this rank's part of the sum over the ranks, in `out` if given."""
    if out is None:
        out = _empty(tensor, _part("reduce_scatter", tensor.shape[0], group_size))
    opts = _reduction(dist.ReduceScatterOptions, reduce_op)
    _group(group_name)._reduce_scatter_base(out, tensor.contiguous(), opts)
    return out


@_issues("_c10d_functional::reduce_scatter_tensor_coalesced")
def reduce_scatter_tensor_coalesced(tensors, reduce_op, group_size, group_name):
    parts = [_part("reduce_scatter", tensor.shape[0], group_size) for tensor in tensors]
    outputs = [*map(_empty, tensors, parts)]
    opts = _reduction(dist.ReduceScatterOptions, reduce_op)
    tensors = [tensor.contiguous() for tensor in tensors]
    _group(group_name).reduce_scatter_tensor_coalesced(outputs, tensors, opts)
    return outputs


@_issues("_c10d_functional::all_to_all_single")
def all_to_all_single(tensor, output_split_sizes, input_split_sizes, group_name):
    """Send rows to each rank, by default equal parts; return the received rows."""
    out = _empty(tensor, sum(output_split_sizes) if output_split_sizes else tensor.shape[0])
    group, tensor = _group(group_name), tensor.contiguous()
    group.alltoall_base(out, tensor, output_split_sizes, input_split_sizes)
    return out


@_issues("_dtensor::shard_dim_alltoall")
def shard_dim_alltoall(tensor, gather_dim, shard_dim, group_name):
    """Return this rank's part along `shard_dim` of a tensor split along `gather_dim`."""
    group = _group(group_name)
    rows = _part("shard_dim_alltoall", tensor.shape[shard_dim], group.size())
    parts = [_copy(part) for part in tensor.split(rows, shard_dim)]
    outputs = [torch.empty_like(part) for part in parts]
    group.alltoall(outputs, parts).wait()
    return torch.cat(outputs, gather_dim)


@_issues("_c10d_functional::wait_tensor")
def wait_tensor(tensor):
    """Make the current stream wait for the collective that writes a tensor."""
    wait_for_writer(tensor)
    return tensor


@_issues("_c10d_functional::wait_tensors")
def wait_tensors(tensors):
    """Call `wait_tensor` for each tensor; since torch 2.15."""
    return [wait_tensor(tensor) for tensor in tensors]


@_issues("_c10d_functional::_wrap_tensor_autograd")
def wrap_tensor(tensor):
    """Return a tensor that calls `wait_tensor` on first use."""
    return wait_on_first_use(tensor)
