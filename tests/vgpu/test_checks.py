"""What CUDA's host checks at the call by reading values, what it asserts in kernels, determinism.

The right error is the CPU's. Where CUDA's kernel asserts, it comes at the next synchronize.
"""

import pytest
import torch
from gates import Gate, error_of
from torch import nn
from torch.nn import functional as F

import d2lpar

ZERO, NAN = torch.zeros(2, 2), torch.full((2, 2), float("nan"))
EYE, ONES = torch.eye(2), torch.ones(2, 2)
linalg = torch.linalg
AT_THE_CALL = {
    "cholesky of a batch": lambda T: linalg.cholesky(T(torch.stack([EYE, -EYE]))),
    "torch.cholesky": lambda T: torch.cholesky(T(-EYE)),
    "cholesky_inverse": lambda T: torch.cholesky_inverse(T(ZERO)),
    "cholesky_ex": lambda T: linalg.cholesky_ex(T(-EYE), check_errors=True),
    "inv of a batch": lambda T: linalg.inv(T(torch.stack([EYE, ZERO]))),
    "inv_ex": lambda T: linalg.inv_ex(T(ZERO), check_errors=True),
    "solve": lambda T: linalg.solve(T(ZERO), T(ONES)),
    "solve_ex": lambda T: linalg.solve_ex(T(ZERO), T(ONES), check_errors=True),
    "lu_factor": lambda T: linalg.lu_factor(T(ZERO)),
    "lu_factor_ex": lambda T: linalg.lu_factor_ex(T(ZERO), check_errors=True),
    "ldl_factor": lambda T: linalg.ldl_factor(T(ZERO)),
    "svd of a batch": lambda T: linalg.svd(T(torch.stack([EYE, NAN]))),
    "pinv": lambda T: linalg.pinv(T(NAN)),
    "eigh": lambda T: linalg.eigh(T(torch.full((9, 9), float("nan")))),
    "eig": lambda T: linalg.eig(T(NAN)),
    "normal": lambda T: torch.normal(0.0, T(torch.tensor([1.0, -1.0]))),
    "histc": lambda T: torch.histc(T(torch.tensor([1.0, float("inf")]))),
    "cholesky into a part": lambda T: torch.cholesky(T(-EYE), out=T(torch.ones(2, 2, 2))[0]),
    "a sorter": lambda T: torch.searchsorted(T(EYE[0]), 1.0, sorter=T(torch.tensor([0, 5]))),
    "linspace": lambda T: torch.linspace(T(NAN[0, 0]), 1, 3, dtype=torch.int64),
    "logspace": lambda T: torch.logspace(T(NAN[0, 0]), 1, 3, dtype=torch.int64),
    "segment_reduce": lambda T: torch.segment_reduce(
        T(torch.ones(3)), "sum", lengths=T(torch.tensor([1, -1]))
    ),
    "a distribution": lambda T: torch.distributions.MultivariateNormal(
        T(torch.zeros(2)), T(-EYE), validate_args=False
    ),
}


@pytest.mark.parametrize("program", AT_THE_CALL.values(), ids=AT_THE_CALL)
def test_the_error_is_raised_at_the_call_with_the_cpus_text(program, device):
    expected = error_of(lambda: program(torch.clone))
    error = error_of(lambda: program(lambda x: x.to(device)))
    assert type(error) is type(expected) is not type(None) and str(error) == str(expected)
    torch.vgpu.synchronize(device)  # not reported twice


def test_eigenvalues_of_nan_are_refused(device):
    with pytest.raises(RuntimeError, match="should not contain infs or NaNs"):
        linalg.eigvals(NAN.to(device))  # crashes on the CPU


def test_forms_that_return_info_do_not_wait(device):
    matrices = [-EYE.to(device), ZERO.to(device)]
    with Gate(device) as gate:
        infos = [linalg.cholesky_ex(matrices[0])[1]]
        for function in (linalg.inv_ex, linalg.lu_factor_ex, linalg.ldl_factor_ex):
            infos.append(function(matrices[1])[-1])
        infos.append(linalg.solve_ex(matrices[1], matrices[0])[1])
        torch.histc(matrices[0], min=0, max=3)
        assert not gate.open.is_set()
    assert [info.item() for info in infos] == [1] * 5


def test_an_earlier_failure_is_not_taken_for_the_operators_own(device):
    torch.ones(2, device=device)[torch.tensor([7], device=device)]
    with pytest.raises(torch.AcceleratorError, match="index 7 is out of bounds"):
        linalg.svd(EYE.to(device))


