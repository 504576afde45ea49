"""Scatter, gather, broadcast and reduce for `nn.DataParallel` on virtual GPUs."""

import torch
from torch._utils import (
    _flatten_dense_tensors,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)

from . import device as registry
from .module import stream as use_stream


def scatter(tensor, devices, chunk_sizes=None, dim=0, streams=None):
    """Return `tensor` cut along `dim`, one piece on each device."""
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    streams = streams or [None] * len(devices)
    pieces = []
    for chunk, index, stream in zip(chunks, devices, streams, strict=False):
        with use_stream(stream):
            where = registry.find(index).torch_device
            pieces.append(chunk.contiguous().to(where, non_blocking=True))
    return tuple(pieces)


def gather(tensors, dim=0, destination=None):
    """Return `tensors` put together along `dim` on `destination` (an index; -1 is the CPU)."""
    if destination is None or isinstance(destination, int) and destination >= 0:
        where = registry.find(destination).torch_device
    else:
        where = torch.device("cpu")
    return torch.cat(
        [tensor.to(where, non_blocking=where.type != "cpu") for tensor in tensors], dim
    )


def broadcast(tensor, devices=None, *, out=None):
    """Return `tensor` on each of `devices`, or copied into each of the tensors `out`.

    Raises RuntimeError unless one of both is given.
    """
    if (devices is None) == (out is None):
        raise RuntimeError(
            "Exactly one of 'devices' and 'out' must be specified, but got "
            f"devices={devices} and out={out}"
        )
    if out is None:
        return tuple(tensor.to(registry.find(index).torch_device) for index in devices)
    for target in out:
        target.copy_(tensor)
    return tuple(out)


def broadcast_coalesced(tensors, devices, buffer_size=10485760):
    """Return, for each device, copies of all `tensors`, sent in buffers of `buffer_size` bytes."""
    outputs = [list(tensors)]
    for index in devices[1:]:
        where = registry.find(index).torch_device
        copies = []
        for chunk in _take_tensors(tensors, buffer_size):
            flat = _flatten_dense_tensors(chunk).to(where)
            copies.extend(_unflatten_dense_tensors(flat, chunk))
        outputs.append(list(_reorder_tensors_as(copies, tensors)))
    return outputs


def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    """Return the sums over devices of each tensor, on `destination`; `inputs[k]` are device k's."""
    where = registry.find(destination).torch_device
    sums = []
    takers = [_take_tensors(tensors, buffer_size) for tensors in inputs]
    for chunks in zip(*takers, strict=True):
        flats = [_flatten_dense_tensors(chunk) for chunk in chunks]
        total = None
        for flat in flats:
            flat = flat.to(where)
            total = flat.clone() if total is None else total.add_(flat)
        sums.extend(_unflatten_dense_tensors(total, chunks[0]))
    return tuple(_reorder_tensors_as(sums, inputs[0]))
