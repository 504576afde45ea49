"""What plain PyTorch code does on a virtual GPU: what it does on the CPU, or on a CUDA GPU."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from gates import only_here
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils._pytree import tree_leaves

import d2lpar
from vgpu import virtual_gpus

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


def close(got, wanted, **tolerance):
    torch.testing.assert_close(got.detach().cpu(), wanted.detach().cpu(), **tolerance)


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    ).double()


def batch(n=12):
    generator = torch.Generator().manual_seed(1)
    X = torch.rand(n, 1, 8, 8, generator=generator).double()
    return X, torch.randint(5, (n,), generator=generator)


def gradients(net, X, y):
    net.zero_grad()
    loss = F.cross_entropy(net(X), y)
    loss.backward()
    return loss, [parameter.grad for parameter in net.parameters()]


# -- nn.DataParallel


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("from_cpu", [True, False])
def test_data_parallel_takes_the_step_of_one_device(count, from_cpu):
    devices = virtual_gpus(count)
    X, y = batch()
    net = small_net().eval()  # batch norm would see smaller batches
    loss, wanted = gradients(net, X, y)
    wanted = [grad.clone() for grad in wanted]
    parallel = nn.DataParallel(net.to(devices[0]), device_ids=devices)
    X, y = (X, y.to(devices[0])) if from_cpu else (X.to(devices[0]), y.to(devices[0]))
    output = parallel(X)
    assert output.device == devices[0]
    assert output.shape == (12, 5)
    got, grads = gradients(parallel, X, y)
    close(got, loss)
    for grad, other in zip(grads, wanted, strict=True):
        assert grad.device == devices[0]
        close(grad, other)


def test_data_parallel_runs_on_all_devices(devices):
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x, *, scale):
            seen.append((x.device, self.weight.device, scale.device, len(x)))
            return {"a": x * self.weight * scale, "b": (x + 1,)}

    net = nn.DataParallel(Spy().to(devices[0]), device_ids=[0, 1], output_device=1)
    result = net(torch.ones(5, 2), scale=torch.full((5, 1), 2.0))
    assert sorted(seen, key=str) == [(d, d, d, n) for d, n in zip(devices, (3, 2), strict=True)]
    assert result["a"].device == result["b"][0].device == devices[1]
    assert result["a"].tolist() == [[2, 2]] * 5
    with pytest.raises(RuntimeError, match="must have its parameters and buffers on device vgpu:0"):
        nn.DataParallel(Spy(), device_ids=[0, 1])(torch.ones(4, 2), scale=torch.ones(4, 1))


def test_data_parallel_trains_batch_norm_and_defaults_to_all_devices(devices):
    X, y = batch()
    net = nn.DataParallel(small_net().to(devices[0]))
    assert net.device_ids == [0, 1]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(8):
        losses.append(gradients(net, X, y.to(devices[0]))[0].item())
        optimizer.step()
    assert losses[-1] < losses[0] / 2
    assert net.module[1].running_mean.abs().sum() > 0
    state = {name: value.cpu() for name, value in net.module.state_dict().items()}
    small_net().load_state_dict(state)


def test_a_buffer_of_a_replica_may_change_when_others_are_kept_for_backward(devices):
    class Counting(nn.BatchNorm1d):
        def forward(self, x):
            y = x * self.running_var
            self.running_mean += 1
            return y

    net = nn.DataParallel(Counting(2).to(devices[0]), device_ids=[0, 1])
    x = torch.ones(4, 2, device=devices[0], requires_grad=True)
    net(x).sum().backward()
    assert x.grad.tolist() == [[1, 1]] * 4 and net.module.running_mean.tolist() == [1, 1]


def test_a_failed_kernel_of_a_replica_is_no_silent_garbage(devices):
    net = nn.DataParallel(nn.Embedding(3, 2).to(devices[0]), device_ids=[0, 1])
    output = net(torch.tensor([[0], [1], [2], [9]], device=devices[0]))
    with pytest.raises(torch.AcceleratorError, match="index out of range"):
        output.sum().item()
    with pytest.raises(torch.AcceleratorError, match="embedding on vgpu:1"):
        torch.vgpu.synchronize(1)


@only_here  # the threads of `parallel_apply` are given the current stream of one device
def test_parallel_functions(devices):
    from torch.nn.parallel import gather, parallel_apply, replicate, scatter

    x = torch.arange(10.0).reshape(5, 2).requires_grad_()
    pieces = scatter(x, devices)
    assert [(len(piece), piece.device) for piece in pieces] == [(3, devices[0]), (2, devices[1])]
    nets = replicate(nn.Linear(2, 2).to(devices[0]), devices)
    outputs = parallel_apply(nets, pieces)
    assert [output.device for output in outputs] == devices
    assert gather(outputs, devices[1]).device == devices[1]
    assert torch.equal(gather(pieces, 0).cpu(), x)
    assert torch.equal(gather(pieces, "cpu"), x)
    gather(pieces, 0).sum().backward()  # with nothing in between
    assert x.grad.tolist() == [[1, 1]] * 5
    total = nn.parallel.comm.reduce_add([piece[:2] for piece in pieces], 0)
    assert total.tolist() == [[6, 8], [10, 12]]
    copies = nn.parallel.comm.broadcast(pieces[0], devices)
    assert [each.device for each in copies] == devices
    (cut, rest) = nn.parallel.comm.scatter(x, [0, 1], chunk_sizes=[1, 4])
    assert (len(cut), len(rest)) == (1, 4)


# -- saving and copying


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, **options)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, "vgpu:1"),
        ("cpu", "cpu"),
        (CPU, "cpu"),
        ("vgpu:0", "vgpu:0"),
        ({"vgpu:1": "vgpu:0"}, "vgpu:0"),
        ({"vgpu:1": "cpu"}, "cpu"),
    ],
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_tensors_are_loaded_where_asked(device, where, expected, weights_only):
    state = {"x": torch.arange(6.0, device=device).reshape(2, 3).t(), "n": 3}
    state["p"] = nn.Parameter(torch.ones(2, device=device))
    loaded = saved(state, map_location=where, weights_only=weights_only)
    assert loaded["n"] == 3
    assert loaded["x"].device == loaded["p"].device == torch.device(expected)
    assert loaded["x"].stride() == (1, 3)
    close(loaded["x"], state["x"])
    assert loaded["p"].requires_grad
    loaded["x"] += 1
    close(loaded["x"], state["x"] + 1)


def test_loading_to_a_device_that_is_not_there(device):
    buffer = io.BytesIO()
    torch.save(torch.ones(3, device=device), buffer)
    virtual_gpus(1)
    for options in ({}, {"map_location": "vgpu:5"}):
        buffer.seek(0)
        with pytest.raises(RuntimeError, match="invalid device ordinal: vgpu:[15] of 1 virtual"):
            torch.load(buffer, **options)
    buffer.seek(0)
    assert torch.load(buffer, map_location="vgpu").device == torch.device("vgpu:0")


@pytest.mark.parametrize("what", [torch.ones, lambda n, device: nn.Linear(n, n).to(device)])
def test_no_tensor_is_shared_with_another_process(device, what):
    """A copy in the other process would hide what it writes; CUDA shares the memory."""
    with pytest.raises(RuntimeError, match=r"vgpu:1 cannot be shared.*send tensor.cpu\(\)"):
        torch.multiprocessing.get_context("spawn").SimpleQueue().put(what(2, device=device))


def test_pickle_keeps_what_a_tensor_is(device):
    noted = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    noted.note = "kept"
    for x in (
        torch.rand(2, 3, device=device, requires_grad=True),
        torch.rand(3, 2, device=device, dtype=torch.float64).t(),
        torch.tensor(3 + 4j, device=device),
        torch.zeros(0, 3, device=device),
        noted,
    ):
        again = pickle.loads(pickle.dumps(x))
        assert (again.device, again.dtype, again.shape) == (x.device, x.dtype, x.shape)
        assert again.requires_grad == x.requires_grad
        assert isinstance(again, nn.Parameter) == isinstance(x, nn.Parameter)
        close(again, x)
    assert again.note == "kept"


def test_deepcopy(device):
    x = torch.ones(3, device=device)
    x.grad, x.note = torch.ones_like(x), [1]
    y = copy.deepcopy([x, x, x.t(), x.grad, x.note])
    x.grad.zero_()
    assert y[0] is y[1] and y[0] is not x and y[0].grad.tolist() == [1, 1, 1]
    assert y[0].grad is y[3] and y[0].note is y[4] is not x.note
    with pytest.raises(RuntimeError, match="graph leaves|created explicitly by the user"):
        copy.deepcopy(x.requires_grad_() * 2)
    assert copy.copy(x) is not x and copy.deepcopy(x).requires_grad


# -- optimizers

NO_OPTIMIZERS = {"Optimizer", "SparseAdam"}  # the base; a virtual GPU has dense tensors only
ALL_OPTIMIZERS = [
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type)
    and issubclass(value, torch.optim.Optimizer)
    and name not in NO_OPTIMIZERS
]
WITH_OPTIONS = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
]


def steps(name, where, **options):
    matrices_only = name == "Muon"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5, bias=not matrices_only), nn.Tanh(), nn.Linear(5, 3))
    if matrices_only:
        net[2].bias.requires_grad_(False)
    X, y = (torch.rand(7, n).double().to(where) for n in (6, 3))
    net.double().to(where)
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, name)(parameters, **options)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(X), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"lr": 0.05} if name != "Adafactor" else {}) for name in ALL_OPTIMIZERS),
        *((name, {"lr": 0.05, "foreach": True, **options}) for name, options in WITH_OPTIONS),
        *((name, {"lr": 0.05, "foreach": False, **options}) for name, options in WITH_OPTIONS),
        ("Adam", {"lr": torch.tensor(0.01), "foreach": False}),  # with foreach torch refuses it
    ],
)
def test_optimizers_take_the_steps_of_the_cpu(name, options, device):
    torch.testing.assert_close(steps(name, device, **options), steps(name, CPU, **options))


def test_clipping(device):
    def train(where):
        torch.manual_seed(0)
        net = nn.Linear(4, 2).to(where)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        norms = []
        for _ in range(4):
            optimizer.zero_grad()
            (net(torch.ones(3, 4, device=where)) * 10).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
            nn.utils.clip_grad_value_(net.parameters(), 0.3)
            optimizer.step()
        return net, norms

    (net, norms), (expected, expected_norms) = train(device), train(CPU)
    close(net.weight, expected.weight)
    assert norms[0].device == device
    close(torch.stack(norms), torch.stack(expected_norms))
    net.weight.grad = torch.full_like(net.weight, float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True)


# -- autocast

bf16, f32 = torch.bfloat16, torch.float32


def autocast(**options):
    return torch.autocast("vgpu", dtype=bf16, **options)


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]), bf16),
        (lambda x: torch.atan2(x.bfloat16(), x.bfloat16()), bf16),
        (lambda x: (x @ x).softmax(0), f32),
        (lambda x: F.huber_loss(x.bfloat16(), x.bfloat16()), f32),
        (lambda x: torch.linalg.vector_norm(x.bfloat16()), f32),
        *(
            (lambda x, mode=mode: F.interpolate(x.bfloat16().view(1, 1, 4, 4), 8, mode=mode), f32)
            for mode in ("nearest", "bilinear", "bicubic", "nearest-exact")
        ),
        *((lambda x, p=p: torch.linalg.matrix_norm(x.bfloat16(), p), f32) for p in (2, "nuc")),
        (lambda x: torch.nuclear_norm(x.bfloat16()), f32),
        (lambda x: torch.atan2(x, x), f32),
        (lambda x: x.bfloat16() * 2, bf16),
        (lambda x: F.batch_norm(x, None, None, training=True), f32),
        (lambda x: F.batch_norm(x.bfloat16(), x[0], x[1], training=True), bf16),
        (lambda x: x.sum(dtype=torch.float64), torch.float64),
        (lambda x: x.double() @ x.double(), torch.float64),
        (lambda x: x.long().cumsum(0), torch.int64),
    ],
)
def test_autocast_gives_the_dtypes_of_cuda(operation, dtype, device):
    x = torch.rand(4, 4, device=device)
    with autocast():
        assert torch.is_autocast_enabled("vgpu")
        result = operation(x)
    assert result.dtype == dtype
    assert result.device == device
    assert result.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "third", "dtype"),
    [("fp16", "linalg_fp16", bf16), ("fp32", "torch_need_autocast_promote", f32)],
)
def test_autocast_gives_the_dtypes_of_torchs_own_lists_for_cuda(kind, third, dtype, device):
    lists, modules = vars(AutocastTestLists(device)), (torch, torch._C._nn, torch._C._linalg)
    for name, args, *options in lists[f"torch_{kind}"] + lists[f"nn_{kind}"] + lists[third]:
        if type(args) is tuple and not name.startswith("cudnn"):
            operator = next(getattr(each, name) for each in modules if hasattr(each, name))
            with autocast():
                result = operator(*args, **dict(*options))
            assert tree_leaves(result)[0].dtype == dtype, name


def test_autocast_nests_and_leaves_the_cpu_alone(device):
    x = torch.rand(3, 3, device=device)
    with autocast():
        with autocast(enabled=False):
            assert (x @ x).dtype == f32
        assert (x.cpu() @ x.cpu()).dtype == f32
        assert (x @ x).dtype == bf16
        with torch.autocast("cpu", dtype=bf16):
            assert (x.cpu() @ x.cpu()).dtype == bf16
    assert (x @ x).dtype == f32
    with torch.autocast("vgpu", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16

    @autocast()
    def function(x):
        return x @ x

    assert function(x).dtype == bf16
    assert torch.get_autocast_dtype("vgpu") in (bf16, torch.float16)


def test_autocast_trains_with_gradients_in_float32(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    X = torch.rand(5, 6, device=device)
    y = torch.arange(5, device=device) % 3
    full, wanted = gradients(net, X, y)
    wanted = [grad.clone() for grad in wanted]
    net.zero_grad()
    with autocast():
        output = net(X)
        loss = F.cross_entropy(output, y)
    assert (output.dtype, loss.dtype) == (bf16, f32)
    loss.backward()
    close(loss, full, rtol=0.05, atol=0)  # twelve times the rounding of bfloat16
    for parameter, grad in zip(net.parameters(), wanted, strict=True):
        assert parameter.grad.dtype == f32
        close(parameter.grad, grad, rtol=0, atol=0.08 * grad.abs().max().item())  # twenty times


def test_autocast_refuses_binary_cross_entropy(device):
    x = torch.full((3,), 0.5, device=device)
    with autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(x, x)
    with autocast(), pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
        nn.BCELoss()(x, x)
    assert F.binary_cross_entropy(x, x).item() == pytest.approx(0.6931, abs=1e-4)


def test_autocast_in_data_parallel(devices):
    class Net(nn.Linear):
        @autocast()  # as torch's notes on automatic mixed precision say, for CUDA too
        def forward(self, x):
            return super().forward(x)

    net = nn.DataParallel(Net(4, 2).to(devices[0]), device_ids=devices)
    net(torch.rand(6, 4)).float().sum().backward()
    assert net(torch.rand(6, 4)).dtype == bf16
    assert net.module.weight.grad.dtype == f32


# -- pinned memory


def test_pinned_memory():
    x = torch.arange(6).reshape(2, 3)
    assert not x.is_pinned()
    y = x.pin_memory()
    assert y.is_pinned() and not x.is_pinned()
    assert y.device == CPU and torch.equal(x, y)
    assert y[0].is_pinned() and y.t().is_pinned() and not y.clone().is_pinned()
    assert y.pin_memory().data_ptr() == y.data_ptr()
    y += 1
    assert x[0, 0] == 0


# -- tensors


def test_repr_and_conversions(device):
    x = torch.tensor([[1.5, 2.0]], device=device)
    assert repr(x) == "tensor([[1.5000, 2.0000]], device='vgpu:1')"
    assert repr(torch.ones(1, device=device, requires_grad=True)) == (
        "tensor([1.], device='vgpu:1', requires_grad=True)"
    )
    assert repr(nn.Parameter(x)).startswith("Parameter containing:\ntensor([[1.5000, 2.0000]], dev")
    assert "grad_fn=<MulBackward0>" in repr(x.requires_grad_() * 2)
    assert f"{x[0, 0]:.2f}" == "1.50" and f"{x[0, 1]}" == f"{x.cpu()[0, 1]}"
    assert repr(torch.zeros(0, device=device)) == "tensor([], device='vgpu:1')"
    assert x.tolist() == [[1.5, 2]]
    assert float(x[0, 0]) == 1.5 and int(x[0, 1]) == 2 and bool(x[0, 0])
    assert x.device.type == "vgpu" and x.get_device() == 1
    assert not x.is_cuda and not x.is_cpu
    assert isinstance(x, torch.Tensor)
    assert [len(row) for row in x] == [2]
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x > 0)
    with pytest.raises(RuntimeError, match="converted to Scalar"):
        x.item()


def test_numpy_is_refused_as_on_cuda(device):
    x = torch.ones(2, device=device)
    text = "can't convert vgpu:1 device type tensor to numpy. Use Tensor.cpu\\(\\) to copy"
    for convert in x.numpy, x.__array__:
        with pytest.raises(TypeError, match=text):
            convert()
    for way in x.cpu().numpy(), x.numpy(force=True), x.requires_grad_().numpy(force=True):
        assert way.tolist() == [1, 1]


def test_numpy_arrays_reach_the_device(device):
    import numpy

    array = numpy.arange(3.0)
    x = torch.from_numpy(array).to(device)
    assert torch.tensor(array, device=device).tolist() == x.tolist() == [0, 1, 2]
    assert torch.as_tensor([1, 2], device=device).device == device
    assert torch.as_tensor(x, device=device) is x
    assert torch.asarray(array, device=device).device == device


def test_factories(device):
    with torch.device(device):
        assert torch.zeros(2).device == nn.Linear(2, 2).weight.device == device
    torch.set_default_device(device)
    try:
        assert torch.rand(2).device == torch.tensor([1]).device == device
    finally:
        torch.set_default_device(None)
    x = torch.zeros(2, 3, device=device)
    for y in (
        x.new_zeros(4),
        x.new_tensor([1, 2]),
        torch.ones_like(x),
        torch.full((2,), 3, device=device),
        torch.eye(3, device=device),
        torch.linspace(0, 1, 5, device=device),
        torch.arange(0, 1, 0.3, device="vgpu:1"),
        torch.empty(3, device=1),
        nn.Linear(2, 3, device=device).weight,
    ):
        assert y.device == device
    assert x.new_tensor([1.0], requires_grad=True).requires_grad
    assert not x.new_tensor([1.0]).requires_grad and x.int().new_tensor([1.5]).item() == 1
    assert torch.arange(0, 1, 0.3, device=device).shape == (4,)
    assert torch.arange(0, 1, 0.2, device=device).shape == (5,)
    assert torch.zeros_like(x, device="cpu").device == CPU
    assert torch.zeros_like(x.cpu(), device=device).device == device


def check(function, device, *tensors):
    """Assert that `function` does to tensors on `device` what it does to those of the CPU."""
    expected = [tensor.clone() for tensor in tensors]
    got = [tensor.to(device) for tensor in tensors]
    wanted_result, result = function(*expected), function(*got)
    for a, b in zip([*got, result], [*expected, wanted_result], strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert a.device == device
        close(a, b)


def through_views(x):
    x[1:, ::2] += 1
    x.t()[0].mul_(3)
    x.view(-1)[3:5].zero_()
    x.unbind(0)[2].add_(x[0])
    x.diagonal().fill_(7)
    x.unfold(0, 2, 2)[0].sub_(1)
    x.narrow(1, 2, 1).copy_(x[:, :1])
    return x.flatten()


def layout(x):
    y = x.clone()
    y.t_()
    y.unsqueeze_(1)
    y.squeeze_(1)
    y.transpose_(0, 1)
    y.swapaxes_(0, 1)
    return y


def resized(x):
    y = x.clone()
    y.resize_(2)
    y.resize_(3, 2)
    y[2] = 5
    y[1, 1] = 6
    y[1, 0] = 7
    return y.resize_(1, 2, 1, 1, memory_format=torch.channels_last)


def written_out(x):
    out = torch.empty(0, device=x.device)
    torch.add(x, 1, out=out)
    torch.mul(out, 2, out=out)
    view = torch.zeros(6, 4, device=x.device)
    torch.add(x, x, out=view[::2])
    torch.cat([x, out], out=(joined := torch.empty(0, device=x.device)))
    flat = torch.zeros(12, device=x.device)
    torch.add(x, 1, out=flat[:0])
    return joined + view + flat.sum()


def indexed(x):
    y = x.clone()
    index = torch.tensor([2, 0], device=x.device)
    y[index] = x[index] * 2
    y[y > 6] = -1
    y[0, [1, 2]] = 9
    y[torch.tensor([0, 1])] += 1  # indices of the CPU
    y[torch.tensor([True, False, True])] *= 2
    y[1] = torch.tensor(4.0)
    y[..., -1] = torch.tensor([1.0], device=x.device)
    y[:, None, 0] = 3
    return torch.cat([y[index.cpu()], y[y > 0][:4][None], y[[0, 1], :], y[None, 1], y[0:1]])


def scalars_of_the_cpu(x):
    one = torch.tensor(1.5)
    y = x + one
    y = one - y
    y.mul_(one).add_(x, alpha=2)
    y = torch.where(y > one, y, one)
    y = torch.where(y > 2, 0.5, y)
    y = torch.maximum(y, one) ** torch.tensor(2)
    y = torch.clamp(y, min=one)
    y /= torch.tensor(2)
    y = y.masked_fill(y > 9, torch.tensor(9.0))
    return torch.addcmul(y, y, x, value=0.5)


def assigned_data(x):
    y = torch.zeros(1, device=x.device)
    y.data = x * 2
    y.data += 1
    y.data[0] = 4
    y.data = y.data.t()
    return y


def dtypes(x):
    y = x.double().half().float() + x.int()
    y += x.bool()
    return y + (x.to(torch.uint8) % 3) + x.type(torch.float64).to(x)


def foreach(x):
    pair = [x.clone(), x[0].clone()]
    torch._foreach_add_(pair, 1)
    torch._foreach_mul_(pair, [2.0, 3.0])
    torch._foreach_addcdiv_(pair, pair, [x + 1, x[0] + 1], 0.5)
    return pair[0] + pair[1] + torch.stack(torch._foreach_norm(pair)).sum()


def chunked(x):
    a, b = x.chunk(2, 1)
    c, d = x.split([1, 3], 1)
    return torch.cat([a + b, d[:, :2], c.expand(3, 2)]) + torch.stack(x.unbind()).sum()


@pytest.mark.parametrize(
    "function",
    [
        through_views,
        layout,
        resized,
        written_out,
        indexed,
        scalars_of_the_cpu,
        assigned_data,
        dtypes,
        foreach,
        chunked,
        lambda x: F.layer_norm(x.t().bfloat16(), (3,), x[:, 0], x[:, 1]),
        lambda x: F.group_norm(x.bfloat16()[None], 3, x[:, 0], x[:, 1]),
    ],
)
@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
def test_tensors_behave_as_on_the_cpu(function, inference, device):
    x = torch.arange(12.0).reshape(3, 4) / 2
    with warnings.catch_warnings(), torch.inference_mode(inference):
        warnings.simplefilter("ignore")
        check(function, device, x)


def test_a_view_sees_what_is_written_to_its_base_and_the_other_way(device):
    x = torch.zeros(4, 4, device=device)
    row, flat, turned = x[1], x.view(16), x.t()
    assert row._base is x and row.is_set_to(x[1])
    flat[5] = 1
    turned[3] += 2
    assert row.tolist() == [0, 1, 0, 2]
    x.zero_()
    assert row.sum() == turned.sum() == flat.sum() == 0
    detached = x.detach()
    detached += 3
    assert x.sum().item() == 48
    assert torch.view_as_real(torch.zeros(2, dtype=torch.complex64, device=device)).shape == (2, 2)
    assert x.view(torch.int32)[0, 0].item() == 0x40400000


@only_here  # a warning comes once
def test_what_has_too_many_elements_is_not_written_out(device):
    out = torch.zeros(5, device=device)
    with pytest.warns(UserWarning, match="was resized"):
        torch.add(torch.ones(3, device=device), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_what_is_resized_within_its_memory_stays_there(device):
    ones, out = torch.ones(2, 3, device=device), torch.zeros(6, device=device)
    alias, address = out.detach(), out.data_ptr()
    torch.add(ones, 1, out=out)
    assert out.tolist() == [[2] * 3] * 2 and alias.tolist() == [2] * 6
    alias = out.detach()
    torch.masked_select(ones[0], ones[0] > 0, out=out)
    assert out.tolist() == [1] * 3 and alias.tolist() == [[1] * 3, [2] * 3]
    assert out.data_ptr() == address


def test_indices_of_a_device_do_not_reach_into_the_cpu(device):
    x = torch.zeros(4)
    index = torch.tensor([1], device=device)
    with pytest.raises(RuntimeError):
        x.index_fill_(0, index, 1)
    assert x.sum() == 0
    x[0] = torch.ones((), device=device)
    x[2:] = torch.ones(2, device=device)
    assert x.tolist() == [1, 0, 1, 1]
    y = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        y[[0, 1]] = torch.ones(2)
    with pytest.raises(IndexError, match="too many indices"):
        y[0, 0]
    with pytest.raises(IndexError, match="out of bounds"):
        y[3]


def test_an_index_of_the_cpu_puts_values_without_changing_the_tensor(device):
    x, value = torch.zeros(3, device=device), torch.ones((), device=device)
    assert x.index_put((torch.tensor([2, 0]),), value).tolist() == [1, 0, 1] and not x.any()


# -- autograd


def test_gradients_of_gradients(device):
    def both(where):
        x = torch.linspace(0.1, 1, 5, device=where, requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum() + x.sin().prod(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first, second

    for a, b in zip(both(device), both(CPU), strict=True):
        assert a.device == device
        close(a, b)
    x = torch.rand(3, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: (x * x.exp()).sum(), x)
    jacobian = torch.autograd.functional.jacobian(lambda x: x**2, x.detach())
    close(jacobian, torch.diag(2 * x))


def test_gradients_cross_devices(devices):
    a, b = devices
    x = torch.ones(3, device=a, requires_grad=True)
    w = torch.full((3,), 2.0, requires_grad=True)
    y = (x.to(b) * w.to(b)).sum().cpu() + (x * 3).sum().to(b).cpu()
    y.backward()
    assert (x.grad.device, x.grad.tolist()) == (a, [5, 5, 5])
    assert (w.grad.device, w.grad.tolist()) == (CPU, [1, 1, 1])


class Moved(torch.autograd.Function):
    """Double a tensor; its gradient, or only the sum of that, is moved to a device."""

    @staticmethod
    def forward(ctx, unused, x, where, whole=True):
        ctx.where, ctx.whole = where, whole
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None, (grad if ctx.whole else grad.sum()).to(ctx.where), None, None


class Short(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("at", [CPU, "vgpu:0", "vgpu:1"])
@pytest.mark.parametrize("where", [CPU, "vgpu:0", "vgpu:1"])
def test_a_gradient_must_be_on_the_device_of_its_tensor(devices, at, where):
    """The texts are those of torch/csrc/autograd/engine.cpp, which moves a number."""
    x, other = torch.ones(2, device=at, requires_grad=True), torch.ones(2, device=where)
    calls = {
        "Function MovedBackward returned an ": lambda: (
            Moved.apply(x.detach(), x * 1, where).sum().backward()
        ),
        "": lambda: torch.autograd.backward([x * 3] * 2, [torch.ones_like(x), other]),
    }
    for said, call in calls.items():
        if torch.device(at) == torch.device(where):
            call()
            continue
        said += f"invalid gradient at index 1 - expected device {at} but got {where}"
        with pytest.raises(RuntimeError, match=f"^{said}$"):
            call()
        assert x.grad is None
    with pytest.raises(RuntimeError, match="incorrect number of gradients .expected 2, got 1"):
        Short.apply(x, x).sum().backward()
    x.grad = None
    scalar = torch.ones((), device=at, requires_grad=True)
    y = Moved.apply(None, scalar, where, False) * x
    y.sum().backward(torch.tensor(2.0, device=where))
    assert (x.grad.tolist(), scalar.grad.item()) == ([4, 4], 4)
    assert x.grad.device == scalar.grad.device == x.device


def test_traces_have_captured_tensors_as_constants(device):
    """`make_fx`, and `torch.func.linearize`, which is made of it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def results(where):
        captured = torch.arange(3.0, device=where)
        x = torch.full((3,), 0.5, device=where)
        traced = make_fx(lambda x: x * (captured + 1) + torch.ones(3, device=where))(x)
        captured.mul_(2)
        value, tangent = torch.func.linearize(lambda x: x.sin() * captured, x)
        return [y.tolist() for y in (traced(x * 4), value, tangent(x))]

    for a, b in zip(results(device), results(CPU), strict=True):
        assert a == pytest.approx(b)