def test_nothing_fails_where_no_values_are_computed():
    device = d2lpar.virtual_gpus(2, model="v100", values=False)[0]
    large = torch.zeros(300, 300, device=device)
    for function in (linalg.cholesky, linalg.svd, linalg.inv, torch.histc):
        function(large)
    torch._assert_async(large.sum())
    torch.vgpu.synchronize(device)
    device = d2lpar.virtual_gpus(2, model="v100")[0]
    with pytest.raises(linalg.LinAlgError):
        linalg.cholesky(torch.zeros(300, 300, device=device))


# -- asserts in kernels


@pytest.mark.parametrize("program, text", [
    (lambda x: torch._assert_async(x[0]), "nonzero value, but got zero"),
    (lambda x: torch._assert_async(x[0] > 0, "must be positive"), "must be positive"),
    (lambda x: F.one_hot(x.long() + 7, 3), "smaller than num_classes"),
    (lambda x: F.one_hot(x.long() - 1, 3), "must be non-negative"),
    (lambda x: torch.multinomial(x, 1), "sum of probabilities <= 0"),
])  # fmt: skip
def test_an_assert_is_reported_at_the_next_synchronize(program, text, device):
    x = torch.zeros(2, device=device)
    with Gate(device):
        program(x)
    with pytest.raises(torch.AcceleratorError, match=text):
        torch.vgpu.synchronize(device)


def test_an_assert_of_several_values_is_refused_at_the_call(device):
    for x in torch.ones(0, device=device), torch.ones(2, device=device):
        with pytest.raises(RuntimeError, match="is ambiguous"):
            torch._assert_async(x)


def test_classes_are_those_of_the_cpu(device):
    labels = torch.tensor([[2, 0], [1, 1]])
    for classes in (-1, 3, 5):
        assert torch.equal(F.one_hot(labels.to(device), classes).cpu(), F.one_hot(labels, classes))


def test_a_custom_operator_without_a_result_runs(device):
    seen = []

    @torch.library.custom_op("test_checks::note", mutates_args=())
    def note(x: torch.Tensor) -> None:
        seen.extend(x.tolist())

    note.register_fake(lambda x: None)
    note(torch.arange(3, device=device) + 1)
    torch.vgpu.synchronize(device)
    assert seen == [1, 2, 3]


# -- integers divided by 0: CUDA raises nothing


