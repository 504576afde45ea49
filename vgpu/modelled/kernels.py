"""Bytes and matrix products of a kernel, from the layouts of its arguments and results."""

import re
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from vgpu.modelled.convolutions import (
    convolution,
    convolution_backward,
    is_channels_first,
    is_plain_product,
)
from vgpu.modelled.products import PRODUCTS
from vgpu.tensors.cells import ONLY_WRITTEN, cells_in


class Kernel(NamedTuple):
    """The work of an operator on a device."""

    name: str  # the operator without overload, such as "aten.mm"
    # its `Product`s; a convolution counts as a matrix product. None for an operator with possible
    # products that the model does not know
    products: tuple | None
    num_bytes: int  # that it reads and writes
    dtype: torch.dtype  # of its first tensor
    # whether it is a convolution of (N, C, H, W), a layout that tensor cores do not support
    channels_first: bool = False
    # (number of rows or channels, elements of each, number of passes) of a kernel with one block of
    # threads for each row or channel; or None
    blocks: tuple | None = None
    # number of elements of an elementwise operation whose tensors have different layouts, or are
    # broadcast; 0 for others
    strided: int = 0


# Operators that read only as many elements of their first argument as they write.
LOOKUPS = {"embedding", "index", "index_select", "gather"}
# Operators that write only as many elements of their first argument as they read of the others.
PARTLY_WRITTEN = set(
    "index_add_ index_copy_ index_fill_ index_put_ _index_put_impl_ scatter_ scatter_add_".split()
)
# Number of passes over the input: statistics first, then their use.
READS = {"native_batch_norm": 2, "_native_batch_norm_legit": 2, "native_batch_norm_backward": 2}
# The same for a softmax along more than PERSISTENT elements, see dispatch_softmax_forward in
# aten/src/ATen/native/cuda/PersistentSoftmax.cuh. Shorter rows stay in registers.
READS_OF_LONG_ROWS = {
    "_softmax": 2,
    "_log_softmax": 2,
    "_softmax_backward_data": 1.5,  # one of two inputs for the sum, then both
    "_log_softmax_backward_data": 1.5,
}
PERSISTENT = 1024
# Additional reads and writes, in sizes of the result: masked_fill fills a copy, and the gradient of
# softmax begins with a product of its arguments, see softmax_backward_cuda_out in
# aten/src/ATen/native/cuda/SoftMax.cu.
EXTRA_TRAFFIC = {"masked_fill": 2, "_softmax_backward_data": 3}
# Bytes read for each element whose neighbours in memory are not its neighbours in the result.
# Memory is read in sectors of 32 bytes; caches keep some of them (transposed copies on an H100).
TRANSPOSED = 20
# The most frequent elementwise operators without torch's tag
UNTAGGED = {"copy_", "_to_copy", "masked_fill_"}


_PRODUCTS = {**PRODUCTS, "convolution": convolution, "convolution_backward": convolution_backward}


def kernel_of(op):
    """Return the `Kernel` of an op of kind "kernel" that has not run."""
    name, args, out = op.name, op.args, op.out
    if op.plan is None:
        written = [0] if name == "aten.copy_" else []
    else:
        written = [position for position, _ in op.plan.operator.written]
    packet = name.rpartition(".")[2]
    inputs, outputs = _each([*args, *(op.kwargs or {}).values()]), _each([out])
    num_written = sum(map(_size, outputs))
    num_read = sum(map(_size, inputs))
    if packet in LOOKUPS:
        num_read += min(0, num_written - _size(args[0].layout))
    num_read *= READS.get(packet, 1)
    if packet in READS_OF_LONG_ROWS and _row(packet, args) > PERSISTENT:
        num_read *= READS_OF_LONG_ROWS[packet]
    if packet in PARTLY_WRITTEN:
        num_read -= _size(args[0].layout)
        num_written = num_read
    elif packet not in ONLY_WRITTEN:
        for position in written:
            num_written += sum(map(_size, _each(args[position : position + 1])))
    layouts = [*inputs, *outputs]
    if packet == "convolution_backward":
        num_read += _read_again(args)
    num_read += EXTRA_TRAFFIC.get(packet, 0) * sum(map(_size, outputs))
    strided = 0
    results = outputs or _each(args[position : position + 1] for position in written)
    if results and _is_elementwise(name):
        strided, more = _strided(results[0], inputs)
        num_read += more
    if packet in _PRODUCTS:
        products = tuple(_PRODUCTS[packet](args, out))
    else:
        products = None if may_do_products(name) else ()
    return Kernel(
        name,
        products,
        num_read + num_written,
        layouts[0].dtype if layouts else torch.float32,
        "convolution" in packet
        and bool(layouts)
        and is_channels_first(layouts[0])
        and not any(product.direct for product in products)
        and not is_plain_product(packet, args),
        _blocks(packet, args),
        strided,
    )


