"""Scatter, gather, broadcast and reduce for `nn.DataParallel` on virtual GPUs."""

import torch

from . import device as registry
from .issuing import issue_function
from .memory import Layout
from .private import reorder_as, take_tensors
from .tensor import view_as
from .vgpu import stream as use_stream


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
        for chunk in take_tensors(tensors, buffer_size):
            copies.extend(_unpack(_pack(chunk).to(where), chunk))
        outputs.append(list(reorder_as(copies, tensors)))
    return outputs


def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    """Return the sums over devices of each tensor, on `destination`; `inputs[k]` are device k's.

    The other devices send buffers of `buffer_size` bytes; what is on `destination` stays there.
    """
    where = registry.find(destination).torch_device
    (home,) = [tensors for tensors in inputs if tensors[0].device == where]
    others = [tensors for tensors in inputs if tensors is not home]
    sums = []
    takers = [take_tensors(tensors, buffer_size) for tensors in (home, *others)]
    for chunk, *sent in zip(*takers, strict=True):
        flats = [_pack(other).to(where) for other in sent]
        sums.extend(_add_packed(chunk, flats))
    return tuple(reorder_as(sums, home))


# One kernel for all tensors of a buffer, as torch has for CUDA: these write one after the other
# what takes an operator for each tensor otherwise.


def _pack(tensors):
    """Return the elements of `tensors` in one vector."""
    first = tensors[0]._cell.layout
    size = (sum(tensor.numel() for tensor in tensors),)
    layout = Layout.contiguous(first.device, first.dtype, size)
    return issue_function("pack", _concatenate, tensors, [layout])[0]


def _concatenate(values):
    return [torch.cat([value.reshape(-1) for value in values])]


def _unpack(flat, like):
    """Return views of the vector `flat` with the shapes of the tensors `like`."""
    views, offset = [], 0
    for tensor in like:
        device, size = flat._cell.layout.device, tuple(tensor.shape)
        layout = Layout.contiguous(device, flat.dtype, size, offset)
        views.append(view_as(flat, layout))
        offset += tensor.numel()
    return views


def _add_packed(tensors, flats):
    """Return each of `tensors` plus its part of each vector of `flats`."""
    if not flats:
        return tensors

    count = len(tensors)

    def add(values):
        own, vectors = values[:count], values[count:]
        sums, offset = [], 0
        for value in own:
            part = slice(offset, offset + value.numel())
            total = value.contiguous()
            for vector in vectors:
                total = total + vector[part].view(value.shape)
            sums.append(total)
            offset = part.stop
        return sums

    layouts = [Layout.contiguous(t._cell.layout.device, t.dtype, tuple(t.shape)) for t in tensors]
    return issue_function("add", add, [*tensors, *flats], layouts)
