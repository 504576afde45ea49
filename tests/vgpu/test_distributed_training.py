"""torch's ways to train on many GPUs, on virtual ones: each is compared with one device."""

import copy
import functools
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoints
from gates import held_collectives, named
from ranks import after_test, everywhere, in_ranks, job_of, set_up
from torch import nn
from torch.distributed import fsdp, pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional as autograd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from waiting import wait_until

import d2lpar
from vgpu import Link, start_recording, stop_recording

LR = 2.0**-12  # with whole numbers for data, all steps below are exact in float64


def join(**options):
    warnings.simplefilter("ignore")
    rank, device, group = set_up(backend="cpu:gloo,vgpu:vccl", **options)
    after_test(leave, dist.group.WORLD)
    dist.distributed_c10d._update_default_pg(group)
    return rank, dist.get_world_size(), device


def leave(world):
    """Make a group the default one again, without references to that of virtual GPUs."""
    gc.collect()
    _clear_sharding_prop_cache()  # it has the names of groups
    dist.distributed_c10d._update_default_pg(world)


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


@in_ranks(2)
def test_ddp_takes_the_steps_of_one_device():
    rank, k, device = join(peer_link=Link(1e9, latency=0.01))
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
    net = Net()
    net.unused = nn.Parameter(torch.zeros(3).double())
    ddp = DistributedDataParallel(net.to(device), find_unused_parameters=True)
    _, first, after = train(ddp, *mine, device=device)
    assert_equal(first[-4:], gradients)
    assert_equal(after[-4:], parameters)


@in_ranks(2)
def test_ddp_without_sync():
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


@in_ranks(2)
def test_ddp_broadcasts_parameters_and_buffers_of_rank_0():
    rank, k, device = join()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)).double().to(device)
    ddp = DistributedDataParallel(net)
    batches, means = torch.randn(2, 16, 8).double(), []
    for batch in batches:
        ddp(batch.to(device)).sum().backward()
        means.append(net[0].running_mean.cpu())
    found = everywhere((batches[1], means, [p.detach().cpu() for p in net.parameters()]))
    (_, (mean, _), parameters), (batch, (_, other), others) = found
    assert_equal(others, parameters)
    torch.testing.assert_close(other, 0.9 * mean + 0.1 * batch.mean(0))


@in_ranks(2)
def test_the_divisor_of_ddp_is_the_number_of_ranks_at_first_or_of_those_that_have_inputs_left():
    def gradients(device, group, first):
        net = nn.Linear(1, 1, bias=False).to(device)
        ddp = DistributedDataParallel(net, process_group=group)
        found = []
        with ddp.join(divide_by_initial_world_size=first):
            for i in range(2 + dist.get_rank()):
                net.zero_grad()
                ddp(torch.full((1, 1), 1.0 + i + dist.get_rank(), device=device)).sum().backward()
                found.append(net.weight.grad.item())
        return found

    rank, device, group = set_up()
    for first, last in (True, 2.0), (False, 4.0):
        ours, theirs = gradients(device, group, first), gradients("cpu", dist.group.WORLD, first)
        assert ours == theirs == [1.5, 2.5, last][: 2 + rank]


