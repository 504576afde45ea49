"""torch's ways to train on many GPUs, on virtual ones: each is compared with one device."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import d2lpar
from d2lpar.virtual import Link, start_recording, stop_recording

LR = 2.0**-12  # with whole numbers for data, all steps below are exact in float64


@pytest.fixture(scope="module", autouse=True)
def on_cpus():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("D2LPAR_DEVICES", "vgpu")
        yield


def join(**options):
    """Let this process be a rank with a virtual GPU; return its rank, the ranks, the device."""
    warnings.simplefilter("ignore")
    rank, k = dist.get_rank(), dist.get_world_size()
    device = d2lpar.virtual_gpus(k, **options)[rank]
    torch.vgpu.set_device(device)
    store = dist.PrefixStore("vgpu", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(store=store, rank=rank, world_size=k)
    return rank, k, device


def whole_numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


class Net(nn.Sequential):
    """A net of whole numbers."""

    def __init__(self, widths=(8, 12, 4)):
        layers = []
        for place, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
            layer = nn.Linear(before, after).double()
            with torch.no_grad():
                layer.weight.copy_(whole_numbers(after, before, seed=place))
                layer.bias.copy_(whole_numbers(after, seed=100 + place))
            layers += [layer, nn.ReLU()]
        super().__init__(*layers[:-1])


X, Y = whole_numbers(8, 8, seed=1000), whole_numbers(8, 4, seed=1001)


def part(tensor, rank, k):
    return tensor.chunk(k)[rank]


def mean_square(outputs, targets):
    return (outputs - targets).square().sum() / len(targets)


def train(net, inputs, targets, num_steps=2, device="cpu"):
    """Train; return the losses, the first gradients and the parameters at the end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.5)
    losses, first = [], None
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = mean_square(net(inputs.to(device)), targets.to(device))
        loss.backward()
        first = first or [p.grad.detach().cpu() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(loss.item())
    return losses, first, [p.detach().cpu() for p in net.parameters()]


def assert_equal(values, expected):
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


# -- DistributedDataParallel


class WithUnused(Net):
    """A net with a layer that forward leaves out on some ranks."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 4).double()

    def forward(self, x):
        for layer in list(self)[:3]:
            x = layer(x)
        return x


def ddp_variants():
    rank, k, device = join()
    _, gradients, parameters = train(Net(), X, Y)
    mine = part(X, rank, k), part(Y, rank, k)
    for options in (
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"device_ids": [device.index]},
    ):
        ddp = DistributedDataParallel(Net().to(device), **options)
        _, first, after = train(ddp, *mine, device=device)
        assert_equal(first, gradients)
        assert_equal(after, parameters)
    ddp = DistributedDataParallel(WithUnused().to(device), find_unused_parameters=True)
    _, first, after = train(ddp, *mine, device=device)
    assert_equal(first[:4], gradients)
    assert_equal(after[:4], parameters)


def test_ddp_takes_the_steps_of_one_device():
    d2lpar.launch(ddp_variants)


def ddp_without_sync():
    rank, k, device = join()
    expected = Net()
    for inputs, targets in zip(X.chunk(2), Y.chunk(2), strict=True):
        mean_square(expected(inputs), targets).backward()
    ddp = DistributedDataParallel(Net().to(device))
    batches = [
        (part(inputs, rank, k).to(device), part(targets, rank, k).to(device))
        for inputs, targets in zip(X.chunk(2), Y.chunk(2), strict=True)
    ]
    recording = start_recording()
    with ddp.no_sync():
        mean_square(ddp(batches[0][0]), batches[0][1]).backward()
    torch.vgpu.synchronize()
    stop_recording(recording)
    assert not [span for span in recording if span.kind == "collective"]
    mean_square(ddp(batches[1][0]), batches[1][1]).backward()
    assert_equal([p.grad.cpu() for p in ddp.parameters()], [p.grad for p in expected.parameters()])

    # Rank 0 has three batches, rank 1 two: gradients are divided by 2 in the third step, too.
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for count in range(3):
        optimizer.zero_grad()
        for other in range(k):
            if count < 3 - other:
                (mean_square(net(part(X, other, k)), part(Y, other, k)) / k).backward()
        optimizer.step()
    ddp = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    with ddp.join():
        for _ in range(3 - rank):
            optimizer.zero_grad()
            mean_square(ddp(part(X, rank, k).to(device)), part(Y, rank, k).to(device)).backward()
            optimizer.step()
    assert_equal([p.cpu() for p in ddp.parameters()], [*net.parameters()])


def test_ddp_without_sync_and_with_uneven_inputs():
    d2lpar.launch(ddp_without_sync)


def ddp_buffers():
    rank, k, device = join()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).to(device)
    ddp = DistributedDataParallel(net)
    batches, means = torch.randn(2, 16, 8), []
    for batch in batches:
        ddp(batch.to(device)).sum().backward()
        means.append(net[0].running_mean.cpu())
    return batches[1], means, [p.detach().cpu() for p in net.parameters()]


def test_ddp_broadcasts_parameters_and_buffers_of_rank_0():
    (_, (mean, _), parameters), (batch, (_, other), others) = d2lpar.launch(ddp_buffers)
    assert_equal(others, parameters)
    torch.testing.assert_close(other, 0.9 * mean + 0.1 * batch.mean(0))


# -- hooks


def doubling_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(2))


def chained_hook(group, bucket):
    """Sum by reduce_scatter and all_gather, each behind the other."""
    k = dist.get_world_size()
    buffer = bucket.buffer().div_(k)
    padded = nn.functional.pad(buffer, (0, -len(buffer) % k))
    mine = torch.empty_like(padded[: len(padded) // k])
    first = dist.reduce_scatter_tensor(mine, padded, group=group, async_op=True)

    def gather(future):
        dist.all_gather_into_tensor(padded, future.value()[0], group=group)
        return padded[: len(buffer)]

    return first.get_future().then(gather)


def ddp_hooks(peer_link=None):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    rank, k, device = join(peer_link=peer_link)
    mine = part(X, rank, k), part(Y, rank, k)
    _, gradients, _ = train(Net(), X, Y)
    for hook in (default_hooks.allreduce_hook, chained_hook, doubling_hook):
        ddp = DistributedDataParallel(Net().to(device), bucket_cap_mb=1e-4)
        ddp.register_comm_hook(None, hook)
        factor = 2 if hook is doubling_hook else 1
        assert_equal(train(ddp, *mine, device=device)[1], [factor * g for g in gradients])
    for hook in dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS:
        ddp = DistributedDataParallel(Net().to(device), bucket_cap_mb=1e-4)
        ddp._register_builtin_comm_hook(hook)
        assert_equal(train(ddp, *mine, device=device)[1], gradients)
    for hook in default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook:
        ddp = DistributedDataParallel(Net().to(device), bucket_cap_mb=1e-4)
        ddp.register_comm_hook(None, hook)
        first = train(ddp, *mine, device=device)[1]
        torch.testing.assert_close(first, gradients, rtol=2e-2, atol=1)
    results = []
    for where in "cpu", device:
        ddp = DistributedDataParallel(Net((8, 64, 4)).float().to(where))
        options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
        state = powerSGD_hook.PowerSGDState(None, min_compression_rate=1, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        mine = part(X, rank, k).float(), part(Y, rank, k).float()
        results.append(train(ddp, *mine, num_steps=5, device=where))
    torch.testing.assert_close(results[0], results[1])


def test_communication_hooks():
    d2lpar.launch(ddp_hooks)


def test_communication_hooks_on_a_slow_link():
    d2lpar.launch(ddp_hooks, peer_link=Link(1e9, latency=0.01))