def test_checkpoint(device):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(device)
    x = torch.rand(3, 4, device=device, requires_grad=True)

    def gradient(run):
        x.grad = None
        torch.manual_seed(5)
        run(x).sum().backward()
        return x.grad

    for reentrant in False, True:
        got = gradient(lambda x, reentrant=reentrant: checkpoint(net, x, use_reentrant=reentrant))
        close(got, gradient(net))


def test_hooks(device):
    seen = []
    net = nn.Linear(3, 2).to(device)
    net.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].device))
    net.weight.register_hook(lambda grad: grad * 10)
    net.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    net(torch.ones(1, 3, device=device)).sum().backward()
    assert seen == ["before", device, [2, 2]] or seen == ["before", [2, 2], device]
    assert net.weight.grad.tolist() == [[20] * 3] * 2
    with torch.autograd.graph.save_on_cpu():
        x = torch.ones(2, device=device, requires_grad=True)
        x.exp().sum().backward()
    close(x.grad, torch.ones(2).exp())


def test_grad_modes(device):
    x = torch.ones(2, device=device, requires_grad=True)
    with torch.no_grad():
        y = x * 2
        x += 1
    assert not y.requires_grad and x.tolist() == [2, 2]
    with torch.inference_mode():
        z = x * 2
        z += 1
    assert z.is_inference() and z.tolist() == [5, 5]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        x * z
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x += 1
    with pytest.raises(RuntimeError, match="a second time"):
        loss = x.exp().sum()
        loss.backward()
        loss.backward()
    assert x.is_leaf and (x * 2).grad_fn is not None
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
        (x * 0).sqrt().mul(0).div(0).sum().backward()


