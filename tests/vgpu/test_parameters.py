"""A parameter stays what it is wherever it moves: on virtual GPUs as between types on the CPU.

What a move keeps on CUDA is what torch's own `data` setter keeps, also for `.double()` on the CPU.
"""

import copy
import inspect
import json
import pickle
import sys
import weakref

import pytest
import torch
from gates import Gate
from programs import vgpu, written
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters

from vgpu import virtual_gpus

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


@pytest.fixture(params=[{}, {"model": "v100", "values": False}], ids=["wall", "no values"])
def clocks(request):
    """Two GPUs by the wall clock, and two that compute no values."""
    yield virtual_gpus(2, **request.param)
    virtual_gpus(2)


def what_a_move_keeps(start, move):
    """Return what a program can see of a parameter that `move(net)` moves, from a place `start`."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(start)
    net[2].weight = net[0].weight
    parameter = weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2, device=start)).sum().backward()
    optimizer.step()
    weight.mark, known, called = "no decay", weakref.ref(weight), []
    weight.register_hook(lambda grad: called.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda tensor: called.append(tensor is known()))
    grad, version, living = weight.grad, weight._version, (weight * 3).sum()
    sums_up = torch.autograd.graph.get_gradient_edge(weight).node
    before = weight.device, weight.dtype
    move(net)
    weight = net[0].weight
    ours = set() if weight.device.type == "cpu" else {"_cell", "_block", "_is_param"}
    kept = {
        "object": weight is parameter and known() is weight,
        "tied": net[2].weight is weight,
        "gradient": weight.grad is grad and grad.device == weight.device,
        "attributes": sorted(vars(weight).keys() - ours),
        "is a leaf parameter": isinstance(weight, nn.Parameter) and weight.is_leaf,
        "version": weight._version - version,
        "state": set(optimizer.state) == set(net.parameters()),
        "node": torch.autograd.graph.get_gradient_edge(weight).node is sums_up,
    }
    weight.grad = None
    living.backward()  # its gradient is of the old kind: CUDA does not stop this, either
    kept["gradient of the old kind"] = (weight.grad.device, weight.grad.dtype) == before
    weight.grad = None
    (weight * 2).sum().backward()
    kept["gradient of the new kind"] = weight.grad.device == weight.device
    made = type(weight)(weight.data, requires_grad=False)
    kept["type"] = isinstance(made, nn.Parameter) and not made.requires_grad
    return {**kept, "called": called}


def by_data(where):
    def move(net):
        for parameter in net.parameters():
            grad = parameter.grad
            parameter.data = parameter.data.to(where)
            grad.data = grad.data.to(where)

    return move


MOVES = {
    "to a GPU": ("cpu", lambda net: net.to("vgpu:1")),
    "from a GPU": ("vgpu:0", nn.Module.cpu),
    "between GPUs": ("vgpu:0", lambda net: net.to("vgpu:1")),
    "to another type": ("vgpu:0", nn.Module.double),
    "to a GPU in another type": ("cpu", lambda net: net.to("vgpu:1", torch.float16)),
    "data to a GPU": ("cpu", by_data("vgpu:0")),
    "data from a GPU": ("vgpu:1", by_data("cpu")),
    "data between GPUs": ("vgpu:0", by_data("vgpu:1")),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_parameter_that_moves_stays_what_it_is(move, clocks):
    kept = what_a_move_keeps(*MOVES[move])
    assert kept == what_a_move_keeps("cpu", nn.Module.double)
    assert kept["object"] and kept["called"] == ["hook", True] * 2


@pytest.mark.parametrize("start", ["cpu", "vgpu:0"])
@pytest.mark.parametrize("move", [lambda layer: layer.to("vgpu:1"), nn.Module.cpu, nn.Module.half])
def test_a_layer_moves_while_a_graph_of_the_network_lives(start, move, clocks):
    """PyTorch's course homework does it: a pipeline's last layer goes to the next GPU."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(start)
    output = net(torch.ones(1, 2, device=start))
    weight = net[-1].weight
    move(net[-1])
    assert net[-1].weight is weight and output.grad_fn is not None


def test_values_travel_with_data_in_both_directions(devices):
    """A mutation that copies the device but not what the tensor is made of fails here."""
    tensor = torch.arange(6.0).reshape(2, 3)
    tensor.data = tensor.data.t().to("vgpu:0")
    assert tensor.tolist() == [[0, 3], [1, 4], [2, 5]] and torch.vgpu.memory_allocated(0) > 0
    tensor.add_(1)
    shared = tensor.cpu()
    tensor.data = shared
    assert tensor.data_ptr() == shared.data_ptr() and type(tensor) is torch.Tensor
    assert tensor.numpy().tolist() == [[1, 4], [2, 5], [3, 6]]
    shared.zero_()
    assert tensor.sum() == 0


