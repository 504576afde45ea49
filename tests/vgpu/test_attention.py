"""`scaled_dot_product_attention` in one kernel: values, gradients, the choice, memory and time.

The CPU computes what is expected, in float32, by the plain operators.
"""

import contextlib
import itertools

import pytest
import torch
from gates import Gate, run_what_can
from modelling import fixed_gpus, flops, kernels, seconds_of
from ranks import in_ranks, set_up
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vgpu import clock, virtual_gpus

attention = F.scaled_dot_product_attention
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
MATH, CUDNN = SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION
FUSED = [(torch.bfloat16, FLASH), (torch.float32, EFFICIENT)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # some units in the
# last place of the dtype, for numbers of about 1
HEADS, LENGTH, SIZE, WIDTH = 4, 6, 9, 8
Q = 2, HEADS, LENGTH, WIDTH


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def fused(program):
    with kernels() as found:
        program()
    names = [kernel.name.removeprefix("aten._scaled_dot_product_") for kernel in found]
    return [name for name in names if "attention" in name]


def both_passes(queries, keys, values, *, mask=None, **options):
    """Return the result and the gradients of queries, keys and values, on the CPU in float32."""
    leaves = [x.detach().requires_grad_() for x in (queries, keys, values)]
    out = attention(*leaves, mask, **options)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * weights.to(out)).sum().backward()
    return [each.detach().cpu().float() for each in (out, *(leaf.grad for leaf in leaves))]


def some(*shape):
    """Return a mask of about half of the keys, at least one of which each query has."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[..., 0] = True
    return mask


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "longer keys": {"size": SIZE},
    "longer keys, causal": {"size": SIZE, "is_causal": True},
    "longer keys, mask": {"size": SIZE, "mask": some(LENGTH, SIZE)},
    "wider values": {"of_value": 12},
    "mask of pairs": {"mask": some(LENGTH, LENGTH)},
    "mask of each head": {"mask": some(2, HEADS, LENGTH, LENGTH)},
    "mask of keys": {"mask": some(2, 1, 1, LENGTH)},
    "no key for a query": {"mask": some(LENGTH, LENGTH).index_fill(0, torch.tensor(2), False)},
    "numbers": {"mask": 3 * torch.sin(torch.arange(36.0)).reshape(LENGTH, LENGTH)},
    "infinite numbers": {"mask": torch.where(some(LENGTH, LENGTH), 0.0, -torch.inf)},
    "shared keys": {"groups": 2, "enable_gqa": True},
    "shared keys, causal": {"groups": 1, "enable_gqa": True, "is_causal": True},
    "shared keys, mask": {"groups": 2, "enable_gqa": True, "mask": some(LENGTH, LENGTH)},
    "one batch of keys": {"keys": 1},
}


@pytest.mark.usefixtures("here_and_elsewhere")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_cpus(device, case, dtype):
    options = dict(CASES[case])
    size, groups = options.pop("size", LENGTH), options.pop("groups", HEADS)
    of_value, batch, mask = options.pop("of_value", WIDTH), options.pop("keys", 2), None
    shapes = Q, (batch, groups, size, WIDTH), (batch, groups, size, of_value)
    inputs = [x.to(dtype) for x in tensors(*shapes)]
    if "mask" in options:
        mask = options.pop("mask")
        mask = mask if mask.dtype == torch.bool else mask.to(dtype)
    there = None if mask is None else mask.to(device)
    got = both_passes(*(x.to(device) for x in inputs), mask=there, **options)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    with sdpa_kernel(MATH):
        expected = both_passes(*(x.float() for x in inputs), mask=mask, **options)
        plain = both_passes(*(x.to(device) for x in inputs), mask=there, **options)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got, expected, **tolerance)
    torch.testing.assert_close(plain, expected, **tolerance)


def test_results_have_the_layout_in_which_joining_the_heads_copies_nothing(device):
    (x,) = tensors(Q)
    for dtype in (torch.bfloat16, torch.float32):
        out = attention(*[x.to(device, dtype)] * 3).transpose(1, 2)
        turned = attention(*[x.mT.contiguous().mT.to(device, dtype)] * 3)
        assert turned.transpose(1, 2).tolist() == out.tolist()
        assert out.is_contiguous() and out.view(2, LENGTH, -1).shape == (2, LENGTH, HEADS * WIDTH)


def assert_close_sums(found, expected):
    """Compare sums of float32 of less than 100 terms, within a thousand times their rounding."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


