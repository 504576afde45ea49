"""What kernels have to do: FLOPs as torch counts them, bytes counted by hand."""

import warnings
from functools import partial

import pytest
import torch
from modelling import flops, kernels, seconds_of
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from vgpu import virtual_gpus
from vgpu.modelled import modelled_gpu
from vgpu.modelled.kernels import may_do_products
from vgpu.modelled.products import Product


def both(program, device, *shapes):
    """Return the FLOPs of a program by our count, and by torch's on the CPU."""
    with kernels() as found:
        program(*[torch.ones(shape, device=device) for shape in shapes])
    with FlopCounterMode(display=False) as counter:
        program(*[torch.ones(shape) for shape in shapes])
    return flops(found), counter.get_total_flops()


PRODUCTS = {
    "mm": (torch.mm, (3, 5), (5, 7)),
    "addmm": (torch.addmm, (7,), (3, 5), (5, 7)),
    "addmm, a matrix": (torch.addmm, (3, 7), (3, 5), (5, 7)),
    "bmm": (torch.bmm, (2, 3, 5), (2, 5, 7)),
    "baddbmm": (torch.baddbmm, (2, 3, 7), (2, 3, 5), (2, 5, 7)),
    "matmul": (torch.matmul, (2, 4, 3, 5), (5, 7)),
    "linear": (F.linear, (2, 4, 5), (7, 5), (7,)),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), (2, 3, 5), (2, 7, 5)),
}
CONVOLUTIONS = {
    "1d": (nn.Conv1d(6, 8, 3), (2, 6, 11)),
    "strides": (nn.Conv2d(6, 8, 3, stride=2), (2, 6, 11, 12)),
    "padding": (nn.Conv2d(6, 8, (3, 1), padding=2, bias=False), (2, 6, 11, 12)),
    "dilation": (nn.Conv2d(6, 8, 3, dilation=2), (2, 6, 11, 12)),
    "one image": (nn.Conv2d(6, 8, 3), (6, 11, 12)),
    "3d": (nn.Conv3d(3, 4, 2), (2, 3, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, stride=2), (2, 6, 5, 4)),
    "transposed 1d": (nn.ConvTranspose1d(6, 8, 3, output_padding=1, stride=2), (2, 6, 5)),
    "groups": (nn.Conv2d(6, 8, 3, groups=2), (2, 6, 11, 12)),
    "depthwise": (nn.Conv2d(6, 12, 3, groups=6), (2, 6, 11, 12)),
    "transposed, groups": (nn.ConvTranspose2d(6, 8, 3, groups=2), (2, 6, 5, 4)),
}


@pytest.mark.parametrize("name", [*PRODUCTS, *CONVOLUTIONS])
def test_flops_of_products_and_convolutions_are_those_that_torch_counts(device, name):
    program, *shapes = PRODUCTS.get(name) or CONVOLUTIONS[name]
    if name in CONVOLUTIONS:
        layer = program

        def program(x):
            return layer.to(x.device)(x)

    ours, expected = both(program, device, *shapes)
    assert ours == expected > 0


@pytest.mark.parametrize("mask", [(i, j, k) for i in (0, 1) for j in (0, 1) for k in (0, 1)])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_each_gradient_of_a_convolution_takes_what_the_convolution_does(device, name, mask):
    """torch's count for the weights' gradient leaves groups out, so it is asked without them."""
    layer, shape = CONVOLUTIONS[name]
    if len(shape) < layer.weight.dim():
        shape = (1, *shape)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gradient = torch.ones_like(layer(torch.ones(shape)))
    forward = counter.get_total_flops()
    layout = list(layer.stride), list(layer.padding), list(layer.dilation), layer.transposed
    layout += list(layer.output_padding), layer.groups, list(map(bool, mask))
    bias = [layer.weight.shape[layer.transposed] * (layer.groups if layer.transposed else 1)]

    def backward(gradient, x, weight):
        torch.ops.aten.convolution_backward(gradient, x, weight, bias, *layout)

    ours, torchs = both(backward, device, gradient.shape, shape, layer.weight.shape)
    assert ours == (mask[0] + mask[1]) * forward
    if layer.groups == 1:
        assert ours == torchs


def only(program, *arguments):
    with kernels() as found:
        program(*arguments)
    (kernel,) = found
    return kernel


FLOATS = 4  # bytes of one


