import pytest
import torch
import torch.distributed as dist
from held import held
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar import collectives
from d2lpar.chapters.tensor_parallelism import sharded_layers
from d2lpar.chapters.tensor_parallelism.sharded_layers import (
    ColumnParallel,
    RowParallel,
    split_cross_entropy,
)
from d2lpar.collectives import CollectiveCounter


@pytest.fixture
def devices():
    yield d2lpar.virtual_gpus(4)
    d2lpar.synchronize()


def replicated(X, devices):
    return [X.detach().to(device, copy=True).requires_grad_() for device in devices]


def assert_same(tensors, expected):
    for a, b in zip(tensors, expected, strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())


def backward_on_each(outputs):
    torch.autograd.backward([output.square().sum() for output in outputs])


# The exchanges


def test_allgather_gives_all_tensors_to_all_and_keeps_its_own(devices):
    data = [torch.full((i + 1,), float(i), device=device) for i, device in enumerate(devices)]
    with d2lpar.Timeline() as timeline:
        copies = collectives.allgather(data)
    for i, tensors in enumerate(copies):
        assert tensors[i] is data[i]
        assert [t.device for t in tensors] == [devices[i]] * 4
        assert_same(tensors, data)
    links = {(a, b): 4 * (i + 1) for i, a in enumerate(devices) for b in devices if a != b}
    assert timeline.bytes_by_link() == links


def test_allgather_sends_from_all_devices_at_once():
    from vgpu import Link

    two = d2lpar.virtual_gpus(2, peer_link=Link(1e9, latency=0.05))
    data = [torch.ones(8, device=device) for device in two]
    with d2lpar.Timeline() as timeline, held(2):
        collectives.allgather(data)
    d2lpar.virtual_gpus(2)
    assert timeline.overlap(*(timeline.select(device, "copy") for device in two)) > 0


def values(parts):
    return [part.tolist() for part in parts]


def test_copied_and_summed_are_each_what_the_other_does_backwards(devices):
    two = devices[:2]
    for function, forward, backward in (
        (sharded_layers.copied, [[1.0, 2.0], [10.0, 20.0]], [[11.0, 11.0]] * 2),
        (sharded_layers.summed, [[11.0, 22.0]] * 2, [[1.0, 1.0], [10.0, 10.0]]),
    ):
        parts = [torch.tensor([a, 2 * a], device=d) for a, d in zip((1.0, 10.0), two, strict=True)]
        [part.requires_grad_() for part in parts]
        outputs = function(parts)
        assert values(outputs) == forward
        torch.autograd.backward([outputs[0].sum(), 10 * outputs[1].sum()])
        assert values(part.grad for part in parts) == backward
        assert values(parts) == [[1.0, 2.0], [10.0, 20.0]]


# The layers


LAYERS = {
    "linear": (lambda: nn.Linear(10, 6), (5, 10)),
    "linear without bias": (lambda: nn.Linear(8, 12, bias=False), (2, 3, 8)),
    "convolution": (lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1), (2, 6, 7, 7)),
}


def pair_of(kind, devices):
    """Return two layers of a kind, split as a pair, and both whole, in float64."""
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    first, second = make().double(), None
    channels = first.weight.shape[0]
    if isinstance(first, nn.Conv2d):
        second = nn.Conv2d(channels, 5, 3).double()
    else:
        second = nn.Linear(channels, 5, bias=first.bias is not None).double()
    split = ColumnParallel(first, devices), RowParallel(second, devices)
    return split, (first, second), torch.randn(shape).double().requires_grad_()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_pair_has_the_outputs_and_gradients_of_the_whole(devices, kind, k):
    (up, down), (first, second), X = pair_of(kind, devices[:k])
    parts = replicated(X, devices[:k])
    with CollectiveCounter() as counter:
        outputs = down([F.relu(part) for part in up(parts)])
        backward_on_each(outputs)
    expected = second(F.relu(first(X)))
    backward_on_each([expected])
    assert_same(outputs, [expected] * k)
    assert_same([part.grad for part in parts], [X.grad] * k)
    for split, layer, dim in ((up, first, 0), (down, second, 1)):
        joined = torch.cat([shard.weight.grad.cpu() for shard in split.shards], dim)
        assert_same([joined], [layer.weight.grad])
        biases = [shard.bias.grad.cpu() for shard in split.shards if shard.bias is not None]
        if biases:
            assert_same([torch.cat(biases)], [layer.bias.grad])
    calls = {"allreduce": [expected.nbytes, X.nbytes]} if k > 1 else {}
    assert counter.calls == calls and counter.barriers == 2 * (k > 1)


