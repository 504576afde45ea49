"""The work of a kernel: the products in it, and the bytes that it reads and writes.

A `Kernel` is known from the layouts of its arguments and results alone, and so before it runs.
"""

import re
from functools import cache, partial
from math import ceil, gcd, prod
from typing import NamedTuple

import torch

from vgpu.tensors.cells import ONLY_WRITTEN, cells_in


class Product(NamedTuple):
    """Products of matrices: `batch` times (m, k) by (k, n).

    Those of a depthwise convolution are `direct`: made one after the other, without tiles. Those of
    fused attention take `exponentials` for each of the m x n scores, which never leave the
    processor. Narrow groups of a convolution are computed `together`, beside zeros, which are no
    FLOPs.

    On tensor cores it counts whether the matrices are `aligned`: their rows can be read 16 bytes at
    a time. Elsewhere three more count. The sums of cuDNN's convolutions and gradients of images
    stay `whole`, where cuBLAS and gradients of weights cut long sums into parts. `reached` is the
    share of cuBLAS's rate that the kernel reaches. `ways` are others in which cuDNN computes the
    same.
    """

    batch: int
    m: int
    n: int
    k: int
    direct: bool = False
    exponentials: float = 0.0
    together: int = 1
    aligned: bool = True
    whole: bool = False
    reached: float = 1.0
    ways: tuple = ()

    @property
    def flops(self):
        """Floating-point operations; a multiplication and an addition are two."""
        return 2 * self.batch * self.m * self.n * self.k // self.together


class Way(NamedTuple):
    """Another way to compute a product: another `Product`, and bytes written and read besides."""

    product: Product
    num_bytes: int


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
LEAST_WIDTH = 32  # of the results of a tile
# The share of cuBLAS's rate that cuDNN's kernels reach outside tensor cores, from the seen halves
# of benchmarks/bench_kernels.py; that of Winograd's kernels also from seen rows of bench_model.py.
CONVOLUTION_REACHED = 0.95
STRIDED_IMAGES_REACHED = 0.68  # gradients of the images of a strided convolution
POINTWISE_WEIGHTS_REACHED = 0.62  # gradients of 1 x 1 weights
FUSED_WINOGRAD_REACHED = 0.7  # kernels that do Winograd's transforms themselves
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
        and _is_channels_first(layouts[0])
        and not any(product.direct for product in products)
        and not _is_plain_product(packet, args),
        _blocks(packet, args),
        strided,
    )


def _is_channels_first(layout):
    """Return whether images (N, C, H, W) have their channels one after the other in memory."""
    size, stride = layout.size, layout.stride
    return len(size) == 4 and size[1] > 1 and stride[1] != 1


def _is_plain_product(packet, args):
    """Return whether a convolution of images (N, C, H, W) is a product of them as they lie."""
    if packet not in ("convolution", "convolution_backward"):
        return False
    weight, _, stride, padding = args[1:5] if packet == "convolution" else args[2:6]
    return prod(weight.layout.size[2:]) == 1 and set(stride) == {1} and set(padding) == {0}


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
    if args[9] == 1 or weight.size[1] != 1 or not args[10][1] or not _is_channels_first(x):
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


def _mm(args, out):
    """Return the product of two matrices, or of two batches of them."""
    a, b = _sizes(args[:2])
    aligned = _are_aligned(args[:2], out)
    return [Product(prod(a[:-2]), a[-2], b[-1], a[-1], aligned=aligned)]


def _are_aligned(matrices, out):
    """Return whether matrices, and their rows or columns, lie multiples of 16 bytes apart."""
    layouts = [cell.layout for cell in cells_in((*matrices, out))]
    return all(
        layout.stride[i] * layout.dtype.itemsize % 16 == 0
        for layout in layouts
        for i, size in enumerate(layout.size)
        if size > 1 and layout.stride[i] > 1
    )


def _convolution(args, out):
    x, weight, transposed, groups = *_sizes(args[:2]), args[6], args[8]
    if out is None:  # its arguments do not fit, and running it says so
        return []
    product = _convolved(x, weight, out.layout.size, transposed, groups)
    if transposed:
        product = _of_images(product, args[3])
    if _suits_winograd(weight, *args[3:9]):
        product = product._replace(ways=_winograd(out.layout.size, weight, (4, 2)))
    return [product]


def _convolution_backward(args, out):
    gradient, x, weight = _sizes(args[:3])
    transposed, groups, (to_input, to_weight, _) = args[7], args[9], args[10]
    product = _convolved(x, weight, gradient, transposed, groups)
    m, n, k = product[1:4]
    of_input = product if transposed else _of_images(product, args[4])
    of_weight = product._replace(m=n, n=k, k=m, whole=False)
    if prod(weight[2:]) == 1:
        of_weight = of_weight._replace(reached=POINTWISE_WEIGHTS_REACHED)
    if _suits_winograd(weight, *args[4:10]):
        of_input = of_input._replace(ways=_winograd(x, (weight[1], weight[0]), (4, 2)))
        ways = [
            Way(product._replace(m=product.n, n=product.k, k=product.m), num_bytes)
            for product, num_bytes in _winograd(gradient, weight, (4,))
        ]
        of_weight = of_weight._replace(ways=tuple(ways))
    return [product for product, asked in ((of_input, to_input), (of_weight, to_weight)) if asked]


