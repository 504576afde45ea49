"""cuDNN's algorithms for convolutions, as matrix products."""

from math import ceil, gcd, prod

from vgpu.modelled.products import Alternative, Product, sizes

LEAST_WIDTH = 32  # of a tile's results
# Fraction of cuBLAS's rate that cuDNN's kernels reach outside tensor cores, from the "seen" half of
# benchmarks/bench_kernels.py; for Winograd's kernels also from "seen" rows of bench_model.py.
CONVOLUTION_REACHED = 0.95
STRIDED_IMAGES_REACHED = 0.68  # gradients of the images of a strided convolution
POINTWISE_WEIGHTS_REACHED = 0.62  # gradients of 1 x 1 weights
FUSED_WINOGRAD_REACHED = 0.7  # kernels that include Winograd's transforms


def convolution(args, out):
    """Return a list of one `Product`, that of a convolution, with its `alternatives`."""
    x, weight, transposed, groups = *sizes(args[:2]), args[6], args[8]
    if out is None:  # invalid arguments, which the kernel will report
        return []
    product = _convolved(x, weight, out.layout.size, transposed, groups)
    if transposed:
        product = _of_images(product, args[3])
    if _suits_winograd(weight, *args[3:9]):
        product = product._replace(alternatives=_winograd(out.layout.size, weight, (4, 2)))
    return [product]


def convolution_backward(args, out):
    """Return the products of the requested gradients, of images and of weights."""
    gradient, x, weight = sizes(args[:3])
    transposed, groups, (to_input, to_weight, _) = args[7], args[9], args[10]
    product = _convolved(x, weight, gradient, transposed, groups)
    m, n, k = product[1:4]
    of_input = product if transposed else _of_images(product, args[4])
    of_weight = product._replace(m=n, n=k, k=m, whole=False)
    if prod(weight[2:]) == 1:
        of_weight = of_weight._replace(reached=POINTWISE_WEIGHTS_REACHED)
    if _suits_winograd(weight, *args[4:10]):
        of_input = of_input._replace(alternatives=_winograd(x, (weight[1], weight[0]), (4, 2)))
        alternatives = [
            Alternative(product._replace(m=product.n, n=product.k, k=product.m), num_bytes)
            for product, num_bytes in _winograd(gradient, weight, (4,))
        ]
        of_weight = of_weight._replace(alternatives=tuple(alternatives))
    return [product for product, asked in ((of_input, to_input), (of_weight, to_weight)) if asked]


def _of_images(product, stride):
    """Return the product of the gradient of images, or of a transposed convolution."""
    product = product._replace(n=product.k, k=product.n)
    return product._replace(reached=STRIDED_IMAGES_REACHED) if max(stride) > 1 else product


def _suits_winograd(weight, stride, padding, dilation, transposed, output_padding, groups):
    """Return whether Winograd's algorithm applies: 3 x 3, without stride, dilation or groups."""
    is_dense = set(stride) == set(dilation) == {1} and groups == 1 and not transposed
    return is_dense and tuple(weight[2:]) == (3, 3)


def _winograd(result, weight, sides):
    """Return the `Alternative`s of Winograd's algorithm for a convolution with 3 x 3 weights.

    Each tile of s x s results takes (s + 2)^2 products instead of 9 s^2; tiles at the edges are
    computed completely. For s = 4 cuDNN transforms images, weights and results in separate kernels,
    through memory; for s = 2 in the multiplying kernel.
    Source: Lavin and Gray 2016, https://arxiv.org/abs/1509.09308.

    Args:
        result: size of the results, (N, C, H, W).
        weight: numbers of output and input channels.
        sides: side lengths s of the tiles.
    """
    n, k = weight[:2]
    alternatives = []
    for side in sides:
        points = (side + 2) ** 2
        tiles = result[0] * ceil(result[2] / side) * ceil(result[3] / side)
        product, moved = Product(points, tiles, n, k), 0
        if side == 4:
            moved = 8 * points * (tiles * (n + k) + n * k)  # float32, twice
        else:
            product = product._replace(whole=True, reached=FUSED_WINOGRAD_REACHED)
        alternatives.append(Alternative(product, moved))
    return tuple(alternatives)


def _convolved(x, weight, result, transposed, groups):
    """Return the product of a convolution: positions by output channels by inputs of each.

    A transposed convolution is the gradient of one whose input is its result. A depthwise one has
    its own kernel in torch, without tiles: see `is_depthwise` in
    aten/src/ATen/native/Convolution.cpp.
    """
    where = x if transposed else result
    direct = not transposed and groups > 1 and weight[1] == 1
    m, n, k = where[0] * prod(where[2:]), weight[0] // groups, prod(weight[1:])
    together = 1 if direct else gcd(groups, max(1, LEAST_WIDTH // n))
    n, k = n * together, k * together
    product = Product(groups // together, m, n, k, direct=direct, together=together)
    return product._replace(whole=True, reached=CONVOLUTION_REACHED)


def is_channels_first(layout):
    """Return whether images (N, C, H, W) are stored channel by channel."""
    size, stride = layout.size, layout.stride
    return len(size) == 4 and size[1] > 1 and stride[1] != 1


def is_plain_product(packet, args):
    """Return whether a convolution of images (N, C, H, W) is a matrix product without copies."""
    if packet not in ("convolution", "convolution_backward"):
        return False
    weight, _, stride, padding = args[1:5] if packet == "convolution" else args[2:6]
    return prod(weight.layout.size[2:]) == 1 and set(stride) == {1} and set(padding) == {0}