@pytest.mark.parametrize(
    ("program", "shapes", "floats"),
    [
        (torch.add, [(3, 5), (3, 5)], 3 * 15),
        (lambda x, y: x + y, [(3, 5), (5,)], 15 + 5 + 15),
        (lambda x: x + x, [(3, 5)], 2 * 15),  # one tensor is read once
        (lambda x, y: x.add_(y), [(3, 5), (3, 5)], 3 * 15),
        (lambda x, y: x.copy_(y), [(3, 5), (3, 5)], 2 * 15),
        (lambda x: x.zero_(), [(3, 5)], 15),
        (lambda x: x.fill_(2), [(3, 5)], 15),
        (lambda x: x.normal_(), [(3, 5)], 15),
        (torch.relu, [(7,)], 2 * 7),
        (lambda x: x.relu_(), [(7,)], 2 * 7),
        (lambda x, y: torch.exp(x, out=y), [(3, 5), (3, 5)], 2 * 15),
        (lambda x, y: x[:, ::2].add_(y), [(3, 4), (3, 2)], 3 * 6),
        (torch.sum, [(3, 5)], 15 + 1),
        (torch.mm, [(3, 5), (5, 7)], 15 + 35 + 21),
        (torch.addmm, [(7,), (3, 5), (5, 7)], 7 + 15 + 35 + 21),
        (lambda x: x[:, :2] * 2, [(3, 5)], 2 * 6),  # a view counts what is in it
        (lambda x: x.expand(9, 5) * 2, [(1, 5)], 5 + 45),  # what is repeated is read once
        (lambda x: x.t().contiguous(), [(3, 5)], 5 * 15 + 15),  # 20 bytes are read for a number
        (lambda x: x[:, ::2] * 2, [(3, 4)], 2 * 6 + 6),  # what lies between is read
        (lambda x: x.transpose(0, 1).contiguous(), [(3, 2, 5)], 2 * 30),  # rows of 5 stay rows
        (lambda x, y: torch.cat([x, y]), [(3, 5), (2, 5)], 2 * 25),
        (lambda *xs: torch._foreach_add_(list(xs), 1.0), [(3,), (4,)], 2 * 7),
        (lambda x: torch.empty(3, device=x.device), [(3,)], 0),
        (lambda x: torch.zeros(3, device=x.device), [(3,)], 3),
        (lambda x: x.view(-1), [(3, 5)], 0),
    ],
)
def test_bytes_by_hand(device, program, shapes, floats):
    tensors = [torch.ones(shape, device=device) for shape in shapes]
    with kernels() as found:
        program(*tensors)
    assert [kernel.num_bytes for kernel in found] == [floats * FLOATS] * (floats > 0)


@pytest.mark.parametrize("size", [1000, 2])
def test_a_lookup_reads_the_rows_that_it_asks_for_and_each_once(device, size):
    table = torch.ones(size, 8, device=device)
    places = torch.zeros(3, device=device, dtype=torch.long)
    rows = (min(3, size) + 3) * 8 * FLOATS + 3 * 8  # read and written, and the places
    for lookup in (
        lambda: F.embedding(places, table),
        lambda: table[places],
        lambda: table.index_select(0, places),
        lambda: table.gather(0, places[:, None].expand(3, 8)),
    ):
        assert only(lookup).num_bytes == rows


def test_a_broadcast_column_is_read_once_however_it_lies(device):
    x, matrix = torch.ones(7, 5, device=device), torch.ones(5, 9, device=device)
    kernel = only(lambda: x + matrix[:, 0])
    assert (kernel.num_bytes, kernel.strided) == (2 * 35 * FLOATS + 5 * 20, 35)


def test_masked_fill_copies_and_then_fills(device):
    x, mask = torch.ones(3, 5, device=device), torch.ones(5, device=device, dtype=torch.bool)
    assert only(x.masked_fill, mask, 0.0).num_bytes == 4 * 15 * FLOATS + 5
    assert only(x.masked_fill_, mask, 0.0).num_bytes == 2 * 15 * FLOATS + 5


@pytest.mark.parametrize(("width", "passes"), [(1024, 3), (1025, 4)])
def test_softmax_and_its_gradients_read_long_rows_again(device, width, passes):
    """Gradients read two tensors and write one; the sums of a long row are a pass over one more.

    torch computes `grad * output` first for softmax: reads of both, and a write.
    """
    x = torch.ones(3, width, device=device)
    size = 3 * width * FLOATS
    with kernels() as found:
        x.log_softmax(1), x.softmax(1)
        torch.ops.aten._log_softmax_backward_data(x, x.clone(), 1, x.dtype)
        torch.ops.aten._softmax_backward_data(x, x.clone(), 1, x.dtype)
    found = [kernel for kernel in found if "softmax" in kernel.name]
    expected = [passes - 1, passes - 1, passes, passes + 3]
    assert [kernel.num_bytes for kernel in found] == [each * size for each in expected]