@in_ranks(2)
def test_ddp_with_mixed_precision_computes_and_reduces_in_bfloat16():
    """Its first pass reads buckets that torch has left uninitialized, on the CPU as well."""
    rank, device, group = set_up()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))
    expected = copy.deepcopy(net).bfloat16()
    for r in range(2):
        expected(torch.full((3, 4), r + 1.0).bfloat16()).float().sum().backward()
    net = net.to(device)
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(net, process_group=group, mixed_precision=precision)
    for _ in range(3):
        net.zero_grad()
        out = ddp(torch.full((3, 4), rank + 1.0, device=device))
        out.float().sum().backward()
        assert out.dtype == torch.bfloat16 and net[0].weight.dtype == torch.float32
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad.float() / 2, rtol=1e-2, atol=1e-3)


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
    rank, k, device = join(peer_link=peer_link)
    mine = part(X, rank, k), part(Y, rank, k)
    _, gradients, _ = train(Net(), X, Y)

    def first_gradients(hook, more=0.0, **options):
        ddp = DistributedDataParallel(Net().to(device), bucket_cap_mb=1e-4, **options)
        if isinstance(hook, dist.BuiltinCommHookType):
            ddp._register_builtin_comm_hook(hook)
        else:
            ddp.register_comm_hook(None, hook)
        return train(ddp, mine[0] + more, mine[1], device=device)[1]

    builtin = dist.BuiltinCommHookType
    exact = default_hooks.allreduce_hook, chained_hook, builtin.ALLREDUCE, builtin.FP16_COMPRESS
    for hook in exact:
        assert_equal(first_gradients(hook), gradients)
    rounded = first_gradients(builtin.FP16_COMPRESS, more=2.0**-20)
    assert_equal(rounded, [gradient.half().double() for gradient in rounded])
    alone = [dist.new_group([each]) for each in range(k)][rank]
    assert_equal(first_gradients(builtin.ALLREDUCE, process_group=alone), train(Net(), *mine)[1])
    assert_equal(first_gradients(doubling_hook), [2 * gradient for gradient in gradients])
    for hook in default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook:
        torch.testing.assert_close(first_gradients(hook), gradients, rtol=2e-2, atol=1)
    results = []
    for where in "cpu", device:
        ddp = DistributedDataParallel(Net((8, 64, 4)).to(where))
        options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2}
        state = powerSGD_hook.PowerSGDState(None, min_compression_rate=1, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        results.append(train(ddp, *mine, num_steps=5, device=where))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("peer_link", [None, Link(1e9, latency=0.01)], ids=["fast", "slow"])
def test_communication_hooks(peer_link):
    job_of(2).run(ddp_hooks, peer_link)


# -- overlap


@in_ranks(2)
def test_buckets_overlap_backward_and_the_optimizer_waits_for_them():
    rank, k, device = join(peer_link=Link(1e12, latency=0.01))
    widths = (8, 256, 256, 256, 4)
    _, _, parameters = train(Net(widths), X, Y, num_steps=1)
    ddp = DistributedDataParallel(Net(widths).to(device), bucket_cap_mb=0.3)
    inputs, targets = part(X, rank, k).to(device), part(Y, rank, k).to(device)
    for _ in range(2):  # DDP groups gradients anew after the first step
        mean_square(ddp(inputs), targets).backward()
        ddp.zero_grad()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    layer = next(each for each in ddp.modules() if isinstance(each, torch.nn.Linear))
    seen = []  # the moment at which the first bucket was under way

    def wait_in_backward(grad):
        assert under_way.wait(30)
        seen.append(d2lpar.clock())

    def wait_in_its_backward(module, args, output):
        output.register_hook(wait_in_backward)

    layer.register_forward_hook(wait_in_its_backward)
    dist.barrier()
    torch.vgpu.synchronize()
    recording = start_recording()
    with held_collectives() as under_way:
        mean_square(ddp(inputs), targets).backward()
        backward_issued = d2lpar.clock()
        optimizer.step()
        # The last kernels of backward run beside the bucket, or this waits in vain.
        wait_until(lambda: any(s.issued > seen[0] for s in named(recording, "aten.mm")))
    torch.vgpu.synchronize()
    stop_recording(recording)
    assert_equal([p.cpu() for p in ddp.parameters()], parameters)
    kernels = [span for span in recording if span.kind == "kernel"]
    buckets = [span for span in recording if span.kind == "collective"]
    assert len(buckets) > 1 and {span.name for span in buckets} == {"all_reduce"}
    first = buckets[0]
    within = [s for s in kernels if first.start < s.start and s.end < first.end]
    assert any(span.name == "aten.mm" for span in within)
    assert {span.stream for span in buckets}.isdisjoint({span.stream for span in kernels})
    of_optimizer = [span for span in kernels if span.issued > backward_issued]
    assert of_optimizer
    assert min(span.start for span in of_optimizer) >= max(span.end for span in buckets)


# -- functional collectives, DTensor


@in_ranks(2)
def test_functional_collectives_wait_when_they_are_used():
    rank, device, group = set_up(peer_link=Link(1e9, latency=0.01))
    k, values = 2, [whole_numbers(4, 6, seed=seed) for seed in range(2)]
    x, total = values[rank].to(device), sum(values)
    strided = x.t().contiguous() if torch.__version__ < "2.12" else x.t()  # 2.11 takes none
    for result, expected in (
        (functional.all_reduce(x, "sum", group), total),
        (functional.all_reduce(x, "avg", group), total / k),
        (functional.all_reduce(x.t(), "max", group), torch.stack(values).amax(0).t()),
        (functional.all_gather_tensor(x, 0, group), torch.cat(values)),
        (functional.all_gather_tensor(x, 1, group), torch.cat(values, 1)),
        (functional.all_gather_tensor(strided, 0, group), torch.cat([v.t() for v in values])),
        (functional.reduce_scatter_tensor(x.t(), "sum", 0, group), total.t().chunk(k)[rank]),
        (functional.all_gather_tensor(x, 0, group)[1:].view(-1), torch.cat(values)[1:].view(-1)),
        (functional.reduce_scatter_tensor(x, "sum", 0, group), total.chunk(k)[rank]),
        (functional.reduce_scatter_tensor(x, "sum", 1, group), total.chunk(k, 1)[rank]),
        (functional.broadcast(x, 1, group), values[1]),
        (
            functional.all_to_all_single(strided, None, None, group),
            torch.cat([value.t().chunk(k)[rank] for value in values]),
        ),
        (
            functional.all_to_all_single(x, [1, 1] if rank else [3, 3], [3, 1], group),
            torch.cat([value[3:] if rank else value[:3] for value in values]),
        ),
        (functional.all_reduce_coalesced([x, x + 1], "sum", group)[1], total + k),
        (
            functional.all_gather_into_tensor_coalesced([x, strided], group)[1],
            torch.cat([value.t() for value in values]),
        ),
        (
            functional.reduce_scatter_tensor_coalesced([x, strided], "sum", [0, 0], group)[1],
            total.t().chunk(k)[rank],
        ),
    ):
        assert result.device == device
        assert_equal(result.cpu(), expected)
    assert_equal(x.cpu(), values[rank])
    functional.all_reduce_inplace(x, "sum", group)
    assert_equal(x.cpu(), total)
    with pytest.raises(ValueError, match="unknown reduce op: 'mean'"):
        functional.all_reduce(x, "mean", group)
    before = torch.vgpu.memory_allocated()
    with held_collectives():
        functional.wait_tensor(functional.all_reduce(x, "sum", group))
        assert torch.vgpu.memory_allocated() == before, "later work is behind the collective"


@in_ranks(2)
def test_a_functional_collective_has_gradients():
    rank, device, group = set_up(peer_link=Link(1e9, latency=0.01))
    x = whole_numbers(4, 6, seed=rank).to(device).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, group)
    (gathered * torch.arange(gathered.numel(), device=device).view_as(gathered)).sum().backward()
    weights = torch.arange(gathered.numel()).view(2, *x.shape)[rank].double()
    assert_equal(x.grad.cpu(), 2 * weights)