def test_inference_mode_evaluates_a_net(device):
    X, y = batch()
    net = small_net().eval()
    nets = [net, copy.deepcopy(net).to(device)]
    with torch.inference_mode():
        output = nets[1](X.to(device))
        loss = F.cross_entropy(output, y.to(device))
        close(loss, F.cross_entropy(nets[0](X), y))
        assert loss.cpu().device == CPU and loss.is_inference()
        assert loss.to("vgpu:0").device.index == 0
        assert "device='vgpu:1'" in repr(output)
        encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
        z = torch.rand(2, 3, 4)
        close(copy.deepcopy(encoder).to(device)(z.to(device)), encoder(z), rtol=1e-4, atol=1e-5)


def test_gradients_accumulate_and_are_assigned(device):
    x = torch.ones(2, device=device, requires_grad=True)
    for _ in range(3):
        (x * 2).sum().backward()
    assert x.grad.tolist() == [6, 6]
    x.grad.zero_()
    x.grad = torch.full((2,), 3.0, device=device)
    x.grad += 1
    assert x.grad.tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="device"):
        x.grad = torch.ones(2)


def test_modules_that_keep_state(device):
    mean, deviation = torch.batch_norm_stats(torch.full((4, 3), 6e4, device=device).half(), 1e-5)
    assert mean.dtype == deviation.dtype == f32 and mean.tolist() == [60000] * 3
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.rand(2, 5, 3)
    wanted = lstm(x)[0]
    close(lstm.to(device)(x.to(device))[0], wanted)
    packed = nn.utils.rnn.pack_padded_sequence(x.to(device), [5, 3], batch_first=True)
    assert packed.data.device == device
    padded, lengths = nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)
    close(padded[0], wanted[0])
    assert lengths.tolist() == [5, 3]
    packed = nn.utils.rnn.pack_padded_sequence(
        x.to(device).requires_grad_(), torch.tensor([2, 5]), True, enforce_sorted=False
    )
    assert packed.batch_sizes.tolist() == [2, 2, 1, 1, 1]
    lstm(packed)[0].data.sum().backward()
    assert lstm.weight_ih_l0.grad.isfinite().all()