@pytest.mark.parametrize(
    ("program", "elements"),
    [
        (lambda x: x + x, 0),
        (lambda x: x.t() * x.t(), 0),
        (lambda x: x * x[:1, :1], 0),  # a single number
        (lambda x: x * x.new_ones(5, 1), 20),
        (lambda x: x * x.new_ones(1, 4), 20),
        (lambda x: x.add_(x.new_ones(4)), 20),
        (lambda x: x + x.new_ones(4, 5).t(), 20),
        (lambda x: x.t().contiguous(), 20),
        (lambda x: x.copy_(x.new_ones(4, 5).t()), 20),
        (lambda x: x.masked_fill_(x[0] > 0, 2.0), 20),
        (lambda x: x[:, :2].exp(), 10),
        (lambda x: x.sum(0), 0),
        (lambda x: x[None].max(0).values, 0),
        (lambda x: x.max(1, keepdim=True).values, 0),
        (lambda x: x.softmax(1), 0),
    ],
)
def test_elements_are_strided_where_layouts_differ_or_broadcast(device, program, elements):
    x = torch.ones(5, 4, device=device)
    with kernels() as found:
        program(x)
    assert found[-1].strided == elements


@pytest.mark.parametrize(
    ("m", "k", "n", "dtype", "aligned"),
    [
        (8, 16, 24, torch.bfloat16, True),
        (7, 16, 24, torch.bfloat16, True),  # the number of rows does not matter
        (8, 12, 24, torch.bfloat16, False),
        (8, 16, 20, torch.bfloat16, False),
        (8, 12, 20, torch.float32, True),
        (8, 16, 50_257, torch.float32, False),
    ],
)
def test_matrices_are_aligned_where_rows_begin_at_multiples_of_16_bytes(
    device, m, k, n, dtype, aligned
):
    a, b = (torch.ones(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
    products = only(torch.mm, a, b).products + only(torch.bmm, a[None], b[None]).products
    assert [product.aligned for product in products] == [aligned] * 2


def test_the_rows_of_a_result_count_for_its_alignment(device):
    a, b = torch.ones(7, 16, device=device), torch.ones(16, 24, device=device)
    products = only(torch.mm, a, b).products + only(torch.mm, b.t(), a.t()).products
    assert [product.aligned for product in products] == [True, False]


def test_statistics_of_a_batch_are_a_pass_of_their_own(device):
    x = torch.ones(4, 3, 2, 2, device=device)
    kernel = only(lambda: F.batch_norm(x, None, None, training=True))
    assert kernel.num_bytes == (2 * 48 + 48 + 3 + 3) * FLOATS
    each = torch.ones(3, device=device)
    rest = None, None, None, each, each.clone(), True, 1e-5, [True, False, False]
    kernel = only(torch.ops.aten.native_batch_norm_backward, x, x.clone(), *rest)
    assert kernel.num_bytes == (2 * (48 + 48 + 3 + 3) + 48) * FLOATS


def test_batches_in_bfloat16_have_a_block_of_threads_for_each_channel(device):
    x = torch.ones(4, 3, 2, 2, device=device, dtype=torch.bfloat16, requires_grad=True)
    for training, blocks in (True, [(3, 16, 1), (3, 16, 2)]), (False, [None] * 2):  # no sums
        with kernels() as found:
            F.batch_norm(x, *torch.ones(2, 3, device=device), training=training).sum().backward()
        assert [kernel.blocks for kernel in found if "batch_norm" in kernel.name] == blocks


def test_gradients_of_depthwise_weights_read_the_images_for_each_of_9_weights(device):
    sizes = (2, 3, 3, 3), (2, 3, 5, 5), (3, 1, 3, 3)
    tensors, read = [torch.ones(size, device=device) for size in sizes], 54 + 150 + 27
    rest = [[1, 1], [0, 0], [1, 1], False, [0, 0], 3]
    plain, last = torch.contiguous_format, torch.channels_last
    for to_weight, again, layout in (0, 0, plain), (1, 8 * (54 + 150), plain), (1, 0, last):
        mask = [not to_weight, bool(to_weight), False]
        given = [each.to(memory_format=layout) for each in tensors]
        kernel = only(torch.ops.aten.convolution_backward, *given, None, *rest, mask)
        assert kernel.num_bytes == (read + again + (27 if to_weight else 150)) * FLOATS
    rest = None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1, [False, True, False]  # to one channel
    given = torch.ones(2, 1, 7, 7, device=device), *tensors[1:], *rest
    assert only(torch.ops.aten.convolution_backward, *given).num_bytes == (98 + 150 + 54) * FLOATS


def test_bytes_and_dtype_are_those_of_the_dtype(device):
    x = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    kernel = only(lambda: x @ x.t())
    assert (kernel.name, kernel.dtype, kernel.num_bytes) == ("aten.mm", x.dtype, 3 * 64 * 2)
    assert kernel.products == (Product(1, 8, 8, 8),)


def test_fused_layers_have_the_products_of_their_parts(device):
    """Without gradients torch fuses a whole layer; it computes what the layer does with them."""
    whole = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device).eval()
    x = torch.ones(4, 6, 16, device=device)
    for program in (lambda: whole(x), lambda: whole.self_attn(x, x, x)):
        with torch.no_grad(), kernels() as fused:
            program()
        with kernels() as apart:
            program()
        assert flops(fused) == flops(apart) > 0 and len(fused) < len(apart)


def test_a_small_write_into_a_large_tensor_costs_what_it_writes():
    (device,) = virtual_gpus(1, model="a100", values=False, host=8e-6)
    cache, row = torch.ones(2**26, 2, device=device), torch.ones(1, 2, device=device)
    index = torch.zeros(1, dtype=torch.long, device=device)
    least = seconds_of(lambda: row + row)
    at = index[:, None].expand(1, 2)
    writes = [("index_fill_", index, 1.0), ("index_copy_", index, row), ("index_add_", index, row)]
    for name, *given in (*writes, ("scatter_", at, row), ("scatter_add_", at, row)):
        write = partial(getattr(cache, name), 0, *given)
        assert seconds_of(write) == pytest.approx(least), name
    assert seconds_of(partial(cache.index_put_, (index,), row)) == pytest.approx(least)
    assert only(cache.index_copy_, 0, index, row).num_bytes == 2 * (2 * FLOATS + 8)
    assert seconds_of(lambda: cache.add_(1)) > 50 * least


# -- products that are not known


@torch.library.custom_op("d2lpar_tests::scores", mutates_args=(), device_types="cpu")
def scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@torch.library.custom_op(
    "d2lpar_tests::halved", mutates_args=(), device_types="cpu", tags=(torch.Tag.pointwise,)
)
def halved(a: torch.Tensor) -> torch.Tensor:
    return a / 2


scores.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
halved.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("aten._euclidean_dist", torch.cdist),
        ("aten.linalg_inv_ex", lambda a, b: torch.linalg.inv(a)),
        ("aten._linalg_svd", lambda a, b: torch.linalg.svd(a)),
        ("aten._fft_r2c", lambda a, b: torch.fft.rfft(a)),
        ("d2lpar_tests.scores", scores),
    ],
)
def test_an_operator_with_products_that_are_not_known_says_so_once(name, program):
    modelled_gpu.warn_of_unknown_products.cache_clear()
    (device,) = virtual_gpus(1, model="v100")
    with pytest.warns(UserWarning) as noted:
        for size in (30, 30, 40):
            program(*torch.eye(size, device=device).repeat(2, 1, 1))
    expected = f"{name} is counted by its bytes only: its products are not known to the model"
    assert [str(warning.message)[: len(expected)] for warning in noted] == [expected]