@pytest.mark.parametrize(
    "where, there", [("cpu", "vgpu:1"), ("vgpu:0", "cpu"), ("vgpu:0", "vgpu:0")]
)
def test_data_that_is_refused_changes_nothing(where, there, devices):
    """torch: data of a tensor that requires gradients are floating point."""
    parameter = nn.Parameter(torch.ones(2, device=where))
    parameter.mark = 1
    other = torch.ones(3, dtype=torch.int64, device=there)
    before = parameter.data_ptr(), parameter.dtype, parameter.shape, torch.vgpu.memory_allocated()
    with pytest.raises(RuntimeError, match="floating point"):
        parameter.data = other
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.ones(2).to_sparse()
    assert parameter.device == torch.device(where) and parameter.mark == 1
    after = parameter.data_ptr(), parameter.dtype, parameter.shape, torch.vgpu.memory_allocated()
    assert after == before
    (parameter * 2).sum().backward()
    assert parameter.grad.tolist() == [2, 2]


def test_moved_parameters_in_all_that_takes_parameters(devices):
    """Each compared with the CPU: vectors, states, copies, pickles, parametrizations."""

    def results(where):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), parametrizations.weight_norm(nn.Linear(3, 2))).double()
        plain = copy.deepcopy(net.state_dict())
        net.to(where)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 3, device=where, dtype=torch.float64)).sum().backward()
        optimizer.step()
        vector_to_parameters(parameters_to_vector(net.parameters()) * 2, net.parameters())
        first = net[0]
        again = pickle.loads(pickle.dumps(first))
        copied = copy.deepcopy(net)
        copied.load_state_dict(plain)
        found = [parameters_to_vector(net.parameters()), again.weight, copied[0].weight]
        copied.load_state_dict(plain, assign=True)
        assert {p.device for p in copied.parameters()} == {torch.device("cpu")}
        copied.to(where)
        return [value.detach().cpu() for value in (*found, *copied.parameters())]

    for found, wanted in zip(results("vgpu:1"), results("cpu"), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_type_of_a_tensor_makes_a_parameter_or_a_tensor_of_the_cpu(devices):
    weight = nn.Linear(2, 3).to("vgpu:0").weight
    for made in (type(weight)(weight.data), type(weight)(data=weight.data, requires_grad=False)):
        assert isinstance(made, nn.Parameter) and made.device == weight.device
        assert made.untyped_storage() == weight.untyped_storage()
    assert type(type(weight)(2, 3)) is torch.Tensor  # as torch.Tensor(2, 3)


# -- by the name of CUDA

PROGRAM = f"""
import copy, json, pickle, typing, weakref
import numpy as np
import torch
from torch import nn

{inspect.getsource(what_a_move_keeps)}

moves = (
    ("cpu", nn.Module.cuda), ("cuda:0", nn.Module.cpu), ("cuda:0", lambda net: net.cuda(1)),
    ("cuda:1", nn.Module.double), ("cpu", lambda net: net.to(torch.device(1))),
)
kept = [what_a_move_keeps(*move) for move in moves]


def with_jagged_tensors(where):
    torch.manual_seed(0)
    rows = [torch.rand(2, 3), torch.rand(4, 3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).to(where)
    assert jagged.device == torch.empty(0, device=where).device
    layer = nn.Linear(3, 2).to(where)
    out = layer(jagged).tanh()
    out.values().sum().backward()
    padded = out.to_padded_tensor(0.0)
    return [out.values().tolist(), layer.weight.grad.tolist(), padded.sum().item()]


jagged = dict((where, with_jagged_tensors(where)) for where in ("cpu", "cuda"))


def attention_of_a_dtensor():
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    x = (torch.arange(120.0) / 120).view(1, 6, 4, 5)
    part = DTensor.from_local(x.cuda(), init_device_mesh("cuda", (1,)), [Shard(0)])
    out = nn.functional.scaled_dot_product_attention(part, part, part)
    dist.destroy_process_group()
    return str(out.device), str(out.placements), out.to_local().tolist()


attention = attention_of_a_dtensor()

numbered = []
for one in 1, np.int64(1), np.int32(1):
    generators = torch.Generator(one), torch.Generator(device=one)
    devices = torch.device(one), *(each.device for each in generators)
    numbered += [str(device) for device in (*devices, torch.Stream(device=one).device)]
assert torch.device(1) == torch.device("cuda:1") == torch.zeros(1, device=1).device
assert torch.device(0).type == "cuda" and isinstance(torch.device(0), torch.device)
assert isinstance(torch.device("cpu"), torch.device | None)
assert torch.device(type="cuda", index=1) == copy.deepcopy(torch.device(1))
assert pickle.loads(pickle.dumps(torch.device)) is torch.device
assert pickle.loads(pickle.dumps(torch.device(1))) == torch.device(1)
torch.save(torch.device(1), "device.pt")
assert torch.load("device.pt") == torch.device(1)
with torch.device(1):
    assert torch.zeros(1).device == torch.device(1)

@torch.jit.script
def zeros(device: torch.device):
    return torch.zeros(1, device=device) + torch.zeros(1, device=torch.device("cpu"))

@torch.library.custom_op("test::to", mutates_args=())
def to(
    x: torch.Tensor, where: torch.device, other: typing.Optional[torch.device] = None
) -> torch.Tensor:
    return x.to(where, copy=True)

cpu = torch.device("cpu")
assert zeros(cpu).tolist() == to(torch.zeros(1), cpu).tolist() == [0]

print(json.dumps(dict(kept=kept, jagged=jagged, numbered=numbered, attention=attention)))
"""


@pytest.fixture(scope="module")
def by_the_name_of_cuda(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    done = vgpu(folder, "run", "--gpus", "2", sys.executable, written(folder, PROGRAM))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("\n")[-2])


def test_what_a_move_keeps_by_the_name_of_cuda(by_the_name_of_cuda):
    assert by_the_name_of_cuda["kept"] == [what_a_move_keeps("cpu", nn.Module.double)] * 5


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_jagged_tensors(where, by_the_name_of_cuda):
    """NestedTensor gives torch its device by place, not by name."""
    torch.manual_seed(0)
    rows = torch.cat([torch.rand(2, 3), torch.rand(4, 3)])
    layer = nn.Linear(3, 2)
    values = layer(rows).tanh()
    values.sum().backward()
    wanted = [values.tolist(), layer.weight.grad.tolist(), values.sum().item()]
    for a, b in zip(by_the_name_of_cuda["jagged"][where], wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def test_attention_of_dtensors(by_the_name_of_cuda):
    """Both changes to torch's module of DTensors are made at its import: attention, and devices.

    Of a batch of one that is split, torch refuses what it does where kernels are not fused.
    """
    x = (torch.arange(120.0) / 120).view(1, 6, 4, 5)
    device, placements, values = by_the_name_of_cuda["attention"]
    assert (device, placements) == ("cuda:0", "(Shard(dim=0),)")
    wanted = nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(torch.tensor(values), wanted)


def test_numbered_devices_are_called_cuda(by_the_name_of_cuda):
    """And what stands for `torch.device` is one wherever torch looks at the class itself."""
    assert by_the_name_of_cuda["numbered"] == ["cuda:1"] * 12


@pytest.mark.parametrize("where", ["cpu", "vgpu:0"])
def test_a_copy_on_its_way_keeps_the_memory_that_it_was_issued_for(devices, where):
    """On CUDA it has that memory's address, so new `data` of the tensor makes no difference."""
    new, source = torch.full((3,), 7.0, device=where), torch.arange(3.0, device="vgpu:0")
    torch.vgpu.synchronize()
    target = torch.zeros(3).pin_memory()
    same_memory = target.view(3)
    with Gate("vgpu:0"):
        target.copy_(source, non_blocking=True)
        target.data = new
    torch.vgpu.synchronize()
    assert same_memory.tolist() == [0, 1, 2]
    assert target.tolist() == new.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    "change", [lambda x: setattr(x, "data", torch.full((2, 2), 7.0)), torch.Tensor.t_]
)
def test_a_copy_on_its_way_reads_the_memory_that_it_was_issued_for(devices, change):
    source, target = torch.arange(4.0).view(2, 2).pin_memory(), torch.zeros(2, 2, device="vgpu:0")
    torch.vgpu.synchronize()
    with Gate("vgpu:0"):
        target.copy_(source, non_blocking=True)
        change(source)
    assert target.tolist() == [[0, 1], [2, 3]]
    assert source.tolist() != [[0, 1], [2, 3]]


@pytest.mark.parametrize("kind, name", [(nn.Parameter, "Parameter"), (torch.Tensor, "Tensor")])
def test_a_class_that_a_move_loses_is_named(devices, kind, name):
    """CUDA keeps it, so that a program which asks isinstance() would go another way in silence."""

    class Sliced(kind):
        pass

    tensors = [torch.ones(2).as_subclass(Sliced) for _ in range(2)]
    with pytest.warns(
        UserWarning, match=rf"a .*Sliced that moves.*becomes a plain {name},"
    ) as said:
        for tensor in tensors:
            tensor.data = torch.ones(2, device="vgpu:0")
    assert len(said) == 1, "once for a class"


def test_a_module_on_meta_is_refused_as_on_the_cpu(devices):
    said = []
    for where in "cpu", "vgpu:0":
        with pytest.raises(NotImplementedError, match="no data.*to_empty") as refused:
            nn.Linear(2, 2, device="meta").to(where)
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_attention_of_jagged_tensors_in_the_strided_layout_is_refused_by_name(devices):
    rows = [torch.ones(length, 2, 3, device="vgpu:0") for length in (2, 4)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(RuntimeError, match=r"strided layout.*to_padded_tensor\(0.0\) and a mask"):
        nn.functional.scaled_dot_product_attention(jagged, jagged, jagged)
