"""Modelled GPUs that compute no values: what runs, what is refused, and what it costs."""

import gc
import json
import tracemalloc

import pytest
import torch
from modelling import fixed_gpus
from programs import ranks, written
from programs import vgpu as run_command
from torch import nn
from torch.nn import functional as F

import d2lpar
from vgpu import Link, clock, virtual_gpus
from vgpu.modelled.host import EAGER
from vgpu.tensors import cells


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch):
    """Take no tensor for a small one, unless a test says otherwise: it has few numbers in each."""
    monkeypatch.setattr(cells, "small_bytes", lambda dtype: 0)
    yield
    virtual_gpus(2)


@pytest.fixture
def device():
    return virtual_gpus(2, model="v100", values=False)[0]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_model_of_70_billion_parameters_takes_no_memory():
    devices = virtual_gpus(64, model="h100", values=False)
    before = resident()
    tracemalloc.start()
    try:
        width, weights = 8192, []
        for layer in range(80):
            for rows in (width, 2 * width, width, 4 * width, 5 * width):
                where = devices[layer % 64]
                weights.append(torch.empty(rows, width, device=where, dtype=torch.bfloat16))
                weights[-1].normal_()
                weights[-1].mul_(0.02)
        assert sum(weight.numel() for weight in weights) >= 69e9
        x = torch.ones(4096, width, device=devices[0], dtype=torch.bfloat16)
        for weight in weights[:3]:
            x = (x @ weight.t())[:, :width]
        d2lpar.synchronize()
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert resident() - before < 200e6
    assert clock() > 1e-3
    del weights, weight, x


def test_a_device_is_full_at_the_right_byte():
    (device,) = virtual_gpus(1, model="v100", values=False)
    gc.collect()
    others = torch.vgpu.memory_allocated(device)  # what other tests have left on the device
    virtual_gpus(1, model="v100", values=False, memory=others + 4096)
    torch.vgpu.reset_peak_memory_stats(device)
    x = torch.empty(3584, dtype=torch.uint8, device=device)
    y = torch.zeros(1, dtype=torch.uint8, device=device)  # takes 512, as on CUDA
    with pytest.raises(torch.OutOfMemoryError, match="of which 0.00 MiB is free"):
        torch.zeros(1, dtype=torch.uint8, device=device)
    del y
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(513, dtype=torch.uint8, device=device)
    torch.zeros(512, dtype=torch.uint8, device=device)
    assert torch.vgpu.memory_allocated(device) == others + 3584
    assert torch.vgpu.max_memory_allocated(device) == others + 4096
    del x
    assert torch.vgpu.memory_allocated(device) == others


def test_weights_can_be_drawn_from_a_part_of_a_distribution(device):
    # torch 2.13 draws again until no number is outside: `mask.any()` has no value here.
    weight = nn.Linear(32, 64, device=device).weight
    given, state = torch.Generator(device), torch.vgpu.get_rng_state(device)
    assert nn.init.trunc_normal_(weight, std=0.02, generator=given) is weight
    assert torch.equal(torch.vgpu.get_rng_state(device), state)
    with_values = torch.empty(64, 32, device=virtual_gpus(1)[0])
    torch.manual_seed(0)
    nn.init.trunc_normal_(with_values, std=0.02, a=-0.03, b=0.03)
    assert 0.029 < with_values.abs().max().item() <= 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_item_waits_and_is_not_a_number(dtype):
    (device,) = fixed_gpus(1, seconds=2.0, link=Link(1.0), values=False)
    x = torch.ones((), dtype=dtype, device=device)
    item = x.item()
    assert item != item
    assert clock() == 2 + x.element_size()


def test_copies_to_the_cpu_hold_what_nobody_takes_for_values(device):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        assert torch.ones(3, dtype=dtype, device=device).cpu().isnan().all()
    lowest = {torch.int8: -128, torch.int64: -(2**63), torch.uint8: 0, torch.bool: False}
    for dtype, value in lowest.items():
        assert torch.ones(2, dtype=dtype, device=device).tolist() == [value] * 2
    host = torch.ones(3).pin_memory()
    host.copy_(torch.zeros(3, device=device), non_blocking=True)
    torch.vgpu.synchronize()
    assert host.isnan().all()


