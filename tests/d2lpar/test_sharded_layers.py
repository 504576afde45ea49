import copy

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
    OnEveryDevice,
    RowParallel,
    split_cross_entropy,
    tensor_parallel,
    unsplit,
)
from d2lpar.collectives import CollectiveCounter

WAYS = {
    "column": lambda layer, devices: ColumnParallel(layer, devices, gather_output=True),
    "row": lambda layer, devices: RowParallel(layer, devices, cut_input=True),
}


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


@pytest.mark.parametrize("dim", [0, 1])
def test_cut_and_gathered_undo_each_other_forwards_and_backwards(devices, dim):
    X = torch.arange(100.0).view(10, 10)
    parts = replicated(X, devices)
    pieces = sharded_layers.cut(parts, dim)
    assert [piece.shape[dim] for piece in pieces] == [3, 3, 2, 2]
    wholes = sharded_layers.gathered(pieces, dim)
    assert_same(wholes, [X] * 4)
    backward_on_each(wholes)
    assert_same([part.grad for part in parts], [2 * X] * 4)


# The layers


LAYERS = {
    "linear": (lambda: nn.Linear(10, 6), (5, 10)),
    "linear without bias": (lambda: nn.Linear(8, 12, bias=False), (2, 3, 8)),
    "convolution": (lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1), (2, 6, 7, 7)),
}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_a_split_layer_has_the_outputs_and_gradients_of_the_whole(devices, way, kind, k):
    make, shape = LAYERS[kind]
    torch.manual_seed(0)
    layer, X = make().double(), torch.randn(shape).double().requires_grad_()
    split, parts = WAYS[way](layer, devices[:k]), replicated(X, devices[:k])
    expected, outputs = layer(X), split(parts)
    backward_on_each([expected, *outputs])
    assert_same(outputs, [expected] * k)
    assert_same([part.grad for part in parts], [X.grad] * k)
    again = split.unsplit()
    assert repr(again) == repr(layer)
    assert_same(again.parameters(), layer.parameters())
    assert_same([p.grad for p in again.parameters()], [p.grad for p in layer.parameters()])


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


def test_whole_has_gradients_only_where_there_are_some(devices):
    split = ColumnParallel(nn.Linear(4, 4), devices)
    assert all(p.grad is None for p in split.unsplit().parameters())


# Barriers


def test_pairing_halves_the_barriers(devices):
    k, X = 4, torch.randn(2, 8, 5, 5)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    pair = [ColumnParallel(layers[0], devices), RowParallel(layers[1], devices)]
    for split, names, times in (
        ([WAYS["column"](layer, devices) for layer in layers], ["allgather", "allreduce"], 6),
        ([WAYS["row"](layer, devices) for layer in layers], ["allgather", "allreduce"], 6),
        (pair, ["allreduce"], 4),
    ):
        parts = replicated(X, devices)
        with d2lpar.Timeline() as timeline, CollectiveCounter() as exchanges:
            backward_on_each(split[1](OnEveryDevice(F.relu)(split[0](parts))))
        assert exchanges.calls == {name: [X.nbytes] * 2 for name in names}
        assert exchanges.barriers == 2 * len(names)
        assert sum(timeline.bytes_by_link().values()) == times * (k - 1) * X.nbytes


def test_exchanges_count_only_their_block_and_no_single_device(devices):
    pair = nn.Sequential(
        ColumnParallel(nn.Linear(4, 4), devices), RowParallel(nn.Linear(4, 4), devices)
    )
    alone = nn.Sequential(*(way(nn.Linear(4, 4), devices[:1]) for way in WAYS.values()))
    X = torch.randn(2, 4)
    with CollectiveCounter() as outer:
        with CollectiveCounter() as inner:
            outputs = pair([X.to(device) for device in devices])
        backward_on_each(outputs)  # X needs no gradient: nothing to sum
        backward_on_each(alone(replicated(X, devices[:1])))
    backward_on_each(pair(replicated(X, devices)))
    assert inner.barriers == outer.barriers == 1
    with CollectiveCounter() as exchanges:
        backward_on_each(pair(replicated(X, devices)))
    assert exchanges.barriers == 2


# Networks


def convnet():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU()),
        *(nn.Conv2d(8, 12, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(12 * 4, 9), nn.ReLU(), nn.Linear(9, 5)),
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_split_network_takes_the_step_of_the_whole(devices, k):
    torch.manual_seed(0)
    net, X, y = convnet().double(), torch.randn(6, 1, 10, 10).double(), torch.randint(5, (6,))
    split, expected = tensor_parallel(net, devices[:k]), copy.deepcopy(net)
    outputs = split([X.to(device) for device in devices[:k]])
    torch.autograd.backward([F.cross_entropy(out, y.to(out.device)) for out in outputs])
    F.cross_entropy(expected(X), y).backward()
    gradients = [p.grad for p in unsplit(split).parameters()]
    assert_same(gradients, [p.grad for p in expected.parameters()])
    for params in (split.parameters(), expected.parameters()):
        d2lpar.sgd(params, lr=0.5, batch_size=1)
    assert_same(unsplit(split).parameters(), expected.parameters())
    assert all(torch.equal(out.cpu(), outputs[0].cpu()) for out in outputs)
    assert next(net.parameters()).grad is None


def test_tensor_parallel_splits_by_turns_and_gathers_what_is_left_over(devices):
    split = tensor_parallel(convnet(), devices)
    layers = [layer for layer in split if not isinstance(layer, OnEveryDevice)]
    assert [type(layer) for layer in layers] == [ColumnParallel, RowParallel] * 2 + [ColumnParallel]
    assert [layers[i].gather_output for i in (0, 2, 4)] == [False, False, True]
    assert repr(unsplit(split)) == repr(convnet())


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
    with pytest.raises(TypeError, match="must be Linear or Conv2d .* got Dropout"):
        tensor_parallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), devices)
    with pytest.raises(ValueError, match="at least 4 to split over 4 devices: got 3"):
        sharded_layers.cut([torch.ones(2, 3, device=device) for device in devices], 1)


def test_a_list_of_the_wrong_length_is_refused(devices):
    parts = [torch.ones(2, 8, device=device) for device in devices]
    for way in (ColumnParallel, RowParallel, *WAYS.values()):
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