def test_splitting_at_indices_of_the_cpu(device):
    x = torch.arange(6.0, device=device)
    for where in ([1, 3], [2, 4]):
        pieces = x.tensor_split(torch.tensor(where))
        assert [len(piece) for piece in pieces] == [where[0], where[1] - where[0], 6 - where[1]]
        pieces[1].zero_()
    assert x.tolist() == [0, 0, 0, 0, 4, 5]


def test_lazy_modules_and_initialisation(device):
    net = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.LazyBatchNorm1d()).to(device)
    assert net(torch.rand(4, 5, device=device)).device == device
    double = nn.LazyLinear(3, dtype=torch.float64).to(device).requires_grad_(False)
    assert double(torch.ones(4, 5, device=device).double()).dtype == torch.float64
    assert net[0].weight.shape == (3, 5) and not double.weight.requires_grad
    (elsewhere := nn.LazyLinear(3).to(device)).weight.materialize((3, 2), device="vgpu:0")
    assert elsewhere.weight.device == torch.device("vgpu:0")
    nn.init.trunc_normal_(net[0].weight)
    nn.init.orthogonal_(net[0].weight)
    close(net[0].weight @ net[0].weight.T, torch.eye(3))


def test_optimizers_and_clipping_take_one_kernel_for_many_tensors():
    """As on CUDA, where `foreach` is the default."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).to("vgpu:0")
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4, device="vgpu:0")).sum().backward()
    with d2lpar.Timeline() as timeline:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        trainer.step()
    assert len(timeline.select(kind="kernel")) < 20