def divisions(x, by):
    out = torch.zeros_like(x)
    return [
        *(x // by, x % by, torch.fmod(x, by), torch.div(x, by, rounding_mode="trunc")),
        *(torch.div(x, by, rounding_mode="floor"), x.clone().remainder_(by)),
        *(x.clone().fmod_(by), x.clone().floor_divide_(by)),
        x.clone().div_(by, rounding_mode="floor"),
        torch.remainder(x, by, out=out),
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_a_division_by_zero_raises_nothing_and_the_others_are_right(dtype, device):
    x, by = torch.tensor([7, 9, 5], dtype=dtype), torch.tensor([2, 0, 3], dtype=dtype)
    kept = [0, 2]
    expected, there = divisions(x[kept], by[kept]), by.to(device)
    for value, right in zip(divisions(x.to(device), there), expected, strict=True):
        assert torch.equal(value.cpu()[kept], right) and torch.equal(there.cpu(), by)
    if dtype == torch.int64:
        scalar = 7 % by.to(device), 7 // by.to(device), torch.remainder(7, by.to(device))
        assert [value.tolist()[0] for value in scalar] == [1, 3, 1]
    divisions(x.to(device), 0)
    torch.vgpu.synchronize(device)


def test_floats_are_divided_by_zero_as_on_the_cpu(device):
    x = torch.tensor([7.0, -9.0, 0.0])
    for value, right in zip(divisions(x.to(device), 0), divisions(x, 0), strict=True):
        torch.testing.assert_close(value.cpu(), right, equal_nan=True)
    integers = torch.tensor([0, 2])
    assert torch.equal((x[:2].to(device) // integers.to(device)).cpu(), x[:2] // integers)


# -- torch.use_deterministic_algorithms(True)


def backward(function, *size):
    def program(device, set_mode):
        x = torch.rand(size, device=device, requires_grad=True)
        y = function(x)
        set_mode()
        y.sum().backward()

    return program


def forward(function):
    def program(device, set_mode):
        set_mode()
        function(torch.rand(4, device=device), torch.zeros(4, dtype=torch.long, device=device))

    return program


def resize(mode, antialias=False):
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, antialias=antialias)


# Source: test_nondeterministic_alert_* in torch's test_torch.py.
REFUSED = {
    "avg_pool3d_backward_cuda": backward(nn.AvgPool3d(3), 2, 3, 3, 3),
    "adaptive_avg_pool2d_backward_cuda": backward(nn.AdaptiveAvgPool2d(3), 2, 3, 3),
    "adaptive_avg_pool3d_backward_cuda": backward(nn.AdaptiveAvgPool3d(3), 2, 3, 3, 3),
    "adaptive_max_pool2d_backward_cuda": backward(nn.AdaptiveMaxPool2d(3), 2, 3, 3),
    "fractional_max_pool2d_backward_cuda": backward(
        nn.FractionalMaxPool2d(2, output_ratio=0.5), 2, 3, 3, 3
    ),
    "fractional_max_pool3d_backward_cuda": backward(
        nn.FractionalMaxPool3d(2, output_ratio=0.5), 2, 3, 3, 3, 3
    ),
    "max_unpooling2d_forward_out": forward(
        lambda x, i: nn.MaxUnpool1d(3, 1)(x.view(1, 1, 4), i.view(1, 1, 4))
    ),
    "max_unpooling3d_forward_out": forward(
        lambda x, i: nn.MaxUnpool3d(3, 1)(x.view(1, 1, 1, 2, 2), i.view(1, 1, 1, 2, 2))
    ),
    "upsample_linear1d_backward_out_cuda": backward(resize("linear"), 1, 2, 4),
    "upsample_bilinear2d_backward_out_cuda": backward(resize("bilinear"), 1, 2, 4, 4),
    "upsample_bicubic2d_backward_out_cuda": backward(resize("bicubic"), 1, 2, 4, 4),
    "upsample_trilinear3d_backward_out_cuda": backward(resize("trilinear"), 1, 2, 4, 4, 4),
    "upsample_bilinear2d_aa_backward_out_cuda": backward(resize("bilinear", True), 1, 2, 4, 4),
    "upsample_bicubic2d_aa_backward_out_cuda": backward(resize("bicubic", True), 1, 2, 4, 4),
    "reflection_pad1d_backward_out_cuda": backward(nn.ReflectionPad1d(1), 2, 3, 8),
    "reflection_pad3d_backward_out_cuda": backward(nn.ReflectionPad3d(1), 2, 3, 8, 8, 8),
    "replication_pad1d_backward_cuda": backward(nn.ReplicationPad1d(1), 2, 3, 4),
    "replication_pad2d_backward_cuda": backward(nn.ReplicationPad2d(1), 2, 3, 4, 4),
    "replication_pad3d_backward_cuda": backward(nn.ReplicationPad3d(1), 2, 3, 4, 4, 4),
    "nll_loss2d_forward_out_cuda_template": forward(
        lambda x, i: nn.NLLLoss()(x.view(1, 1, 2, 2), i.view(1, 2, 2))
    ),
    "ctc_loss_backward_gpu": backward(
        lambda x: nn.CTCLoss()(x, torch.ones(3, 30).long().to(x.device), [50] * 3, [30, 25, 20]),
        *(50, 3, 15),
    ),
    "embedding_bag_backward_cuda_max": backward(
        lambda w: F.embedding_bag(torch.zeros(4, 3).long().to(w.device), w, mode="max"), 4, 3
    ),
    "put_": forward(lambda x, i: x.put_(i, x.clone(), accumulate=True)),
    "_histc_cuda with floating point input": forward(lambda x, i: torch.histc(x, min=0, max=3)),
    "_bincount_cuda": forward(lambda x, i: torch.bincount(i, x)),
    "grid_sampler_2d_backward_cuda": backward(
        lambda x: F.grid_sample(x, torch.zeros(1, 1, 1, 2).to(x.device), align_corners=False),
        *(1, 1, 2, 2),
    ),
    "grid_sampler_3d_backward_cuda": backward(
        lambda x: F.grid_sample(x, torch.zeros(1, 1, 1, 2, 3).to(x.device), align_corners=False),
        *(1, 1, 2, 2, 2),
    ),
    "median CUDA with indices output": forward(lambda x, i: x.median(0)),
    "median CUDA with indices.output": forward(lambda x, i: x.nanmedian(0)),  # the same text
    "scatter_reduce_cuda_prod_": forward(lambda x, i: x.scatter_reduce_(0, i, x.clone(), "prod")),
    "index_reduce_cuda": forward(lambda x, i: x.index_reduce_(0, i, x.clone(), "amax")),
}


@pytest.fixture
def set_mode():
    """Return a function that sets torch's deterministic mode; it is off after the test."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_deterministic_on_cuda_is_refused_at_the_call(name, device, set_mode):
    program, text = REFUSED[name], f"{name} does not have a deterministic implementation"
    program(device, lambda: None)
    with pytest.raises(RuntimeError, match=f"^{text}, but you set .*\\(True\\)'"):
        program(device, lambda: set_mode(True))
    set_mode(False)
    with pytest.warns(UserWarning, match=f"^{text}, but you set .*warn_only=True"):
        program(device, lambda: set_mode(True, warn_only=True))
    torch.vgpu.synchronize(device)


ALLOWED = {
    "bilinear": lambda x, i: backward(resize("bilinear"), 1, 2, 4, 4)(x.device, lambda: None),
    "reflect": lambda x, i: backward(nn.ReflectionPad2d(1), 1, 4, 4)(x.device, lambda: None),
    "mean": lambda x, i: backward(lambda w: F.embedding_bag(i.view(2, 2), w), 4, 3)(
        x.device, lambda: None
    ),
    "bincount": lambda x, i: torch.bincount(i),
    "median": lambda x, i: x.median(),
    "sum": lambda x, i: x.scatter_reduce(0, i, x, "sum"),
    "none": lambda x, i: nn.NLLLoss(reduction="none")(x.view(1, 1, 2, 2), i.view(1, 2, 2)),
    "cumsum": lambda x, i: x.cumsum(0),
    "index_add": lambda x, i: x.index_add(0, i, x),
}


@pytest.mark.parametrize("program", ALLOWED.values(), ids=ALLOWED)
def test_what_is_deterministic_on_cuda_is_allowed(program, device, set_mode):
    forward(program)(device, lambda: set_mode(True))
    torch.vgpu.synchronize(device)


def test_a_kernel_runs_in_the_mode_of_its_call(device, set_mode):
    x, indices = torch.ones(1, 1, 2, device=device), torch.tensor([[[0, 3]]], device=device)
    with Gate(device) as gate, gate.opened_later():
        y = nn.MaxUnpool1d(2)(x, indices)
        set_mode(True)  # waits for the kernel, which reads the mode
    assert y.tolist() == [[[1, 0, 0, 1]]]


# -- set_sync_debug_mode


def fill(x, index, value):
    x[index] = value


# Source of most: test_sync_warning in torch's test_torch.py.
WAITS = {
    "item": lambda x, y, i: y.item(),
    "bool": lambda x, y, i: bool(y),
    "cpu": lambda x, y, i: x.cpu(),
    "nonzero": lambda x, y, i: x.nonzero(),
    "a mask": lambda x, y, i: x[x > 0],
    "one_hot": lambda x, y, i: F.one_hot(i),
    "repeats": lambda x, y, i: torch.repeat_interleave(x, i + 1),
    "a new tensor": lambda x, y, i: torch.tensor([1.0], device=x.device),
    "cholesky": lambda x, y, i: linalg.cholesky(y.view(1, 1) + 1),
    "svd": lambda x, y, i: linalg.svd(y.view(1, 1)),
    "a stream": lambda x, y, i: torch.vgpu.current_stream(x.device).synchronize(),
}
RETURNS = {
    "a masked value": lambda x, y, i: fill(x, x > 0, 1.0),
    "an index": lambda x, y, i: x[i],
    "a value at an index": lambda x, y, i: fill(x, i, y),
    "one_hot": lambda x, y, i: F.one_hot(i, 4),
    "randperm": lambda x, y, i: torch.randperm(200, device=x.device),
    "repeats": lambda x, y, i: torch.repeat_interleave(x, 2, output_size=8),
    "non_blocking": lambda x, y, i: torch.ones(3).to(x.device, non_blocking=True),
    "cholesky_ex": lambda x, y, i: linalg.cholesky_ex(y.view(1, 1)),
    "embedding_bag": lambda x, y, i: F.embedding_bag(i.view(2, 2), x.view(4, 1)),
    "a device": lambda x, y, i: torch.vgpu.synchronize(x.device),
}


@pytest.fixture
def arguments(device):
    yield torch.rand(4, device=device), torch.rand((), device=device), torch.arange(4).to(device)
    torch.vgpu.set_sync_debug_mode(0)


@pytest.mark.parametrize("program", WAITS.values(), ids=WAITS)
def test_what_makes_the_host_wait_warns_or_raises(program, arguments):
    torch.vgpu.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing vgpu operation") as caught:
        program(*arguments)
    assert caught[-1].filename == __file__
    torch.vgpu.set_sync_debug_mode("error")
    assert torch.vgpu.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="called a synchronizing vgpu operation"):
        program(*arguments)


@pytest.mark.parametrize("program", RETURNS.values(), ids=RETURNS)
def test_what_does_not_make_the_host_wait_raises_nothing(program, arguments):
    torch.vgpu.set_sync_debug_mode(2)
    program(*arguments)


def test_an_unknown_mode_is_refused():
    for mode in "warning", 3, -1:
        with pytest.raises(RuntimeError, match="expected one of `default`, `warn`, `error`"):
            torch.vgpu.set_sync_debug_mode(mode)
