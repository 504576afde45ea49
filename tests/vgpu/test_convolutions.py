"""Convolutions: their layouts and values, and the time that their layout and size take."""

import math
from functools import partial

import pytest
import torch
from modelling import kernels, seconds_of
from torch import nn
from torch.nn import functional as F

from vgpu import virtual_gpus
from vgpu.modelled.datasheets import GPUS

# -- layouts and values

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
PLAIN = torch.contiguous_format


def convolved(x, weight, bias, **options):
    """Return result and gradients of a convolution of leaves with these values."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    convolution = F.conv3d if x.dim() == 5 else F.conv2d
    out = convolution(*leaves, **options)
    out.backward(torch.ones_like(out).cumsum(1))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("of_x", "of_weight", "dims"),
    [
        (LAST, PLAIN, 2),
        (PLAIN, LAST, 2),
        (LAST, LAST, 2),
        (PLAIN, PLAIN, 2),
        (LAST_3D, PLAIN, 3),
        (PLAIN, LAST_3D, 3),
        (PLAIN, PLAIN, 3),
    ],
)
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2}])
def test_a_convolution_has_the_layout_of_images_or_weights_and_the_values_of_the_cpu(
    of_x, of_weight, dims, options
):
    """CUDA takes channels_last where either is, see cudnn_conv_suggest_memory_format in torch.

    The values are whole numbers, whose sums are exact in any order.
    """
    torch.manual_seed(0)
    shapes = (2, 4, *[5] * dims), (6, 4 // options.get("groups", 1), *[3] * dims), (6,)
    x, weight, bias = (torch.randint(-4, 5, shape).float() for shape in shapes)
    x, weight = x.to(memory_format=of_x), weight.to(memory_format=of_weight)
    expected = convolved(x, weight, bias, **options)
    (device,) = virtual_gpus(1)
    found = convolved(*(each.to(device) for each in (x, weight, bias)), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    last = next((each for each in (of_x, of_weight) if each is not PLAIN), PLAIN)
    assert found[0].is_contiguous(memory_format=last)
    assert found[0].is_contiguous() == (last is PLAIN)


def test_what_follows_a_convolution_of_channels_last_keeps_the_layout():
    virtual_gpus(1)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    net = net.to("vgpu").to(memory_format=LAST)
    y = torch.ones(2, 3, 9, 9, device="vgpu")  # only the weights say it
    for layer in net:
        y = layer(y)
        assert y.is_contiguous(memory_format=LAST) and not y.is_contiguous(), layer


# -- time, by what is known of the hardware: bandwidth, and of which units the products are

REACHED = 0.85  # of the bandwidth of the memory, as the model is fitted


def one_kernel(name, program):
    with kernels() as found:
        program()
    (kernel,) = [each for each in found if each.name == name]
    return kernel


def of_convolution(gpu, x, weight, dtype=torch.float32, layout=PLAIN, **options):
    """Return the seconds of a convolution of tensors of these sizes, and its `Kernel`."""
    virtual_gpus(1, model=gpu, values=False, host=0.0)
    x, weight = (
        torch.empty(size, dtype=dtype, device="vgpu").to(memory_format=layout)
        for size in (x, weight)
    )
    found = one_kernel("aten.convolution", lambda: F.conv2d(x, weight, **options))
    return seconds_of(lambda: F.conv2d(x, weight, **options)), found


def test_3x3_is_computed_with_fewer_products_in_float32():
    """Tiles of 4 x 4 results take 36 products in place of 144: Lavin and Gray 2016.

    On a V100 36 products of (64 x 14 x 14, 256) by (256, 512) run in 177 waves of 80 tiles, each 9
    terms longer than 256; the transformed images, weights and results are written and read once.
    """
    three, by_3 = of_convolution("v100", (64, 256, 58, 58), (512, 256, 3, 3))
    one, by_1 = of_convolution("v100", (64, 256 * 9, 56, 56), (512, 256 * 9, 1, 1))
    assert by_3.products[0].flops == by_1.products[0].flops
    waves = math.ceil(36 * 98 * 4 / 80)
    of_products = waves * 2 * 128 * 128 * (256 + 9) / (0.92 * 15.7e12 / 80)
    numbers = 36 * (64 * 14 * 14 * (256 + 512) + 256 * 512)
    moved = 2 * 4 * numbers / (0.5 * 900e9)
    assert three == pytest.approx(of_products + moved, rel=1e-6)
    waves = math.ceil(1568 * 4 / 80)
    tile = 2 * 128 * 128 * (256 * 9 + 9) / (0.92 * 15.7e12 / 80)
    assert one == pytest.approx(waves * tile / 0.95, rel=1e-6)


def test_with_few_channels_tiles_of_2x2_stay_in_the_kernel():
    """16 products of (256 x 16 x 16, 16) by (16, 32): 2048 tiles of 32 x 32 each."""
    seconds, _ = of_convolution("v100", (256, 16, 34, 34), (32, 16, 3, 3))
    tile = 2 * 32 * 32 * (16 + 9) / (0.7 * 0.92 * 15.7e12 / 80) / ((32 / 64) / (128 / 160))
    assert seconds == pytest.approx(math.ceil(16 * 2048 / 80) * tile, rel=1e-6)


@pytest.mark.parametrize("side", [5, 7, 8])
def test_winograd_computes_tiles_at_the_edges_whole(side):
    _, kernel = of_convolution("v100", (10, 16, side, side), (24, 16, 3, 3), padding=1)
    four, two = kernel.products[0].alternatives
    assert four.product[:4] == (36, 10 * 2 * 2, 24, 16)
    assert two.product[:4] == (16, 10 * {5: 3, 7: 4, 8: 4}[side] ** 2, 24, 16)
    assert four.num_bytes == 2 * 4 * 36 * (40 * (16 + 24) + 16 * 24) and two.num_bytes == 0


def test_other_convolutions_save_nothing():
    for size, options in (
        ((512, 256, 3, 3), {"stride": 2}),
        ((512, 256, 3, 3), {"dilation": 2}),
        ((512, 128, 3, 3), {"groups": 2}),
        ((512, 256, 5, 5), {}),
        ((512, 256, 3, 1), {}),
    ):
        _, kernel = of_convolution("v100", (64, 256, 58, 58), size, **options)
        (product,) = kernel.products  # wide groups are not padded
        assert not product.alternatives and product.together == 1, (size, options)
    for channels, groups in (4, 1), (1, 8):
        x, weight = (torch.empty(*size, 3, 3, device="vgpu") for size in ((2, 8), (8, channels)))
        program = partial(F.conv_transpose2d, x, weight, groups=groups)
        (product,) = one_kernel("aten.convolution", program).products
        assert not product.alternatives and not product.direct


def test_both_gradients_of_3x3_are_computed_with_fewer_products():
    """cuDNN has no kernel with tiles of 2 x 2 for the gradient of weights."""
    virtual_gpus(1, model="v100", values=False)
    x = torch.empty(2, 4, 9, 9, device="vgpu", requires_grad=True)
    weight = torch.empty(6, 4, 3, 3, device="vgpu", requires_grad=True)
    y = F.conv2d(x, weight)
    kernel = one_kernel("aten.convolution_backward", lambda: y.sum().backward())
    assert kernel.channels_first
    of_input, of_weight = (
        [other.product[:4] for other in each.alternatives] for each in kernel.products
    )
    assert of_input == [(36, 2 * 3 * 3, 4, 6), (16, 2 * 5 * 5, 4, 6)]
    assert of_weight == [(36, 6, 4, 2 * 2 * 2)]


def of_gradient(gpu, x, weight, stride, of_weight):
    """Return the seconds of the gradient of images or of weights, for None of both."""
    virtual_gpus(1, model=gpu, values=False, host=0.0)
    sides = [(side - kernel) // stride + 1 for side, kernel in zip(x[2:], weight[2:], strict=True)]
    y, x, weight = (
        torch.empty(*size, device="vgpu") for size in ((x[0], weight[0], *sides), x, weight)
    )
    mask = [not of_weight, of_weight is not False, False]
    rest = [None, [stride] * 2, [0, 0], [1, 1], False, [0, 0], 1, mask]
    return seconds_of(lambda: torch.ops.aten.convolution_backward(y, x, weight, *rest))


def test_each_of_both_gradients_takes_cudnns_least_time():
    one, both = (of_gradient("v100", (1, 8, 4, 4), (8, 8, 2, 2), 1, each) for each in (True, None))
    assert both == pytest.approx(2 * one, rel=1e-6)


def test_sums_of_a_convolution_stay_whole_where_products_are_cut_into_parts():
    """49 x 512 results of 2,048 terms are 32 tiles of 32 x 32, for 80 multiprocessors."""
    seconds, _ = of_convolution("v100", (1, 2048, 7, 7), (512, 2048, 1, 1))
    rate = 0.92 * 15.7e12 / 80
    tile = 2 * 32 * 32 * (2048 + 9) / (0.95 * rate) / ((32 / 64) / (128 / 160))
    assert seconds == pytest.approx(tile, rel=1e-6)
    virtual_gpus(1, model="v100", values=False, host=0.0)
    a, b = (torch.empty(*size, device="vgpu") for size in ((49, 2048), (2048, 512)))
    assert seconds_of(lambda: a @ b) < 0.5 * tile


def test_gradients_of_weights_cut_their_sums_and_are_slow_for_1x1():
    """1280 x 128 results are 10 tiles: with sums in 8 parts all 80 multiprocessors have one.

    A kernel adds the parts, in 3 microseconds. For 1 x 1 weights they reach 0.62 of the rate of
    products.
    """
    rate = 0.92 * 15.7e12 / 80
    terms = 8 * 56 * 56
    tile = 2 * 128 * 128 * (terms / 8 + 9) / rate
    seconds = of_gradient("v100", (8, 128, 56, 56), (1280, 128, 1, 1), 1, of_weight=True)
    assert seconds == pytest.approx(3e-6 + tile / 0.62, rel=1e-6)
    of_2x2 = of_gradient("v100", (8, 32, 57, 57), (1280, 32, 2, 2), 1, of_weight=True)
    assert of_2x2 == pytest.approx(3e-6 + tile / 0.95, rel=1e-6)


def test_gradients_of_the_images_of_a_strided_convolution_are_slow():
    """The product is that of the same images without the pixels that the strides leave out."""
    weight = 1024, 1024, 1, 1
    dense = of_gradient("v100", (64, 1024, 28, 28), weight, 1, of_weight=False)
    strided = of_gradient("v100", (64, 1024, 55, 55), weight, 2, of_weight=False)
    assert strided / dense == pytest.approx(0.95 / 0.68, rel=1e-6)


def test_a_transposed_convolution_is_the_gradient_of_images_and_its_gradient_a_convolution():
    large, small, weight = (64, 256, 56, 56), (64, 512, 28, 28), (512, 256, 2, 2)
    of_images = of_gradient("v100", large, weight, 2, of_weight=False)
    convolution, _ = of_convolution("v100", large, weight, stride=2)
    virtual_gpus(1, model="v100", values=False, host=0.0)
    x, weight, y = (torch.empty(size, device="vgpu") for size in (small, weight, large))
    assert seconds_of(lambda: F.conv_transpose2d(x, weight, stride=2)) == pytest.approx(of_images)
    rest = [None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, [True, False, False]]
    gradient = seconds_of(lambda: torch.ops.aten.convolution_backward(y, x, weight, *rest))
    assert gradient == pytest.approx(convolution)


@pytest.mark.parametrize(
    ("gpu", "dtype", "copied"),
    [
        ("v100", torch.float16, True),
        ("v100", torch.float32, False),  # no tensor cores
        ("a100", torch.float16, True),
        ("a100", torch.bfloat16, True),
        ("a100", torch.float32, True),  # TF32
        ("a100", torch.float64, False),
        ("p100", torch.float16, False),
    ],
)
def test_channels_first_are_copied_twice_for_tensor_cores(gpu, dtype, copied):
    """Images, weights and results are read and written once more before, and once more after."""
    sizes = (64, 256, 58, 58), (512, 256, 3, 3)
    first, kernel = of_convolution(gpu, *sizes, dtype)
    last, same = of_convolution(gpu, *sizes, dtype, LAST)
    numbers = 64 * 256 * 58 * 58 + 512 * 256 * 9 + 64 * 512 * 56 * 56
    assert kernel.num_bytes == same.num_bytes == numbers * dtype.itemsize
    passes = (first - last) / (kernel.num_bytes / (REACHED * GPUS[gpu].bandwidth))
    assert passes == pytest.approx(2 if copied else 0, abs=1e-6)


def test_what_has_one_layout_only_is_not_copied_for_tensor_cores():
    pixel, channel = ((2, 8, 5, 5), (8, 8, 1, 1)), ((2, 1, 5, 5), (8, 1, 3, 3))
    cases = (pixel, {}, False), (pixel, {"stride": 2}, True), (pixel, {"padding": 1}, True)
    for sizes, options, copied in (*cases, (channel, {}, False)):
        _, kernel = of_convolution("v100", *sizes, torch.half, **options)
        assert kernel.channels_first == copied


def test_tensor_cores_take_3x3_as_it_is():
    three, _ = of_convolution("a100", (64, 256, 58, 58), (512, 256, 3, 3), torch.half, LAST)
    one, _ = of_convolution("a100", (64, 256 * 9, 56, 56), (512, 256 * 9, 1, 1), torch.half, LAST)
    assert one == pytest.approx(three, rel=1e-6), "both are bound by their products"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_depthwise_convolution_of_3x3_takes_the_time_of_its_bytes(dtype):
    """torch has a kernel of its own, without tiles that one channel would leave empty."""
    sizes = (64, 256, 56, 56), (256, 1, 3, 3)
    seconds, kernel = of_convolution("v100", *sizes, dtype, groups=256, padding=1)
    num_bytes = (2 * 64 * 256 * 56 * 56 + 256 * 9) * dtype.itemsize
    assert kernel.num_bytes == num_bytes
    assert seconds == pytest.approx(num_bytes / (0.85 * 900e9), rel=1e-6)


def test_large_weights_of_a_depthwise_convolution_take_a_quarter_of_the_peak():
    sizes = (64, 256, 56, 56), (256, 1, 13, 13)
    seconds, _ = of_convolution("v100", *sizes, groups=256, padding=6)
    flops = 2 * 64 * 256 * 56 * 56 * 13 * 13
    assert seconds == pytest.approx(flops / (0.25 * 15.7e12), rel=1e-6)