NEEDS_VALUES = {
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] else 0,
    "int": lambda x: int(x[0]),
    "item of a bool": lambda x: x.isnan().any().item(),
    "index": lambda x: [1, 2][x[0].long()],
    "nonzero": lambda x: x.nonzero(),
    "masks": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("name", NEEDS_VALUES)
def test_what_needs_a_value_to_go_on_is_refused_and_says_why(device, name):
    x = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="values"):
        NEEDS_VALUES[name](x)
    assert (x + 1).shape == (3,)
    torch.vgpu.synchronize()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(10, 8), nn.LSTM(8, 8, 2, dropout=0.5)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(F.dropout(self.lstm(self.embedding(x))[0].mean(0)))


def images(size):
    return torch.rand(8, 1, size, size)


NETS = {
    "lenet": (d2lpar.lenet, lambda: images(28)),
    "resnet18": (lambda: d2lpar.resnet18(10, 1), lambda: images(32)),
    "words": (Words, lambda: torch.randint(10, (5, 8))),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda: torch.rand(8, 4, 8)),
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "autocast", "DataParallel"])
@pytest.mark.parametrize("name", NETS)
def test_training_runs_through(device, name, kind, optimizer):
    make, batch = NETS[name]
    net, X = make().to(device), batch()
    optimizer = OPTIMIZERS[optimizer](net.parameters())
    called = net
    if kind == "DataParallel":
        called = nn.DataParallel(net, ["vgpu:0", "vgpu:1"], dim=1 if name == "words" else 0)
    seconds = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("vgpu", enabled=kind == "autocast"):
            out = called(X.to(device))
            y = torch.zeros(len(out), dtype=torch.long, device=device)
            loss = F.cross_entropy(out.flatten(1), y)
        loss.backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        assert loss.item() != loss.item()
        seconds.append(clock())
    assert 0 < seconds[0] < seconds[1]
    assert all(p.grad is not None and p.grad.shape == p.shape for p in net.parameters())
    torch.vgpu.synchronize()


# -- values from before, and from without


def test_tensors_made_without_values_say_so_when_they_are_read_later(device):
    x, y = torch.ones(3, device=device), torch.empty(3, device=device)
    made = x + 1
    view = made[1:]
    (device,) = virtual_gpus(1)
    for tensor in (x, y, made, view):
        with pytest.raises(RuntimeError, match=r"virtual_gpus\(values=False\)"):
            tensor.cpu()
        with pytest.raises(RuntimeError, match=r"virtual_gpus\(values=False\)"):
            (tensor * 2).tolist()
    assert (torch.ones(3, device=device) + 1).tolist() == [2] * 3


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x[1:].mul_(2),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.copy_(torch.ones(3, device=x.device)),
        lambda x: x.copy_(torch.ones(3, device="vgpu:1")),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.zero_(),
        lambda x: x.normal_(),
    ],
)
def test_a_tensor_that_was_written_without_values_has_none(write):
    """The values from before the write would be wrong ones."""
    (device, _) = virtual_gpus(2)
    x, other = torch.full((3,), 5.0, device=device), torch.full((3,), 6.0, device=device)
    virtual_gpus(2, model="v100", values=False)
    write(x)
    torch.vgpu.synchronize()
    assert other.tolist() == [6] * 3
    virtual_gpus(2)
    for tensor in (x, x[:2]):
        with pytest.raises(RuntimeError, match=r"virtual_gpus\(values=False\)"):
            tensor.tolist()
    assert other.tolist() == [6] * 3


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: x.copy_(torch.ones(2, 3, device=x.device)),
        lambda x: x.fill_(1),
        lambda x: x.zero_().add_(1),
        lambda x: x.uniform_(1, 1),
        lambda x: x.normal_(1, 0),
        lambda x: x.random_(1, 2),
        lambda x: x.bernoulli_(1),
    ],
)
def test_a_tensor_without_values_gets_some_when_it_is_overwritten(device, overwrite):
    x = torch.zeros(2, 3, device=device)
    virtual_gpus(2, model="v100")
    with pytest.raises(torch.AcceleratorError, match="reads a tensor without values"):
        x.tolist()
    overwrite(x)
    assert x.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_part_that_is_overwritten_leaves_the_rest_without_a_number(device, dtype):
    x = torch.zeros(2, 2, device=device, dtype=dtype)
    virtual_gpus(2)
    x[0] = 1
    assert x[0].tolist() == [1, 1]
    assert x[1].isnan().all()