def everything_else(device):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Embedding(50, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1)
    )
    net.append(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True))
    tail = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    net, tail = net.to(device), tail.to(device)
    adam = torch.optim.Adam([*net.parameters(), *tail.parameters()])
    found = net(torch.arange(32, device=device).reshape(4, 8))
    found = F.interpolate(tail(found.unsqueeze(1)), scale_factor=2, mode="bilinear")
    found = torch.cat([halved(found.detach()), found.flip(0)]).flatten(1)
    F.cross_entropy(found, found.argmax(1)).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    adam.step()
    F.softmax(found, 1).sort(1).values.cumsum(1).std(0).max().item()
    torch.mv(found, found[0]), found[0].dot(found[0]), found.gather(1, found.argsort(1))


def test_operators_without_products_and_known_ones_say_nothing():
    (device,) = virtual_gpus(1, model="v100")
    modelled_gpu.warn_of_unknown_products.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everything_else(device)


def test_operators_with_products_are_those_that_torch_counts():
    for packet in flop_registry:
        assert may_do_products(str(packet)), packet
    free = {torch.Tag.pointwise, torch.Tag.reduction}
    checked = 0
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        found = getattr(torch.ops.aten, packet, None) if name.startswith("aten::") else None
        if found is not None and free & set(getattr(found, overload or "default").tags):
            assert not may_do_products(f"aten.{packet}"), name
            checked += 1
    assert checked > 500 and not may_do_products("fsdp.all_gather_copy_in")