# -- dropout


def with_dropout(x, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return attention(x.to(dtype), x.to(dtype), x.to(dtype), dropout_p=0.3)


@pytest.mark.parametrize("seed", [3, -3])  # the latter is 2**64 - 3
def test_dropout_draws_what_the_cpu_draws_from_the_same_seed(device, seed):
    (x,) = tensors(Q)
    found = []
    for where in ("cpu", device):
        leaf = x.detach().to(where).requires_grad_()
        out = with_dropout(leaf, seed)
        out.square().sum().backward()
        found.append((out.detach().cpu(), leaf.grad.cpu()))
    for ours, theirs in zip(*found, strict=True):
        assert_close_sums(theirs, ours)
    assert fused(lambda: with_dropout(x.to(device), 3)) == ["efficient_attention"]


def test_the_gradient_of_dropout_is_the_slope_of_its_values(device):
    x, step = (each.to(device) for each in tensors(Q, Q))
    x.requires_grad_()

    def loss(x):
        return with_dropout(x, 3).sin().sum()

    loss(x).backward()
    with torch.no_grad():
        slope = (loss(x + 1e-2 * step) - loss(x - 1e-2 * step)).item() / 2e-2
        other = (with_dropout(x, 4).sin().sum() - loss(x)).abs().item()
    assert (x.grad * step).sum().item() == pytest.approx(slope, rel=5e-3)
    assert other > 0.1, "the seed does not matter"


def test_flash_drops_what_the_other_kernel_drops_in_both_passes(device):
    x = tensors(Q)[0].bfloat16().float()
    found = []
    for dtype, kind in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        leaf = x.to(device).requires_grad_()

        def passes(leaf=leaf, dtype=dtype):
            out = with_dropout(leaf, 3, dtype)
            out.float().sum().backward()
            found.append(out.detach().float().cpu())

        assert fused(passes) == [f"{kind}_attention", f"{kind}_attention_backward"]
        found.append(leaf.grad.cpu())
        assert not attention(*[leaf.to(dtype)] * 3, dropout_p=1.0).any()
    torch.testing.assert_close(found[0], found[2], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(found[1], found[3], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_drop_the_same_again(device, dtype):
    """Values and gradients with and without checkpoint, under one seed, of three layers."""
    (x,) = tensors(Q)
    found = []

    def layer(x):
        return F.dropout(attention(x, x, x, dropout_p=0.4) + F.dropout(x, 0.3), 0.2)

    for uses in (False, True):
        leaf = x.to(device, dtype).requires_grad_()
        torch.manual_seed(8)
        y = leaf
        for _ in range(3):
            y = checkpoint(layer, y, use_reentrant=False) if uses else layer(y)
        after = torch.rand(3, device=device)
        y.float().square().sum().backward()
        found.append([each.tolist() for each in (y.detach(), leaf.grad, after)])
    assert found[0] == found[1]


# -- without gradients, and with mixed precision


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_gradients_the_values_are_the_same(device, without, dtype):
    x = tensors(Q)[0].to(device, dtype).requires_grad_()
    expected = attention(x, x, x, is_causal=True)
    with without():
        kinds = fused(lambda: attention(x, x, x, is_causal=True))
        out = attention(x, x, x, is_causal=True)
    assert kinds == ["efficient_attention" if dtype == torch.float32 else "flash_attention"]
    assert not out.requires_grad and out.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_takes_the_kernel_of_its_dtype(device, dtype):
    x = tensors(Q)[0].to(device).requires_grad_()

    def program():
        with torch.autocast("vgpu", dtype):
            out = attention(x, x, x)
        assert out.dtype == dtype
        out.float().sum().backward()

    assert fused(program) == ["flash_attention", "flash_attention_backward"]
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("case", ["grad", "vmap"])
def test_transformed_functions_get_the_same(device, case):
    (x,) = tensors((3, 2, HEADS, LENGTH, WIDTH))
    program = torch.func.vmap(lambda x: attention(x, x, x))
    if case == "grad":
        program, x = torch.func.grad(lambda x: attention(x, x, x).square().sum()), x[0]
    assert_close_sums(program(x.to(device)).cpu(), program(x))


# -- which kernel


def kind(dtype=torch.float32, mask=None, gqa=False, shape=Q, longer=0, wider=0, **options):
    """Return which kernel is taken, on the current device: "flash", "efficient" or "math"."""
    queries = torch.zeros(shape, dtype=dtype, device="vgpu")
    keys = queries[:, :2] if gqa else queries
    keys, values = (F.pad(keys, (0, more, 0, longer)) for more in (0, wider))
    if mask is not None:
        mask = torch.zeros(LENGTH, LENGTH, device="vgpu", dtype=mask)
    found = fused(lambda: attention(queries, keys, values, mask, enable_gqa=gqa, **options))
    (name,) = found or ["math"]
    return name.removesuffix("_attention")


HALF = torch.float16, torch.bfloat16


@pytest.mark.parametrize(("options", "expected"), [
    *(({"dtype": dtype}, "flash") for dtype in HALF),
    *(({"dtype": dtype, "is_causal": True}, "flash") for dtype in HALF),
    *(({"dtype": dtype, "gqa": True}, "flash") for dtype in HALF),
    *(({"dtype": dtype, "mask": torch.bool}, "efficient") for dtype in HALF),
    *(({"dtype": dtype, "mask": dtype}, "efficient") for dtype in HALF),
    *(({"dtype": dtype, "mask": torch.bool, "gqa": True}, "math") for dtype in HALF),
    *(({"dtype": dtype, "shape": (1, 2, 3, 256)}, "flash") for dtype in HALF),
    *(({"dtype": dtype, "shape": (1, 2, 3, 264)}, "efficient") for dtype in HALF),
    *(({"dtype": dtype, "wider": 8}, "efficient") for dtype in HALF),
    *(({"dtype": dtype, "is_causal": True, "longer": 3}, "efficient") for dtype in HALF),
    *(({"dtype": dtype, "shape": (2, 3, 8)}, "math") for dtype in HALF),
    ({}, "efficient"),
    ({"mask": torch.float32}, "efficient"),
    ({"gqa": True}, "math"),
    ({"dtype": torch.float64}, "math"),
    *(({"dtype": dtype, "mask": torch.float32}, "math") for dtype in HALF),
    ({"shape": (1, 2, 0, 8)}, "math"),
])  # fmt: skip
def test_the_kernel_is_that_of_cuda(options, expected):
    """Flash for 16 bits without a mask, efficient with one and for float32, else the operators.

    See check_tensor_dtype, check_for_attn_mask and check_head_dim_size_* in sdp_utils.cpp of torch.
    """
    for model in (None, "a100"):
        virtual_gpus(1, model=model)
        assert kind(**options) == expected


def test_before_ampere_there_is_no_flash_and_no_bfloat16():
    """sm80 and later: check_flash_attention_hardware_support in sdp_utils.cpp."""
    kinds = {}
    for model in ("v100", "t4", "a100", "h100"):
        virtual_gpus(1, model=model)
        kinds[model] = [kind(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)]
    assert kinds["v100"] == kinds["t4"] == ["efficient", "math", "efficient"]
    assert kinds["a100"] == kinds["h100"] == ["flash", "flash", "efficient"]


@pytest.mark.parametrize(("allowed", "float32", "bfloat16"), [
    ([FLASH], None, "flash"),
    ([EFFICIENT], "efficient", "efficient"),
    ([MATH], "math", "math"),
    ([CUDNN], None, None),
    ([FLASH, MATH], "math", "flash"),
    ([FLASH, EFFICIENT], "efficient", "flash"),
])  # fmt: skip
def test_a_program_may_allow_some_kernels_only(device, allowed, float32, bfloat16):
    torch.vgpu.set_device(device)

    def check():
        for dtype, expected in ((torch.float32, float32), (torch.bfloat16, bfloat16)):
            if expected is None:
                words = "No available kernel. Aborting execution.*" + str(dtype)
                with pytest.raises(RuntimeError, match=words):
                    kind(dtype)
            else:
                assert kind(dtype) == expected

    with sdpa_kernel(allowed):
        check()
    backends = torch.backends.cuda
    switches = {
        FLASH: (backends.enable_flash_sdp, backends.flash_sdp_enabled),
        EFFICIENT: (backends.enable_mem_efficient_sdp, backends.mem_efficient_sdp_enabled),
        MATH: (backends.enable_math_sdp, backends.math_sdp_enabled),
    }
    with contextlib.ExitStack() as stack:
        for each, (enable, is_enabled) in switches.items():
            stack.callback(enable, is_enabled())
            enable(each in allowed)
        check()
    torch.vgpu.set_device(0)


@pytest.mark.parametrize(("dtype", "backend"), FUSED)
def test_what_is_allowed_when_a_kernel_runs_does_not_matter_to_it(device, dtype, backend):
    """The CPU has no efficient kernel, and neither of them is allowed once the gate is open."""
    x = tensors(Q)[0].to(dtype)
    expected = attention(x, x, x)
    x = x.to(device).requires_grad_()
    with sdpa_kernel(backend):
        out = attention(x, x, x)
        out.sum().backward()
        torch.testing.assert_close(out.detach().cpu(), expected)
    with Gate(device) as gate:
        out = attention(x, x, x)
        with sdpa_kernel(CUDNN):
            gate.let_go()
            run_what_can()
    torch.testing.assert_close(out.detach().cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize(("shapes", "options", "words"), [
    ((Q, (2, 2, LENGTH, WIDTH), (2, 2, LENGTH, WIDTH)), {}, "size of tensor a \\(4\\)"),
    ((Q, (2, HEADS, LENGTH, 4), Q), {}, "Expected size"),
    ((Q, Q, (2, HEADS, SIZE, WIDTH)), {}, "Expected size"),
    ((Q, Q, Q), {"dropout_p": 1.5}, "between 0 and 1, but got 1.5"),
    ((Q, Q, Q), {"mask": torch.int32}, "attn_mask dtype to be bool or float"),
    ((Q, Q, Q), {"mask": torch.float64}, "attn_mask dtype to be bool or float"),
    ((Q, Q, Q), {"other": torch.float64}, "query, key, and value to have the same dtype"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_at_the_call_as_by_the_cpu(
    shapes, options, words, dtype, values
):
    (device,) = virtual_gpus(1, model="a100", values=values)
    options = dict(options)
    mask, other = options.pop("mask", None), options.pop("other", dtype)
    for where in ("cpu", device):
        q, k, v = (torch.zeros(shape, dtype=dtype, device=where) for shape in shapes)
        bias = None if mask is None else torch.zeros(LENGTH, LENGTH, dtype=mask, device=where)
        kinds = [MATH] if where == "cpu" else [FLASH, EFFICIENT, MATH]
        with pytest.raises(RuntimeError, match=words), sdpa_kernel(kinds):
            attention(q, k.to(other), v.to(other), bias, **options)
    torch.vgpu.synchronize()


def test_a_mask_that_is_trained_gets_its_gradient(device):
    x, bias = tensors(Q, (LENGTH, LENGTH))
    found = []
    for where in ("cpu", device):
        mask = bias.detach().to(where).requires_grad_()
        attention(*[x.to(where)] * 3, mask).square().sum().backward()
        found.append(mask.grad.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# -- memory, products and time


def peak(length, backend, dtype=torch.bfloat16):
    """Return the bytes at the peak of a forward and a backward pass, on a GPU without values."""
    (device,) = virtual_gpus(1, model="a100", values=False)
    torch.vgpu.reset_peak_memory_stats()
    x = torch.zeros(1, 2, length, 64, device=device, dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        attention(x, x, x, is_causal=True).backward(torch.zeros_like(x))
    return torch.vgpu.max_memory_allocated() - torch.vgpu.memory_allocated() + 2 * x.nbytes


@pytest.mark.parametrize(("dtype", "backend"), FUSED)
def test_memory_grows_with_the_length_and_not_with_its_square(dtype, backend):
    short, long = (peak(length, backend, dtype) for length in (4096, 8192))
    assert 1.9 < long / short < 2.05
    short, long = (peak(length, MATH, dtype) for length in (4096, 8192))
    assert long / short > 3.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 5, 8)] * 3,
        [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
        [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)],
    ],
)
def test_flops_are_those_that_torch_counts(device, shapes, dtype):
    def program():
        leaves = [x.to(device, dtype).requires_grad_() for x in tensors(*shapes)]
        attention(*leaves).sum().backward()

    with kernels() as found:
        program()
    with FlopCounterMode(display=False) as counter:
        program()
    assert flops(found) == counter.get_total_flops() > 0


def test_a_causal_kernel_takes_about_half_of_the_time():
    (device,) = virtual_gpus(1, model="a100", values=False, host=0)
    x = torch.zeros(2, 32, 8192, 128, dtype=torch.bfloat16, device=device)
    all_keys = seconds_of(lambda: attention(x, x, x))
    causal = seconds_of(lambda: attention(x, x, x, is_causal=True))
    assert causal == pytest.approx(all_keys / 2, rel=0.05)


# -- random numbers of checkpoints, and DTensor


def test_checkpointed_layers_with_dropout_issue_in_the_time_of_launches_only():
    """The state of the random numbers is asked for and put back, and the host does not wait."""
    launch, times = 2.0**-10, {}
    for seconds in (1.0, 2.0):
        fixed_gpus(1, seconds=seconds, launch=launch)
        x = torch.ones(2, 3, device="vgpu", requires_grad=True)
        torch.vgpu.synchronize()
        with kernels() as found:
            begun, y = clock(), x
            for _ in range(4):
                y = checkpoint(lambda x: F.dropout(x.sin(), 0.5), y, use_reentrant=False)
            y.backward(torch.ones_like(y))
            times[seconds] = clock() - begun
        assert times[seconds] == len(found) * launch
        assert len(found) > 4 * 4
        torch.vgpu.synchronize()
    assert times[1.0] == times[2.0]


@in_ranks(2)
def test_attention_of_dtensors_is_computed_part_by_part():
    rank, device, group = set_up()
    mesh = DeviceMesh.from_group(group, "vgpu")
    x = tensors(Q)[0]
    odd = distribute_tensor(x.detach()[:, :1].to(device), mesh, [Shard(1)])
    long, wide = (distribute_tensor(x.detach().to(device), mesh, [Shard(dim)]) for dim in (2, 3))
    for cut in odd, long, wide:  # of which each rank needs the whole
        got, whole = F.scaled_dot_product_attention(cut, cut, cut), cut.full_tensor().cpu()
        torch.testing.assert_close(got.full_tensor().cpu(), attention(whole, whole, whole))
    mask = distribute_tensor(torch.zeros(1, 1, LENGTH, LENGTH, device=device), mesh, [Replicate()])
    for dtype, dim in itertools.product((torch.float32, torch.bfloat16), (0, 1)):
        leaf = x.to(device, dtype).detach()
        leaf = distribute_tensor(leaf, mesh, [Shard(dim)]).requires_grad_()
        masked = F.scaled_dot_product_attention(leaf, leaf, leaf, mask.to(dtype))
        assert masked.shape == leaf.shape  # the mask is broadcast

        def program(leaf=leaf, dim=dim):
            out = F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=True)
            assert isinstance(out, DTensor) and out.placements == (Shard(dim),)
            out.to_local().square().sum().backward()

        name = "flash" if dtype == torch.bfloat16 else "efficient"
        assert fused(program) == [f"{name}_attention", f"{name}_attention_backward"]
        whole = x.to(dtype).float().detach().requires_grad_()
        attention(whole, whole, whole, is_causal=True).square().sum().backward()
        part = whole.grad.chunk(2, dim)[rank]
        tolerance = 5 * TOLERANCE[dtype]  # of sums of numbers up to 5
        got = leaf.grad.to_local().cpu().float()
        torch.testing.assert_close(got, part, rtol=tolerance, atol=tolerance)
