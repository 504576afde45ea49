"""Matrix products of an operator; those of convolutions are in `convolutions.py`."""

from functools import partial
from math import prod
from typing import NamedTuple

from vgpu.tensors.cells import cells_in


class Product(NamedTuple):
    """Matrix products: `batch` times (m, k) by (k, n)."""

    batch: int
    m: int
    n: int
    k: int
    direct: bool = False  # computed one by one, without tiles, as in a depthwise convolution
    # for each of the m x n scores of fused attention, which stay on the processor
    exponentials: float = 0.0
    # narrow groups of a convolution in one product, padded by zeros, which are no FLOPs
    together: int = 1
    # whether rows can be read 16 bytes at a time; ignored outside tensor cores
    aligned: bool = True
    # whether sums are not split, as in cuDNN's convolutions and gradients of images; cuBLAS and
    # gradients of weights split long sums. Ignored on tensor cores, as the next.
    whole: bool = False
    reached: float = 1.0  # fraction of cuBLAS's rate that the kernel reaches
    alternatives: tuple = ()  # cuDNN's other algorithms, `Alternative`s

    @property
    def flops(self):
        """Floating-point operations; a multiplication and an addition are two."""
        return 2 * self.batch * self.m * self.n * self.k // self.together


class Alternative(NamedTuple):
    """An alternative to a product: another `Product`, and extra bytes written and read."""

    product: Product
    num_bytes: int


def _mm(args, out):
    a, b = sizes(args[:2])
    aligned = _are_aligned(args[:2], out)
    return [Product(prod(a[:-2]), a[-2], b[-1], a[-1], aligned=aligned)]


def _are_aligned(matrices, out):
    """Return whether the strides of matrices are multiples of 16 bytes."""
    layouts = [cell.layout for cell in cells_in((*matrices, out))]
    return all(
        layout.stride[i] * layout.dtype.itemsize % 16 == 0
        for layout in layouts
        for i, size in enumerate(layout.size)
        if size > 1 and layout.stride[i] > 1
    )


def _attention(args, out):
    """Return the products of fused multi-head attention, torch's kernel without gradients."""
    (batch, length, width), heads = args[0].layout.size, args[4]
    return _self_attention(batch, length, width, heads)


def _fused_attention(args, out, causal):
    """Return the products of a fused `scaled_dot_product_attention`: scores, then values.

    `causal` is the position of the argument `is_causal`. A causal kernel skips future keys, about
    half of them for each query.
    """
    (batch, heads, length, width), (*_, size, _), (*_, of_value) = sizes(args[:3])
    if len(args) > causal and args[causal]:  # torch omits False, the default
        size = max(size // 2, 1)
    return [Product(batch * heads, length, size, width + of_value, exponentials=1.0)]


def _fused_attention_backward(args, out):
    """Return the products of its backward: the scores again, then the gradients.

    Further work on each score counts as 4 exponentials, fitted to FlashAttention-2 on an A100 with
    heads of 64 and of 128, https://arxiv.org/abs/2307.08691.
    """
    (product,) = _fused_attention(args[1:], out, 10)
    of_value = args[3].layout.size[-1]
    width = product.k - of_value
    return [product._replace(k=3 * width + 2 * of_value, exponentials=4.0)]


def _encoder_layer(args, out):
    """Return the products of a fused layer of `nn.TransformerEncoder`."""
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


def sizes(cells):
    return [cell.layout.size for cell in cells]


# Name of an operator -> function(arguments, result) that returns its products
PRODUCTS = {
    "mm": _mm,
    "bmm": _mm,
    "_int_mm": _mm,
    **dict.fromkeys(
        ("addmm", "baddbmm", "addbmm", "_addmm_activation"), lambda args, out: _mm(args[1:], out)
    ),
    "_native_multi_head_attention": _attention,
    "_scaled_dot_product_flash_attention": partial(_fused_attention, causal=4),
    "_scaled_dot_product_flash_attention_backward": _fused_attention_backward,
    "_scaled_dot_product_efficient_attention": partial(_fused_attention, causal=6),
    "_scaled_dot_product_efficient_attention_backward": _fused_attention_backward,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