def mesh_of_two():
    rank, device, group = set_up(peer_link=Link(1e9, latency=0.002))
    return rank, device, DeviceMesh.from_group(group, "vgpu")


@in_ranks(2)
def test_dtensors_are_sharded_and_gathered_as_torch_splits_tensors():
    rank, device, mesh = mesh_of_two()
    whole = whole_numbers(6, 9)
    for source in Shard(0), Shard(1), Replicate():
        sharded = distribute_tensor(whole.to(device), mesh, [source])
        assert_equal(sharded.full_tensor().cpu(), whole)
        for target in Shard(0), Shard(1), Replicate():
            local = sharded.redistribute(mesh, [target]).to_local()
            chunks = [whole] * 2 if target == Replicate() else whole.chunk(2, target.dim)
            assert_equal(local.cpu(), chunks[rank])
    partial = DTensor.from_local((whole * (rank + 1)).to(device), mesh, [Partial()])
    assert_equal(partial.full_tensor().cpu(), 3 * whole)
    local = partial.redistribute(mesh, [Shard(1)]).to_local()
    assert_equal(local.cpu(), 3 * whole.chunk(2, 1)[rank])


@in_ranks(2)
def test_products_of_dtensors_are_exact():
    _, device, mesh = mesh_of_two()
    whole, other = whole_numbers(6, 9), whole_numbers(9, 4, seed=1)
    for left, right in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
        a, b = whole.clone().requires_grad_(), other.clone().requires_grad_()
        expected = a @ b
        (expected * expected.detach()).sum().backward()
        x = distribute_tensor(whole.to(device), mesh, [left]).requires_grad_()
        y = distribute_tensor(other.to(device), mesh, [right]).requires_grad_()
        product = x @ y
        (product * product.detach()).sum().backward()
        for mine, reference in ((product, expected), (x.grad, a.grad), (y.grad, b.grad)):
            assert_equal(mine.full_tensor().detach().cpu(), reference.detach())


