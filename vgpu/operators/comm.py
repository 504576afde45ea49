"""Scatter, gather, broadcast and reduce for `nn.DataParallel` on virtual GPUs."""

from contextlib import nullcontext

import torch

from vgpu.operators.issuing import issue_function
from vgpu.private.tensors import reorder_as, take_tensors
from vgpu.runtime import registry
from vgpu.tensors.cells import TensorLayout


def scatter(tensor, devices, chunk_sizes=None, dim=0, streams=None):
    """Copy a piece of a tensor to each device, see `torch.cuda.comm.scatter`; return a tuple.

    `chunk_sizes` are those of `tensor.chunk` by default, maybe fewer; `streams` has the stream of
    each copy, or None.
    """
    if chunk_sizes is None:
        chunks = tensor.chunk(len(devices), dim)
    else:
        chunks = tensor.split(list(chunk_sizes), dim)
    streams = streams or [None] * len(devices)
    pieces = []
    for chunk, index, stream in zip(chunks, devices, streams, strict=False):
        with stream or nullcontext():
            where = registry.find(index).torch_device
            pieces.append(chunk.to(where, non_blocking=True))
    return tuple(pieces)


def gather(tensors, dim=0, destination=None):
    """Copy tensors to one device and concatenate them along `dim`, see `torch.cuda.comm.gather`.

    `destination` is None for the current device, -1 or "cpu" for the CPU.
    """
    if str(destination) in ("-1", "cpu"):
        where = torch.device("cpu")
    else:
        where = registry.find(destination).torch_device
    copies = [tensor.to(where, non_blocking=where.type != "cpu") for tensor in tensors]
    return torch.cat(copies, dim)


def broadcast(tensor, devices=None, *, out=None):
    """Copy a tensor to several devices, or into the tensors `out`; return a tuple of the copies.

    On its own device the copy is `tensor` itself. RuntimeError if both are given, or neither.
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
    """Copy tensors on the first of `devices` to the others, many tensors in one buffer.

    A tensor of more than `buffer_size` bytes has its own buffer. Returns a list of tensors for each
    device; for the first, `tensors` themselves.
    """
    outputs = [list(tensors)]
    for index in devices[1:]:
        where = registry.find(index).torch_device
        copies = []
        for chunk in take_tensors(tensors, buffer_size):
            parts = pack(chunk).to(where).split([tensor.numel() for tensor in chunk])
            # `data`, because versions of copies must not be counted together
            copies.extend(part.view_as(like).data for part, like in zip(parts, chunk, strict=True))
        outputs.append(list(reorder_as(copies, tensors)))
    return outputs


def reduce_add_coalesced(inputs, destination=None, buffer_size=10485760):
    """Sum tensors over devices, a list on each, of which one is `destination`; return a tuple.

    `destination` is by default the current device. A device sends many tensors in one buffer of at
    most `buffer_size` bytes; a larger tensor has its own.
    """
    where = registry.find(destination).torch_device
    (home,) = [tensors for tensors in inputs if tensors[0].device == where]
    others = [tensors for tensors in inputs if tensors is not home]
    sums = []
    takers = [take_tensors(tensors, buffer_size) for tensors in (home, *others)]
    for chunk, *sent in zip(*takers, strict=True):
        flats = [pack(other).to(where) for other in sent]
        sums.extend(_add_packed(chunk, flats))
    return tuple(reorder_as(sums, home))


# As torch on CUDA, these run one kernel for all tensors of a buffer, not one for each tensor.


def pack(tensors):
    """Return a vector of the elements of all `tensors`."""
    first = tensors[0]._cell.layout
    size = (sum(tensor.numel() for tensor in tensors),)
    layout = TensorLayout.contiguous(first.device, first.dtype, size)

    def concatenate(values):
        return [torch.cat([value.reshape(-1) for value in values])]

    return issue_function("pack", concatenate, tensors, [layout])[0]


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

    layouts = [
        TensorLayout.contiguous(t._cell.layout.device, t.dtype, tuple(t.shape)) for t in tensors
    ]
    return issue_function("add", add, [*tensors, *flats], layouts)