# -- small tensors


@pytest.fixture
def few(monkeypatch):
    """A device where tensors of up to 64 bytes have values."""
    monkeypatch.setattr(cells, "small_bytes", lambda dtype: 64)
    return virtual_gpus(2, model="v100", values=False)[0]


def large(device):
    """Return a tensor of 68 bytes, too large to have values."""
    return torch.ones(17, device=device)


def test_small_tensors_have_values_as_long_as_they_follow_from_small_ones(few):
    x = torch.arange(4, device=few, dtype=torch.float32)
    scale = torch.tensor([2.0], device=few)
    assert (x * scale + 1).tolist() == [1, 3, 5, 7] and int((x + 1)[2]) == 3
    assert (x @ x).item() == 14 and float(x.max()) == 3 and int(x.sum()) == 6
    assert bool((x == x).all()) and [10, 20][x[1].long()] == 20
    assert x[x > 1].tolist() == [2, 3] and torch.equal(x, x.clone())
    x += 1
    x[0] = 9
    assert x.tolist() == [9, 2, 3, 4]
    assert x.to("vgpu:1").tolist() == [9, 2, 3, 4]
    assert torch.zeros_like(large(few)[:4].clone()).tolist() == [0] * 4
    total, wrong = torch.zeros((), device=few), large(few).sum()
    for _ in range(3):
        total += 0.5
    assert total.item() == 1.5
    total += wrong
    assert total.item() != total.item() and wrong.item() != wrong.item()
    with pytest.raises(RuntimeError, match="--no-values"):
        bool(total > 1)


def test_running_statistics_of_what_has_no_values_have_none(few):
    """torch's schema does not say that a batch norm writes them."""
    norm = nn.BatchNorm1d(4).to(few)
    assert norm.running_var.tolist() == [1] * 4
    norm(large(few)[:8].view(2, 4).clone())
    assert norm.running_mean.cpu().isnan().all() and norm.running_var.cpu().isnan().all()
    assert norm.num_batches_tracked.item() == 1
    known = nn.BatchNorm1d(4).to(few)
    known(torch.tensor([[1.0, 2, 3, 4], [3, 4, 5, 6]], device=few))
    assert known.running_mean.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])


