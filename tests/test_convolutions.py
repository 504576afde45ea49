"""Convolutions: their layouts and values, and the time that their layout and size take."""

import math

import pytest
import torch
from modelling import kernels, seconds_of
from torch.nn import functional as F

from d2lpar.virtual import virtual_gpus
from d2lpar.virtual.datasheets import GPUS
from d2lpar.virtual.kernels import Product

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
    """CUDA takes channels_last where either is, see cudnn_conv_suggest_memory_format in torch."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[5] * dims).to(memory_format=of_x)
    weight = torch.randn(6, 4 // options.get("groups", 1), *[3] * dims)
    weight, bias = weight.to(memory_format=of_weight), torch.randn(6)
    expected = convolved(x, weight, bias, **options)
    (device,) = virtual_gpus(1)
    found = convolved(*(each.to(device) for each in (x, weight, bias)), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    last = next((each for each in (of_x, of_weight) if each is not PLAIN), PLAIN)
    assert found[0].is_contiguous(memory_format=last)
    assert found[0].is_contiguous() == (last is PLAIN)


def test_what_follows_a_convolution_of_channels_last_keeps_the_layout():
    virtual_gpus(1)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)
    )
    net = net.to("vgpu").to(memory_format=LAST)
    x = torch.ones(2, 3, 9, 9, device="vgpu")  # only the weights say it
    y = x
    for layer in net:
        y = layer(y)
        assert y.is_contiguous(memory_format=LAST) and not y.is_contiguous(), layer


# -- time, by what is known of the hardware: bandwidth, and of which units the products are

REACHED = 0.85  # of the bandwidth of the memory, as the model is fitted


def one_kernel(name, program):
    """Return the seconds of the only kernel of this name in a program, and its bytes."""
    with kernels() as found:
        program()
    kernel, *more = [each for each in found if each.name == name]
    assert not more
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
    assert three == pytest.approx(of_products + 2 * 4 * numbers / (0.5 * 900e9), rel=1e-6)
    virtual_gpus(1, model="v100", values=False, host=0.0)
    a, b = (torch.empty(*size, device="vgpu") for size in ((64 * 56 * 56, 256 * 9), (256 * 9, 512)))
    assert seconds_of(lambda: a @ b) == pytest.approx(0.8 * one, rel=1e-6)


def test_with_few_channels_tiles_of_2x2_stay_in_the_kernel():
    """16 products of (256 x 16 x 16, 8) by (8, 32): 2048 tiles of 32 x 32, 26 waves of 80."""
    seconds, _ = of_convolution("v100", (256, 8, 34, 34), (32, 8, 3, 3))
    tile = 2 * 32 * 32 * (8 + 9) / (0.8 * 0.92 * 15.7e12 / 80) / ((32 / 64) / (128 / 160))
    assert seconds == pytest.approx(math.ceil(16 * 2048 / 80) * tile, rel=1e-6)


@pytest.mark.parametrize("side", [5, 7, 8])
def test_winograd_computes_tiles_at_the_edges_whole(side):
    _, kernel = of_convolution("v100", (10, 16, side, side), (24, 16, 3, 3), padding=1)
    four, two = kernel.products[0].ways
    assert four.product == Product(36, 10 * 2 * 2, 24, 16)
    assert two.product == Product(16, 10 * {5: 3, 7: 4, 8: 4}[side] ** 2, 24, 16)
    assert four.num_bytes == 2 * 4 * 36 * (40 * (16 + 24) + 16 * 24) and two.num_bytes == 0


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((512, 256, 3, 3), {"stride": 2}),
        ((512, 256, 3, 3), {"dilation": 2}),
        ((512, 128, 3, 3), {"groups": 2}),
        ((512, 256, 5, 5), {}),
        ((512, 256, 3, 1), {}),
    ],
)
def test_other_convolutions_save_nothing(size, options):
    _, kernel = of_convolution("v100", (64, 256, 58, 58), size, **options)
    assert not kernel.products[0].ways


def test_both_gradients_of_3x3_are_computed_with_fewer_products():
    """cuDNN has no kernel with tiles of 2 x 2 for the gradient of weights."""
    virtual_gpus(1, model="v100", values=False)
    x = torch.empty(2, 4, 9, 9, device="vgpu", requires_grad=True)
    weight = torch.empty(6, 4, 3, 3, device="vgpu", requires_grad=True)
    y = F.conv2d(x, weight)
    kernel = one_kernel("aten.convolution_backward", lambda: y.sum().backward())
    of_input, of_weight = ([way.product for way in each.ways] for each in kernel.products)
    assert of_input == [Product(36, 2 * 2 * 2, 6, 4), Product(16, 2 * 4 * 4, 6, 4)]
    assert of_weight == [Product(36, 6, 4, 2 * 2 * 2)]


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


def test_tensor_cores_take_3x3_as_it_is():
    three, _ = of_convolution("a100", (64, 256, 58, 58), (512, 256, 3, 3), torch.half, LAST)
    one, _ = of_convolution("a100", (64, 256 * 9, 56, 56), (512, 256 * 9, 1, 1), torch.half, LAST)
    assert one == pytest.approx(three, rel=1e-6), "both are bound by their products"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_depthwise_convolution_of_3x3_takes_the_time_of_its_bytes(dtype):
    """torch has a kernel of its own, without tiles that one channel would leave empty."""
    seconds, kernel = of_convolution(
        "v100", (64, 256, 56, 56), (256, 1, 3, 3), dtype=dtype, groups=256, padding=1
    )
    num_bytes = (2 * 64 * 256 * 56 * 56 + 256 * 9) * dtype.itemsize
    assert kernel.num_bytes == num_bytes
    assert seconds == pytest.approx(num_bytes / (0.85 * 900e9), rel=1e-6)


def test_large_weights_of_a_depthwise_convolution_take_a_quarter_of_the_peak():
    seconds, kernel = of_convolution(
        "v100", (64, 256, 56, 56), (256, 1, 13, 13), groups=256, padding=6
    )
    flops = 2 * 64 * 256 * 56 * 56 * 13 * 13
    assert seconds == pytest.approx(flops / (0.25 * 15.7e12), rel=1e-6)