def test_shards_are_parts_and_copies_and_a_row_has_its_bias_once(devices):
    layer = nn.Linear(10, 6)
    column, row = ColumnParallel(layer, devices), RowParallel(layer, devices)
    assert [tuple(shard.weight.shape) for shard in column.shards] == [(2, 10)] * 2 + [(1, 10)] * 2
    assert [tuple(shard.weight.shape) for shard in row.shards] == [(6, 3)] * 2 + [(6, 2)] * 2
    assert [shard.bias is None for shard in row.shards] == [False, True, True, True]
    assert [p.device for p in row.shards[2].parameters()] == [devices[2]]
    on_cpu = ColumnParallel(layer, [torch.device("cpu")] * 2)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        for p in on_cpu.parameters():
            p.zero_()
    assert torch.equal(layer.weight, before)


def test_exchanges_count_only_their_block_and_no_single_device(devices):
    pair = nn.Sequential(
        ColumnParallel(nn.Linear(4, 4), devices), RowParallel(nn.Linear(4, 4), devices)
    )
    X = torch.randn(2, 4)
    with CollectiveCounter() as outer:
        with CollectiveCounter() as inner:
            outputs = pair([X.to(device) for device in devices])
        backward_on_each(outputs)  # X needs no gradient: nothing to sum
    backward_on_each(pair(replicated(X, devices)))
    assert inner.barriers == outer.barriers == 1


# What cannot be split


def test_what_does_not_split_is_refused_with_its_values(devices):
    with pytest.raises(ValueError, match="at least 4 to split over 4 devices: got 3"):
        ColumnParallel(nn.Linear(8, 3), devices)
    with pytest.raises(ValueError, match="at least 4 to split over 4 devices: got 3"):
        RowParallel(nn.Linear(3, 8), devices)
    with pytest.raises(ValueError, match="groups of a convolution must be 1 .* got 2"):
        ColumnParallel(nn.Conv2d(8, 8, 3, groups=2), devices)
    with pytest.raises(TypeError, match="must be Linear or Conv2d .* got LayerNorm"):
        ColumnParallel(nn.LayerNorm(8), devices)


def test_a_list_of_the_wrong_length_is_refused(devices):
    parts = [torch.ones(2, 8, device=device) for device in devices]
    for way in (ColumnParallel, RowParallel):
        for wrong in (parts[:3], [*parts, parts[0]]):
            with pytest.raises(ValueError, match=rf"on 4 devices .* got {len(wrong)}"):
                way(nn.Linear(8, 8), devices)(wrong)


def test_an_error_in_a_split_layer_leaves_the_devices_usable(devices):
    row = RowParallel(nn.Linear(8, 8), devices)
    with pytest.raises(RuntimeError, match="shapes"):
        row([torch.ones(2, 3, device=device) for device in devices])
    with CollectiveCounter() as exchanges:
        row([torch.ones(2, 2, device=device) for device in devices])
    assert exchanges.barriers == 1


def _losses_of_parts(outputs, labels):
    rank, k = dist.get_rank(), dist.get_world_size()
    part = outputs.chunk(k, -1)[rank].clone().requires_grad_()
    loss = split_cross_entropy(part, labels, dist.group.WORLD)
    (3 * loss).backward()
    return loss.item(), part.grad


def test_a_cross_entropy_of_parts_is_that_of_the_whole():
    """Outputs of 1,000 would be infinite without the largest; the gradient counts the factor."""
    torch.manual_seed(0)
    outputs = 1000 * torch.randn(3, 5, 8)
    labels = torch.tensor([[0, 3, 4, 7, 1]] * 3)  # at both ends of both parts
    whole = outputs.double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    (3 * expected).backward()
    ranks = d2lpar.launch(_losses_of_parts, outputs, labels)
    gradient = torch.cat([part for _, part in ranks], -1)
    for loss, _ in ranks:
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, whole.grad.float())


def test_a_cross_entropy_of_parts_in_float64_is_that_exactly():
    """A step in float32 would be off by 1e-8 or more."""
    torch.manual_seed(0)
    outputs = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 4, 7, 1])
    expected = F.cross_entropy(outputs, labels)
    (3 * expected).backward()
    ranks = d2lpar.launch(_losses_of_parts, outputs.detach(), labels)
    for loss, _ in ranks:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    gradient = torch.cat([part for _, part in ranks], -1)
    torch.testing.assert_close(gradient, outputs.grad, rtol=0, atol=1e-12)