@in_ranks(2)
def test_embeddings_of_dtensors_are_exact():
    _, device, mesh = mesh_of_two()
    table, indices = whole_numbers(10, 4).requires_grad_(), torch.tensor([3, 9, 0, 3])
    nn.functional.embedding(indices, table).square().sum().backward()
    for place in Shard(0), Shard(1):
        weight = distribute_tensor(table.detach().to(device), mesh, [place]).requires_grad_()
        chosen = distribute_tensor(indices.to(device), mesh, [Replicate()])
        rows = nn.functional.embedding(chosen, weight).redistribute(mesh, [Replicate()])
        rows.square().sum().backward()
        assert_equal(rows.full_tensor().detach().cpu(), table.detach()[indices])
        assert_equal(weight.grad.full_tensor().cpu(), table.grad)


@in_ranks(2)
def test_cross_entropy_of_sharded_classes_and_the_norm_of_its_gradient():
    _, device, mesh = mesh_of_two()
    logits, classes = whole_numbers(4, 10, seed=2).requires_grad_(), torch.tensor([1, 0, 9, 5])
    expected = nn.functional.cross_entropy(logits, classes)
    expected.backward()
    x = distribute_tensor(logits.detach().to(device), mesh, [Shard(1)]).requires_grad_()
    with parallel.loss_parallel():
        loss = nn.functional.cross_entropy(x, classes.to(device))
        loss.backward()
    torch.testing.assert_close(loss.full_tensor().cpu(), expected.detach())
    torch.testing.assert_close(x.grad.full_tensor().cpu(), logits.grad)
    norms = nn.utils.get_total_norm([x.grad]), nn.utils.get_total_norm([logits.grad])
    torch.testing.assert_close(norms[0].full_tensor().cpu(), norms[1])


# -- tensor parallelism, fully_shard


