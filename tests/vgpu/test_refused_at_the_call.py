"""What CUDA's host refuses is refused at the call; only what depends on values is reported later.

Most expected errors are those of the CPU, for the same call; those that name kernels are from
torch's sources for CUDA (`"bitwise_and_cuda" not implemented for 'Float'`).
"""

import warnings

import pytest
import torch
from gates import Gate, error_of
from torch.nn import functional as F

from vgpu import virtual_gpus

pytestmark = [pytest.mark.usefixtures("devices"), pytest.mark.filterwarnings("ignore")]


def shared(device):
    return torch.arange(16.0, device=device).view(4, 4)


def expanded(device):
    return torch.ones(1, 7, device=device).expand(5, 7)


OVERLAPS = {
    "in place": lambda d: expanded(d).add_(1),
    "a draw": lambda d: expanded(d).normal_(),
    "a relu": lambda d: F.relu_(expanded(d)),
    "for each": lambda d: torch._foreach_add_([expanded(d)], 1),
    "a result": lambda d: torch.add(torch.ones(5, 7, device=d), 1, out=expanded(d)),
    "added indices": lambda d: expanded(d).index_add_(
        0, torch.tensor([0], device=d), torch.ones(1, 7, device=d)
    ),
    "a copy": lambda d: expanded(d).copy_(torch.ones(5, 7, device=d)),
    "a copy of a number": lambda d: expanded(d).copy_(torch.tensor(2.0)),
    "a shifted copy": lambda d: (lambda t: t[1:].copy_(t[:-1]))(shared(d)),
    "a transposed copy": lambda d: (lambda t: t.copy_(t.t()))(shared(d)),
    "transposed": lambda d: (lambda t: t.add_(t.t()))(shared(d)),
    "shifted": lambda d: (lambda t: t[1:].add_(t[:-1]))(shared(d)),
    "a shifted result": lambda d: (lambda t: torch.add(t[:-1], 1, out=t[1:]))(shared(d)),
    "a joined result": lambda d: (lambda t: torch.cat([t[:2], t[2:]], out=t))(shared(d)),
    "scattered": lambda d: (lambda t: t[0].scatter_(0, torch.arange(4, device=d), t.view(-1)[2:6]))(
        shared(d)
    ),
    "a running sum": lambda d: (lambda t: torch.cumsum(t[:-1], 0, out=t[1:]))(shared(d)),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_writing_to_memory_that_overlaps_is_refused_at_the_call(name, device):
    expected = error_of(OVERLAPS[name], "cpu")
    for _ in range(2):  # what is refused has no plan
        got = error_of(OVERLAPS[name], device)
        assert type(got) is type(expected) is RuntimeError and str(got) == str(expected)
    assert "single memory location" in str(got)
    torch.vgpu.synchronize(device)


def test_a_copy_to_another_device_is_refused_at_the_call_if_its_target_overlaps(devices):
    target, pinned = expanded(devices[1]), torch.ones(5, 7).pin_memory()
    for source in (torch.ones(5, 7, device=devices[0]), pinned):
        with pytest.raises(RuntimeError, match="^unsupported operation: more than one element"):
            target.copy_(source, non_blocking=True)


def test_what_ran_on_two_memories_is_refused_on_one(device):
    t, u = shared(device), shared(device)
    t[1:].add_(u[:-1])
    with pytest.raises(RuntimeError, match="^unsupported operation: some elements"):
        t[1:].add_(t[:-1])


def test_memory_may_be_shared_where_the_cpu_allows_it(device):
    """Also after the same call, with the same layouts, was refused for tensors of one memory."""

    def work(where):
        t, u = shared(where), shared(where) + 1
        error_of(t[1:].add_, t[:-1])
        t[1:].add_(u[:-1])
        t[:2].add_(t[2:])
        t[:2].copy_(t[2:])
        t.add_(t)
        t.copy_(t)
        expanded(where).fill_(2)
        return t, torch.add(u, 1, out=u.view(4, 4)), u

    for got, expected in zip(work(device), work("cpu"), strict=True):
        assert got.tolist() == expected.tolist()


def test_the_tensor_that_is_written_is_returned_not_one_of_the_same_memory(device):
    x = torch.ones(2, device=device)
    assert torch.add(x, 1, out=x) is x
    assert torch.add(x.detach(), 1, out=x) is x
    assert x.tolist() == [3, 3]


KERNELS = {
    "bitwise_and_cuda": lambda x: x & 1,
    "lshift_cuda": lambda x: x << 1,
    "gcd_cuda": lambda x: torch.gcd(x, x),
    "bincount_cuda": torch.bincount,
}


@pytest.mark.parametrize("elements", [2, 2**24 + 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_without_the_dtype_is_named_at_the_call(kernel, elements, device):
    x = torch.ones(elements, device=device)
    with pytest.raises(NotImplementedError, match=f"^.{kernel}. not implemented for 'Float'"):
        KERNELS[kernel](x)


def test_sizes_are_compared_at_the_call_however_large(device):
    with pytest.raises(RuntimeError, match="cannot sample n_sample > prob_dist.size"):
        torch.multinomial(torch.ones(70_000, device=device), 80_000)
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[512\], expected input"):
        F.layer_norm(torch.ones(3000, 768, device=device), (512,))
    x = torch.ones(64, 3, 64, 64, device=device)
    with pytest.raises(RuntimeError, match="Input type .* and weight type .* should be the same"):
        F.conv2d(x, torch.ones(8, 3, 3, 3, device=device, dtype=torch.float64))


NUMBERS = {
    "uniform_": (lambda x, *p: x.uniform_(*p), (0.0, 1.0), (2.0, 1.0)),
    "bernoulli_": (lambda x, p: x.bernoulli_(p), (0.5,), (2.0,)),
    "geometric_": (lambda x, p: x.geometric_(p), (0.5,), (1.5,)),
    "exponential_": (lambda x, p: x.exponential_(p), (1.0,), (0.0,)),
    "renorm": (lambda x, p: x.renorm(p, 0, 5), (2,), (0,)),
    "renorm, negative": (lambda x, p: x.renorm(p, 0, 5), (2,), (-1,)),
    "power of integers": (lambda x, p: x.long() ** p, (3,), (-1,)),
    "huber_loss": (lambda x, p: F.huber_loss(x, x, delta=p), (1.0,), (0.0,)),
    "softshrink": (lambda x, p: F.softshrink(x, p), (0.0,), (-1.0,)),
    "histc": (lambda x, *p: torch.histc(x, 3, *p), (0.5, 1.0), (2.0, 1.0)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_refused_at_the_call_though_another_is_known(name, device):
    function, allowed, refused = NUMBERS[name]
    expected = error_of(function, torch.ones(2, 3), *refused)
    function(torch.ones(2, 3, device=device), *allowed)
    got = error_of(function, torch.ones(2, 3, device=device), *refused)
    assert type(got) is type(expected) is RuntimeError and str(got) == str(expected)


def test_what_zeros_and_ones_do_not_fit_runs_with_its_own_values(device):
    """Neither all lengths 0 nor all lengths 1 are valid here. It waits once, to find that out."""
    data, lengths = torch.arange(5.0, device=device), torch.tensor([2, 3], device=device)
    assert torch.segment_reduce(data, "sum", lengths=lengths).tolist() == [1, 9]
    with Gate(device):
        got = torch.segment_reduce(data, "sum", lengths=lengths, unsafe=True)  # values unchecked
    assert got.tolist() == [1, 9]


def test_what_is_not_refused_makes_no_operator_wait(device):
    """Though zeros are no divisors, and smaller lengths are too small for a window of 3."""
    x, n = torch.ones(2, 6, 7, device=device), torch.full((5,), 7, device=device)
    torch.vgpu.synchronize(device)
    with Gate(device):
        y, z = F.max_pool2d(x, 3), n // 2 // n
        large = torch.ones(1, device=device).repeat(2000)
    assert y.tolist() == [[[1, 1]] * 2] * 2 and z.tolist() == [0] * 5
    assert large.sum().item() == 2000


def test_without_values_the_same_is_refused_at_the_call():
    (device,) = virtual_gpus(1, model="v100", values=False)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        expanded(device).add_(1)
    for n in (2, 2**12):
        x = torch.ones(n, n, device=device)
        with pytest.raises(RuntimeError, match="expected .* to have the same dtype"):
            x @ x.double()
        with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
            x & 1
    large = torch.ones(64, 64, 112, 112, device=device)  # too large for a trial of its size
    assert F.max_pool2d(large, 3).shape == (64, 64, 37, 37)
    assert F.group_norm(large, 8).shape == large.shape
    assert torch.ones(2, device=device).repeat(2**30).shape == (2**31,)


QUANTIZED = {
    "a tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
    "channels": lambda x: torch.quantize_per_channel(x, x, x, 0, torch.qint8),
    "integers": lambda x: torch._make_per_tensor_quantized_tensor(x.char(), 0.1, 0),
    "a copy": lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8).to(x.device),
    "a new one": lambda x: torch.empty(3, dtype=torch.quint8, device=x.device),
    "a module": lambda x: torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(torch.nn.Linear(3, 2)), {torch.nn.Linear}
    )(x[None]),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_refused_by_name_with_a_cure(name, device):
    with pytest.raises(RuntimeError, match="requires quantized tensors.*fake_quantize"):
        QUANTIZED[name](torch.ones(3, device=device))
    rounded = torch.fake_quantize_per_tensor_affine(torch.ones(3, device=device), 0.3, 0, 0, 255)
    assert rounded.tolist() == pytest.approx([0.9] * 3)


def test_indices_on_another_device_are_refused_with_the_text_of_cuda(devices):
    """aten/src/ATen/native/TensorAdvancedIndexingUtils.h, check_indices_on_cpu_or_selfdevice."""
    text = "^indices should be either on cpu or on the same device as the indexed tensor .{}.$"
    for where in ("cpu", "vgpu:0"):
        x, index = torch.arange(3.0, device=where), torch.tensor([1], device=devices[1])
        with pytest.raises(RuntimeError, match=text.format(where)):
            x[index]
        with pytest.raises(RuntimeError, match=text.format(where)):
            x[index] = 2.0
        assert x[torch.tensor([1])].tolist() == [1]


def test_a_result_that_fits_is_given_without_a_warning(device):
    """Trials shorten 30, 40 and 70 in the same order, to lengths that do not add up."""
    parts, whole = [torch.ones(n, device=device) for n in (30, 40)], torch.empty(70, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.cat(parts, out=whole)
    assert whole.tolist() == [1.0] * 70
