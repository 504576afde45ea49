"""The work of a kernel: the bytes that it reads and writes, and the products in it.

A `Kernel` is known from the layouts of its arguments and results alone, and so before it runs.
"""

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
    """What an operator does on a device.

    Attributes:
        name: the operator without overload, "aten.mm" for example.
        products: the `Product`s in it; a convolution counts as the product that computes it. None
            where it may do products that are not known here.
        num_bytes: bytes that it reads and writes.
        dtype: the dtype of its first tensor.
        channels_first: whether it is a convolution of tensors in the layout (N, C, H, W), which
            tensor cores do not take.
        blocks: the number of rows, or channels, that a block of threads each passes over, how many
            elements each has, and how often; or None.
        strided: the number of elements of an elementwise operation whose tensors lie differently in
            memory, or are broadcast; 0 for others.
    """

    name: str
    products: tuple | None
    num_bytes: int
    dtype: torch.dtype
    channels_first: bool = False
    blocks: tuple | None = None
    strided: int = 0


# Operators that read as many elements of their first argument as they write, not all of it.
LOOKUPS = {"embedding", "index", "index_select", "gather"}
# Operators that write as many elements of their first argument as they read of the others.
PARTLY_WRITTEN = set(
    "index_add_ index_copy_ index_fill_ index_put_ _index_put_impl_ scatter_ scatter_add_".split()
)
# How often a kernel passes over what it reads: statistics first, then their use.
READS = {"native_batch_norm": 2, "_native_batch_norm_legit": 2, "native_batch_norm_backward": 2}
# The same of a softmax along more than PERSISTENT numbers, see dispatch_softmax_forward in
# aten/src/ATen/native/cuda/PersistentSoftmax.cuh. Shorter rows stay in the registers.
READS_OF_LONG_ROWS = {
    "_softmax": 2,
    "_log_softmax": 2,
    "_softmax_backward_data": 1.5,  # one of the two for the sum, then both
    "_log_softmax_backward_data": 1.5,
}
PERSISTENT = 1024
# How often an operator reads or writes as much as its result besides: masked_fill fills a copy, and
# the gradient of softmax begins with a product of its arguments, see softmax_backward_cuda_out in
# aten/src/ATen/native/cuda/SoftMax.cu.
MOVED_BESIDES = {"masked_fill": 2, "_softmax_backward_data": 3}
# Bytes read for a number whose neighbours in memory are not its neighbours in the result. Memory is
# read in sectors of 32 bytes; the caches keep some of them (transposed copies on an H100).
TRANSPOSED = 20
# The most frequent elementwise operators that torch does not tag so
UNTAGGED = {"copy_", "_to_copy", "masked_fill_"}


_PRODUCTS = {
    **PRODUCTS,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
}


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
    num_read += MOVED_BESIDES.get(packet, 0) * sum(map(_size, outputs))
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
    """Return whether each number of a result depends on those at its place in the arguments."""
    namespace, _, packet = name.rpartition(".")
    if namespace != "aten":
        return False
    return packet in UNTAGGED or torch.Tag.pointwise in _tags(namespace, packet)


def _strided(result, inputs):
    """Return how many elements of an elementwise operation are strided, and bytes read besides.

    An argument that is larger than the result, or has more dimensions, is that of a reduction.

    Args:
        result: the layout of its result.
        inputs: those of its arguments.
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
    """Return the strides of a tensor along the dimensions of `result`, 0 where it is broadcast."""
    dimensions = len(result.size)
    size = (1,) * (dimensions - len(layout.size)) + tuple(layout.size)
    stride = (0,) * (dimensions - len(layout.stride)) + tuple(layout.stride)
    return [stride[i] if size[i] > 1 else 0 for i in range(dimensions) if result.size[i] > 1]


def _row(packet, args):
    """Return how many numbers a softmax, or its backward, goes along."""
    return args[0].layout.size[args[2 if packet.endswith("backward_data") else 1]]


def _read_again(args):
    """Return the bytes that the gradient of depthwise weights reads more than once.

    torch's kernel has a block of threads for each weight, which reads the images and gradients of
    its channel: aten/src/ATen/native/cuda/DepthwiseConv2d.cu, conv_depthwise2d_grad_weight_kernel.
    """
    gradient, x, weight = (cell.layout for cell in args[:3])
    if args[9] == 1 or weight.size[1] != 1 or not args[10][1] or not is_channels_first(x):
        return 0
    return (prod(weight.size[2:]) - 1) * (_size(gradient) + _size(x))


def _blocks(packet, args):
    """Return the `blocks` of a kernel that sums over rows or channels, or None.

    Layer normalization has a block of threads for each row. So has torch's own batch normalization
    for each channel, which it uses where cuDNN's does not take the dtype: for bfloat16.
    """
    if packet == "native_layer_norm":
        width = prod(args[1])
        return prod(args[0].layout.size) // width, width, 1
    if packet == "native_layer_norm_backward":
        width = prod(args[2])
        return prod(args[0].layout.size) // width, width, 3
    if packet in ("native_batch_norm", "native_batch_norm_backward"):
        backward = packet.endswith("backward")
        x, training = (args[1].layout, args[7]) if backward else (args[0].layout, args[5])
        if x.dtype == torch.bfloat16 and training:
            return x.size[1], prod(x.size) // x.size[1], 2 if backward else 1
    return None


# Operators of torch that do products: each number that they read is used many times. Those that use
# it once, such as mv and dot, take the time of their bytes.
_DO_PRODUCTS = re.compile(
    "mm(_|$)|matmul|attention|conv(?!ert)|(^|_)linear(_backward|$)|trilinear$|rnn|lstm_mps|_lstm$|"
    "_gru$|linalg_(?!_powsum|vector_norm|cross|check)|fft_[cr]2|[cp]dist|euclidean|cholesky|solve|geqrf|"
    "ormqr"
)


@cache
def may_do_products(name):
    """Return whether an operator may do products: by its name in torch, by its tags elsewhere."""
    namespace, _, packet = name.rpartition(".")
    if namespace in ("", "aten", "prims", "fsdp"):
        return _DO_PRODUCTS.search(packet) is not None
    return not _tags(namespace, packet) & {torch.Tag.pointwise, torch.Tag.reduction}


def _tags(namespace, packet):
    """Return the tags of all overloads of an operator, a set."""
    operator = getattr(getattr(torch.ops, namespace), packet)
    return {tag for overload in operator.overloads() for tag in getattr(operator, overload).tags}


def _each(values):
    return [cell.layout for cell in dict.fromkeys(cells_in(values))]


def _size(layout):
    """Return the bytes of the elements; an element that is repeated (stride 0) counts once."""
    return min(prod(layout.size) * layout.dtype.itemsize, layout.num_bytes)