class Block(nn.Module):
    """A residual layer with two products, as in a transformer."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(8).double()
        self.up, self.down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def blocks():
    return nn.Sequential(Block(0), Block(1))


SEQUENCES = [whole_numbers(4, 6, 8, seed=seed) for seed in (5, 6)]  # batch, length, width


def train_blocks(net, inputs, targets, num_steps=3, max_norm=0.1):
    """Train; return losses, norms of the gradients and the parameters at the end."""
    foreach = None if max_norm else False
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=foreach)
    results = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = mean_square(net(inputs), targets)
        loss.backward()
        results.append(loss)
        if max_norm is not None:
            results.append(nn.utils.clip_grad_norm_(net.parameters(), max_norm))
        optimizer.step()
    return [*map(whole_value, results)], [*map(whole_value, net.parameters())]


def whole_value(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


@in_ranks(2)
def test_tensor_parallel_takes_the_steps_of_one_device():
    rank, k, device = join(peer_link=Link(1e9, latency=0.001))
    mesh = init_device_mesh("vgpu", (k,))
    inputs, targets = (each.to(device) for each in SEQUENCES)
    plain = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    sequence = {
        "norm": parallel.SequenceParallel(),
        "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "down": parallel.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    cut = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
    whole = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
    ends = {"0": parallel.PrepareModuleInput(**cut), "1": parallel.PrepareModuleOutput(**whole)}
    for plan, around in (plain, {}), (sequence, ends):
        net = blocks().to(device)
        for block in net:
            parallel.parallelize_module(block, mesh, plan)
        parallel.parallelize_module(net, mesh, around)
        # torch takes no DTensors together with other tensors in one kernel: no clipping here.
        expected = train_blocks(blocks(), *SEQUENCES, max_norm=None)
        torch.testing.assert_close(train_blocks(net, inputs, targets, max_norm=None), expected)
    assert net[0].up.weight.to_local().shape == (16 // k, 8)


def sharded(net, mesh, **options):
    for block in net:
        fsdp.fully_shard(block, mesh=mesh, **options)
    return fsdp.fully_shard(net, mesh=mesh, **options)


def num_bytes(net):
    return sum(p.numel() * p.itemsize for p in net.parameters())


def requested_bytes():
    return torch.vgpu.memory_stats()["requested_bytes.all.current"]


def check_sharded_memory(rank, k, device, mesh):
    """Check the bytes before and after each layer, to the byte."""
    inputs = part(SEQUENCES[0], rank, k).to(device)
    net = blocks().to(device)
    whole, block = num_bytes(net), num_bytes(net[0])
    before = requested_bytes()
    net = sharded(net, mesh)
    assert requested_bytes() == before - whole + whole // k
    net(inputs).sum().backward()
    torch.vgpu.synchronize()
    within = []

    def look(module, *args):
        within.append(requested_bytes())

    for layer in net:
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
    with torch.no_grad():
        base = requested_bytes()
        net(inputs)
    before_first, after_first, before_second, after_second = within
    assert before_first == base + 2 * block  # the parameters, and what they were gathered in
    assert after_first == before_first - block + inputs.nbytes
    assert after_second == before_second - block + inputs.nbytes
    net(inputs).sum().backward()
    assert requested_bytes() == base


def mean_over_ranks(results):
    """Replace losses of ranks by their mean, as one device has it."""
    for loss in results[0][::2]:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
    return results


@in_ranks(2)
def test_fully_shard_takes_the_steps_of_one_device_in_less_memory():
    rank, k, device = join(peer_link=Link(1e9, latency=0.002))
    mesh = init_device_mesh("vgpu", (k,))
    inputs, targets = (part(each, rank, k).to(device) for each in SEQUENCES)
    check_sharded_memory(rank, k, device, mesh)
    expected = train_blocks(blocks(), *SEQUENCES)
    for where, options in (
        *((device, {"reshard_after_forward": reshard}) for reshard in (True, False, 1)),
        ("cpu", {}),  # fully_shard moves the parameters to the device
        (device, {"offload_policy": fsdp.CPUOffloadPolicy()}),
    ):
        net = sharded(blocks().to(where), mesh, **options)
        torch.testing.assert_close(mean_over_ranks(train_blocks(net, inputs, targets)), expected)
    assert {p.device.type for p in net.parameters()} == {"cpu"}

    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    net = sharded(blocks().to(device), mesh, mp_policy=policy)
    seen = []
    net[1].up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    whole = blocks()
    for each, x, y in (whole, *SEQUENCES), (net, inputs, targets):
        mean_square(each(x), y).backward()
    assert set(seen) == {torch.bfloat16}
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        assert ours.grad.dtype == torch.float64
        off = (whole_value(ours.grad) - theirs.grad).norm() / theirs.grad.norm()
        assert off < 0.1  # of a gradient: some twenty times the rounding of bfloat16

    _, expected = train_blocks(blocks(), *SEQUENCES, max_norm=None)
    wrap = functools.partial(fsdp.FullyShardedDataParallel, device_id=device)
    net = wrap(nn.Sequential(*map(wrap, blocks().to(device))))
    train_blocks(net, inputs, targets, max_norm=None)
    with fsdp.FullyShardedDataParallel.summon_full_params(net):
        torch.testing.assert_close([p.detach().cpu() for p in net.parameters()], expected)


@in_ranks(2)
def test_fully_shard_takes_parameters_that_are_assigned():
    rank, k, device = join()
    mesh = init_device_mesh("vgpu", (k,))
    with torch.device("meta"):
        net = sharded(blocks(), mesh)
    values = {}
    for name, value in net.state_dict().items():
        own = torch.full(value.to_local().shape, 0.5, dtype=value.dtype, device=device)
        values[name] = DTensor.from_local(own, mesh, value.placements, run_check=False)
    net.load_state_dict(values, assign=True)
    inputs = part(SEQUENCES[0], rank, k).to(device)
    results = net(inputs)
    expected = blocks()
    for parameter in expected.parameters():
        parameter.detach().fill_(0.5)
    torch.testing.assert_close(results.cpu(), expected(part(SEQUENCES[0], rank, k)))


@in_ranks(4)
def test_fully_shard_with_tensor_parallel_on_a_mesh_of_two_dimensions():
    rank, k, device = join()
    mesh = init_device_mesh("vgpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["data"].get_local_rank()
    inputs, targets = (part(each, place, 2).to(device) for each in SEQUENCES)
    expected = train_blocks(blocks(), *SEQUENCES, max_norm=None)
    net = blocks().to(device)
    for block in net:
        plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(block, mesh["tensor"], plan)
    net = sharded(net, mesh["data"])
    assert net[0].up.weight.to_local().shape == (16 // 4, 8)
    results, parameters = train_blocks(net, inputs, targets, max_norm=None)
    torch.testing.assert_close(parameters, expected[1])


# -- pipelines


@in_ranks(2)
def test_pipelines_give_the_gradients_of_one_device():
    rank, k, device = join(peer_link=Link(1e9, latency=0.002))
    widths = (8, 12, 6, 10, 4)
    expected = Net(widths)
    loss = mean_square(expected(X), Y)
    loss.backward()
    gradients = [p.grad for p in expected.parameters()]

    def stages(count):
        whole = Net(widths)
        size = 4 // (count * k)
        for index in range(rank, count * k, k):
            layers = list(whole)[2 * size * index : 2 * size * (index + 1)]
            module = nn.Sequential(*layers).to(device)
            yield pipelining.PipelineStage(module, index, count * k, device)

    def loss_of_part(outputs, targets):
        return (outputs - targets).square().sum() / len(Y)

    options = {"n_microbatches": 4, "loss_fn": loss_of_part, "scale_grads": False}
    for schedule_class, count in (
        (pipelining.ScheduleGPipe, 1),
        (pipelining.Schedule1F1B, 1),
        (pipelining.ScheduleInterleaved1F1B, 2),
        (pipelining.ScheduleLoopedBFS, 2),
    ):
        mine = list(stages(count))
        schedule = schedule_class(mine if count > 1 else mine[0], **options)
        losses = []
        inputs = (X.to(device),) if rank == 0 else ()
        last = {"target": Y.to(device), "losses": losses} if rank == k - 1 else {}
        schedule.step(*inputs, **last)
        if losses:
            assert_equal(torch.stack(losses).sum().cpu(), loss.detach())
        for stage in mine:
            size = len(gradients) // (count * k)
            first = size * stage.stage_index
            got = [p.grad.cpu() for p in stage.submod.parameters()]
            assert_equal(got, gradients[first : first + size])


# -- collectives with autograd, optimizers, batch normalization


@in_ranks(2)
def test_collectives_autograd():
    rank, device, group = set_up()
    weights = whole_numbers(2, 3, seed=10).to(device)
    shard = torch.empty(3, device=device).double()
    threes = torch.full((2, 3), 3.0).double()
    for call, expected in (
        (lambda x: autograd.all_reduce(x, group=group) * weights * (rank + 1), 3 * weights.cpu()),
        (lambda x: torch.cat(autograd.all_gather(x, group)) * (rank + 1), threes),
        (lambda x: autograd.reduce_scatter(shard, list(x), group=group) * 2, threes - 1),
    ):
        x = whole_numbers(2, 3, seed=rank).to(device).requires_grad_()
        call(x).sum().backward()
        assert_equal(x.grad.cpu(), expected)


@in_ranks(2)
def test_a_sampler_deals_the_data_and_zero_shards_optimizer_state():
    rank, device, group = set_up()
    dataset = TensorDataset(X, Y)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    expected = nn.Sequential(*list(Net())[::2])  # without its ReLU, whose input may come near 0
    net = DistributedDataParallel(copy.deepcopy(expected).to(device), process_group=group)
    options = {"lr": LR, "momentum": 0.5}
    plain = torch.optim.SGD(expected.parameters(), **options)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, process_group=group, **options
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(3 + epoch))
        for step, (inputs, targets) in enumerate(DataLoader(dataset, 2, sampler=sampler)):
            rows = order[4 * step : 4 * step + 4]
            assert_equal(inputs, X[rows[rank::2]])
            plain.zero_grad()
            mean_square(expected(X[rows]), Y[rows]).backward()
            plain.step()
            optimizer.zero_grad()
            mean_square(net(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
    parameters = [p.detach() for p in expected.parameters()]
    torch.testing.assert_close([p.detach().cpu() for p in net.parameters()], parameters)
    assert 0 < sum(len(s) for s in optimizer.optim.state.values()) < len(parameters)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(parameters)


@in_ranks(2)
def test_synchronized_batch_norm_takes_the_statistics_of_all_ranks():
    rank, device, group = set_up()
    torch.manual_seed(0)
    images = torch.randn(6, 3, 4, 4).double()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    for options in {}, {"affine": False}, {"track_running_stats": False}:
        norm = nn.BatchNorm2d(3, **options).double()
        if norm.affine:
            nn.init.normal_(norm.weight)
        synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm), group).to(device)
        a = images.clone().requires_grad_()
        b = images[rows].to(device).requires_grad_()
        expected, outputs = norm(a), synced(b)
        expected.pow(3).sum().backward()
        outputs.pow(3).sum().backward()
        torch.testing.assert_close(outputs.detach().cpu(), expected[rows].detach())
        torch.testing.assert_close(b.grad.cpu(), a.grad[rows])
        for p, q in zip(synced.parameters(), norm.parameters(), strict=True):
            dist.all_reduce(p.grad, group=group)
            torch.testing.assert_close(p.grad.cpu(), q.grad)
        for p, q in zip(synced.buffers(), norm.buffers(), strict=True):
            torch.testing.assert_close(p.cpu(), q)


# -- checkpoints


def checkpoint(folder, mode):
    rank, k, device = join()
    mesh = init_device_mesh("vgpu", (k,))
    net = sharded(blocks().to(device), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if mode == "save":
        mean_square(net(SEQUENCES[0].to(device)), SEQUENCES[1].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
    model_state, optimizer_state = states.get_state_dict(net, optimizer)
    state = {"net": model_state, "optimizer": optimizer_state, "epoch": 3 if mode == "save" else 0}
    if mode == "save":
        checkpoints.save(state, checkpoint_id=folder)
    else:
        checkpoints.load(state, checkpoint_id=folder)
        loaded = {"model_state_dict": state["net"], "optim_state_dict": state["optimizer"]}
        states.set_state_dict(net, optimizer, **loaded)
    full = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = states.get_model_state_dict(net, options=full)
    mean_square(net(SEQUENCES[0].to(device)), SEQUENCES[1].to(device)).backward()
    optimizer.step()
    return state["epoch"], first, [whole_value(p) for p in net.parameters()]


def test_checkpoints_of_sharded_state_load_on_other_numbers_of_ranks(tmp_path):
    epoch, first, after = job_of(2).run(checkpoint, str(tmp_path), "save")[0]
    for size in 1, 3:
        loaded = job_of(size).run(checkpoint, str(tmp_path), "load")[0]
        assert loaded[0] == epoch == 3
        assert_equal(loaded[1], first)
        torch.testing.assert_close(loaded[2], after)
