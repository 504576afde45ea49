import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar.chapters.tensor_parallelism import strategies

D, H, B, LR = 16, 32, 24, 0.2
OPTIONS = {strategies.split_by_layers: {"cuts": [4], "num_micro_batches": 3}}
WAYS = [strategies.split_by_data, strategies.split_by_layers, strategies.split_inside_layers]


def mlp():
    torch.manual_seed(0)
    layers = [(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(*layers[0], *layers[1][:-1])


@pytest.fixture
def two():
    yield d2lpar.virtual_gpus(2)
    d2lpar.synchronize()


@pytest.fixture
def batch():
    return torch.randn(B, D), torch.randint(D, (B,))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_the_steps_of_the_whole_network(two, batch, way):
    net, expected = mlp().double(), mlp().double()
    before, (X, y) = copy.deepcopy(net), batch
    _, trained = strategies.step_cost(way, net, X.double(), y, two, LR, **OPTIONS.get(way, {}))
    optimizer = torch.optim.SGD(expected.parameters(), LR)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(expected(X.double()), y).backward()
        optimizer.step()
    assert repr(trained) == repr(net)
    for ours, theirs in zip(trained.parameters(), expected.parameters(), strict=True):
        assert ours.device.type == "cpu"
        torch.testing.assert_close(ours, theirs)
    for p, q in zip(net.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q) and p.grad is None


@pytest.mark.parametrize("way, num_bytes, num_messages, num_barriers", [
    (strategies.split_by_data, 2 * 4 * (2 * (2 * D * H + D + H)), 4, 1),
    (strategies.split_by_layers, 2 * 4 * B * D, 6, 0),
    (strategies.split_inside_layers, 3 * 2 * 4 * B * D, 12, 3),
])  # fmt: skip
def test_what_a_step_sends(two, batch, way, num_bytes, num_messages, num_barriers):
    cost, _ = strategies.step_cost(way, mlp(), *batch, two, LR, **OPTIONS.get(way, {}))
    assert cost[1:4] == (num_bytes, num_messages, num_barriers)
    assert cost.seconds > 0


def test_memory_is_that_of_the_fullest_device_without_what_was_there_before(two, batch):
    one, _ = strategies.step_cost(strategies.split_inside_layers, mlp(), *batch, two[:1], LR)
    kept = torch.ones(1 << 20, device=two[0])
    again, _ = strategies.step_cost(strategies.split_inside_layers, mlp(), *batch, two[:1], LR)
    assert again.memory == one.memory < kept.nbytes
    inputs = 4 * (B * (2 * D + 2 * H))
    assert one.memory >= 2 * sum(p.nbytes for p in mlp().parameters()) + inputs
    memory = {}
    for way in WAYS:
        cost, _ = strategies.step_cost(way, mlp(), *batch, two, LR, **OPTIONS.get(way, {}))
        memory[way] = cost.memory
    assert memory[strategies.split_by_layers] < memory[strategies.split_by_data] < one.memory
    assert memory[strategies.split_inside_layers] < memory[strategies.split_by_data]
    uneven = {"cuts": [6], "num_micro_batches": 3}
    cost, _ = strategies.step_cost(strategies.split_by_layers, mlp(), *batch, two, LR, **uneven)
    assert cost.memory >= 2 * sum(p.nbytes for p in mlp()[:6].parameters())