def test_what_fully_shard_gathers_without_values_has_none(few):
    """Its operator returns views of the memory that it writes, and does not say that it does."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives  # noqa: F401

    gathered = torch.zeros(8, device=few)
    torch.ops.fsdp.all_gather_copy_in([large(few)[:4].clone()], gathered, [4], 4, 1)
    assert gathered.cpu().isnan().all()
    torch.ops.fsdp.all_gather_copy_in([torch.ones(4, device=few)], gathered, [4], 4, 1)
    assert gathered[4:].cpu().isnan().all(), "part of what has no values cannot have any"


def test_known_masks_choose_from_what_has_no_values(few):
    """As in a loss that leaves out padding, and in SyncBatchNorm; shapes are those of the CPU."""
    labels = torch.tensor([3, -100, 1, -100, 2])
    losses = torch.ones(5, 17, requires_grad=True)
    there = losses.detach().to(few).requires_grad_()
    for where, each in ((labels, losses), (labels.to(few), there)):
        each[where != -100].mean().backward()
    assert there[labels.to(few) != -100].shape == (3, 17)
    assert there.grad.shape == losses.grad.shape
    assert there[(labels.to(few) != -100).byte()].shape == (3, 17), "uint8 is a mask, too"
    there.detach()[labels.to(few) != -100] = 0
    with pytest.raises(RuntimeError, match="values"):
        there[there > 0]


def test_memory_of_a_small_tensor_serves_again_for_later_values(few):
    """A view that was read before would otherwise show the old memory."""
    x = torch.tensor([1.0, 2.0], device=few)
    view = x[1:]
    assert view.tolist() == [2]
    x += large(few)[:2]
    assert view.cpu().isnan().all()
    view.fill_(5)
    assert x.cpu().isnan().all(), "the other number is not known"
    x.copy_(torch.tensor([3.0, 4.0]))
    assert view.tolist() == [4] and x.tolist() == [3, 4]
    x.zero_()
    assert view.tolist() == [0]


# -- vgpu run --no-values

TRAIN = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank, "long": "x" * 10**5 * (1 + rank)})
    assert [len(one["long"]) for one in found] == [10**5, 2 * 10**5]
    told = [{"lr": 0.1}] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)

    net = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10))
    net = DDP(net.cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(net.parameters(), lr=told[0]["lr"], momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(256, 512), torch.randint(10, (256,)))
    loader = DataLoader(data, 32, sampler=DistributedSampler(data), pin_memory=True)
    for epoch in range(2):
        start, seen = time.time(), torch.zeros((), device="cuda")
        for x, y in loader:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen += len(x)
            total = loss.item()
        dist.all_reduce(seen)
        torch.cuda.synchronize()
        told = time.time() - start
        if seen == 256 and rank == 0:
            print(f"epoch {epoch}: {total:.3f} {scaler.get_scale()} {told}", flush=True)
    assert len(optimizer.state) == len([*net.parameters()]), "the scaler has taken no step"
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_exchange_objects_count_and_print_the_times_of_epochs(tmp_path):
    program, trace = written(tmp_path, TRAIN), tmp_path / "trace.json"
    options = "run", "--gpus", "2", "--model", "v100", "--no-values", "--trace", str(trace)
    done = run_command(tmp_path, *options, *ranks(tmp_path, 2), program)
    assert done.returncode == 0, done.stderr
    epochs = [line.split() for line in done.stdout.splitlines()]
    assert [epoch[:4] for epoch in epochs] == [
        ["epoch", "0:", "nan", "65536.0"],
        ["epoch", "1:", "nan", "65536.0"],
    ]
    assert all(1e-3 < float(epoch[-1]) < 0.1 for epoch in epochs)
    modelled = f"2 x V100-SXM2-16GB, {EAGER}, modelled, no values; the program's clock: model"
    assert f"vgpu run: {modelled}\nprocesses that used them: 2;" in done.stderr
    devices = [line.split()[:2] for line in done.stderr.splitlines()]
    assert ["0", "cuda:0"] in devices and ["1", "cuda:1"] in devices
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0, host", "rank 0, cuda:0", "rank 1, host", "rank 1, cuda:1"]
    assert len({event["pid"] for event in events}) == 4


def test_small_tensors_that_nobody_has_written_are_zero(device, monkeypatch):
    """A table of indices that a network on "meta" leaves unwritten must not point anywhere."""
    monkeypatch.undo()
    for _ in range(100):  # what `empty` would find there otherwise
        torch.full((169,), -1)
    for index in (
        torch.empty(169, dtype=torch.long, device=device),
        torch.empty_like(torch.empty(169, dtype=torch.long, device="meta"), device=device),
    ):
        assert index.tolist() == [0] * 169
    for dtype, most in (torch.uint8, 2**26), (torch.int64, 2**20), (torch.float32, 2**16):
        x = torch.zeros(most // dtype.itemsize, dtype=dtype, device=device)
        assert x[-1].item() == 0 != x.new_zeros(len(x) + 1)[-1].item()