def _of_images(product, stride):
    """Return the product that computes the gradient of the images of a convolution.

    A transposed convolution is one, too.
    """
    product = product._replace(n=product.k, k=product.n)
    return product._replace(reached=STRIDED_IMAGES_REACHED) if max(stride) > 1 else product


def _suits_winograd(weight, stride, padding, dilation, transposed, output_padding, groups):
    """Return whether Winograd's algorithm can compute a convolution: 3 x 3, without steps."""
    is_dense = set(stride) == set(dilation) == {1} and groups == 1 and not transposed
    return is_dense and tuple(weight[2:]) == (3, 3)


def _winograd(result, weight, sides):
    """Return the ways of Winograd's algorithm to compute a convolution with 3 x 3 weights.

    Each tile of s x s results takes (s + 2)^2 products in place of 9 s^2; tiles at the edges are
    computed whole. For s = 4 cuDNN transforms images, weights and results by kernels of their own,
    which write and read them in memory; for s = 2 by the kernel that multiplies.
    Source: Lavin and Gray 2016, https://arxiv.org/abs/1509.09308.

    Args:
        result: the size of its results, (N, C, H, W).
        weight: how many channels they have, and from how many they are computed.
        sides: those of the tiles.
    """
    n, k = weight[:2]
    ways = []
    for side in sides:
        points = (side + 2) ** 2
        tiles = result[0] * ceil(result[2] / side) * ceil(result[3] / side)
        product, moved = Product(points, tiles, n, k), 0
        if side == 4:
            moved = 8 * points * (tiles * (n + k) + n * k)  # float32, twice
        else:
            product = product._replace(whole=True, reached=FUSED_WINOGRAD_REACHED)
        ways.append(Way(product, moved))
    return tuple(ways)


def _convolved(x, weight, result, transposed, groups):
    """Return the product that computes a convolution: positions by outputs by what each reads.

    A transposed convolution is the gradient of one whose input is its result. One with a group for
    each channel has a kernel of its own in torch, without tiles: see `is_depthwise` in
    aten/src/ATen/native/Convolution.cpp.
    """
    where = x if transposed else result
    direct = not transposed and groups > 1 and weight[1] == 1
    m, n, k = where[0] * prod(where[2:]), weight[0] // groups, prod(weight[1:])
    together = 1 if direct else gcd(groups, max(1, LEAST_WIDTH // n))
    n, k = n * together, k * together
    return Product(
        groups // together,
        m,
        n,
        k,
        direct=direct,
        together=together,
        whole=True,
        reached=CONVOLUTION_REACHED,
    )


def _attention(args, out):
    """Return the products of fused multi-head attention, which torch uses without gradients."""
    (batch, length, width), heads = args[0].layout.size, args[4]
    return _self_attention(batch, length, width, heads)


def _fused_attention(args, out, causal):
    """Return the products of `scaled_dot_product_attention` in one kernel: scores, then values.

    Args:
        causal: the place of the argument `is_causal`. Such a kernel skips what lies in the future,
            about half of the keys for each query.
    """
    (batch, heads, length, width), (*_, size, _), (*_, of_value) = _sizes(args[:3])
    if len(args) > causal and args[causal]:  # torch leaves out what is False by default
        size = max(size // 2, 1)
    return [Product(batch * heads, length, size, width + of_value, exponentials=1.0)]


def _fused_attention_backward(args, out):
    """Return the products of its backward: the scores once more, then those of the gradients.

    What is computed of each score besides takes as long as some exponentials: 4 fit what
    FlashAttention-2 reaches on an A100 with heads of 64 and of 128, https://arxiv.org/abs/2307.08691.
    """
    (product,) = _fused_attention(args[1:], out, 10)
    of_value = args[3].layout.size[-1]
    width = product.k - of_value
    return [product._replace(k=3 * width + 2 * of_value, exponentials=4.0)]


def _encoder_layer(args, out):
    """Return the products of a layer of `nn.TransformerEncoder`, fused in the same way."""
    (batch, length, width), heads, hidden = args[0].layout.size, args[2], args[14].layout.size[0]
    tokens = batch * length
    feed_forward = [Product(1, tokens, hidden, width), Product(1, tokens, width, hidden)]
    return _self_attention(batch, length, width, heads) + feed_forward


def _self_attention(batch, length, width, heads):
    each = width // heads
    return [
        Product(1, batch * length, 3 * width, width),
        Product(batch * heads, length, length, each),
        Product(batch * heads, length, each, length),
        Product(1, batch * length, width, width),
    ]


def _sizes(cells):
    return [cell.layout.size for cell in cells]


_PRODUCTS = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": lambda args, out: _mm(args[1:], out),
    "baddbmm": lambda args, out: _mm(args[1:], out),
    "addbmm": lambda args, out: _mm(args[1:], out),
    "_addmm_activation": lambda args, out: _mm(args[1:], out),
    "_int_mm": _mm,
    "_native_multi_head_attention": _attention,
    "_scaled_dot_product_flash_attention": partial(_fused_attention, causal=4),
    "_scaled_dot_product_flash_attention_backward": _fused_attention_backward,
    "_scaled_dot_product_efficient_attention": partial(_fused_attention, causal=6),
    "_scaled_dot_product_efficient_attention_backward": _fused_attention_backward,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