@cache
def _is_elementwise(name):
    namespace, _, packet = name.rpartition(".")
    if namespace != "aten":
        return False
    return packet in UNTAGGED or torch.Tag.pointwise in _tags(namespace, packet)


def _strided(result, inputs):
    """Return the number of strided elements of an elementwise operation, and extra bytes read.

    Takes the layouts of its result and its arguments; an argument that is larger than the result,
    or has more dimensions, is that of a reduction.
    """
    elements = num_bytes = 0
    steps = _steps(result, result)
    for layout in inputs:
        may_be_broadcast = len(layout.size) <= len(result.size)
        if not (may_be_broadcast and 1 < prod(layout.size) <= prod(result.size)):
            continue
        its_steps = _steps(layout, result)
        if its_steps != steps:
            elements, width = prod(result.size), layout.dtype.itemsize
            step = its_steps[steps.index(1)] if 1 in steps else 1
            num_bytes += _size(layout) // width * max(0, min(TRANSPOSED, width * step) - width)
    return elements, num_bytes


def _steps(layout, result):
    """Return the strides of a tensor along the dimensions of `result`, 0 for broadcast ones."""
    dimensions = len(result.size)
    size = (1,) * (dimensions - len(layout.size)) + tuple(layout.size)
    stride = (0,) * (dimensions - len(layout.stride)) + tuple(layout.stride)
    return [stride[i] if size[i] > 1 else 0 for i in range(dimensions) if result.size[i] > 1]


def _row(packet, args):
    """Return the length of a row of a softmax, or of its backward."""
    return args[0].layout.size[args[2 if packet.endswith("backward_data") else 1]]


def _read_again(args):
    """Return the bytes of repeated reads by the gradient of depthwise weights.

    torch's kernel has a block of threads for each weight, which reads all images and gradients of
    its channel: aten/src/ATen/native/cuda/DepthwiseConv2d.cu, conv_depthwise2d_grad_weight_kernel.
    """
    gradient, x, weight = (cell.layout for cell in args[:3])
    if args[9] == 1 or weight.size[1] != 1 or not args[10][1] or not is_channels_first(x):
        return 0
    return (prod(weight.size[2:]) - 1) * (_size(gradient) + _size(x))


def _blocks(packet, args):
    """Return the `blocks` of a kernel that sums over rows or channels, or None.

    torch's own batch normalization, used for bfloat16, which cuDNN's does not support, has a block
    for each channel.
    """
    backward = packet.endswith("backward")
    if packet in ("native_layer_norm", "native_layer_norm_backward"):
        width = prod(args[2 if backward else 1])
        return prod(args[0].layout.size) // width, width, 3 if backward else 1
    if packet in ("native_batch_norm", "native_batch_norm_backward"):
        x, training = (args[1].layout, args[7]) if backward else (args[0].layout, args[5])
        if x.dtype == torch.bfloat16 and training:
            return x.size[1], prod(x.size) // x.size[1], 2 if backward else 1
    return None


# Operators of torch with matrix products, which use each input element many times. Operators such
# as mv and dot use it once, and take the time of their bytes.
_DO_PRODUCTS = re.compile(
    "mm(_|$)|matmul|attention|conv(?!ert)|(^|_)linear(_backward|$)|trilinear$|rnn|lstm_mps|_lstm$|"
    "_gru$|linalg_(?!_powsum|vector_norm|cross|check)|fft_[cr]2|[cp]dist|euclidean|cholesky|solve|geqrf|"
    "ormqr"
)


@cache
def may_do_products(name):
    """Return whether an operator may have products: by its name in torch, by its tags elsewhere."""
    namespace, _, packet = name.rpartition(".")
    if namespace in ("", "aten", "prims", "fsdp"):
        return _DO_PRODUCTS.search(packet) is not None
    return not _tags(namespace, packet) & {torch.Tag.pointwise, torch.Tag.reduction}


def _tags(namespace, packet):
    operator = getattr(getattr(torch.ops, namespace), packet)
    return {tag for overload in operator.overloads() for tag in getattr(operator, overload).tags}


def _each(values):
    return [cell.layout for cell in dict.fromkeys(cells_in(values))]


def _size(layout):
    """Return the bytes of the elements; repeated elements (stride 0) count once."""
    return min(prod(layout.size) * layout.dtype.itemsize, layout.num_bytes)
