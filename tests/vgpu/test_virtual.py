"""What virtual GPUs mean: CUDA's semantics, row by row of the table in the package's design.

Most tests hold an engine with a `Gate`, so that they do not depend on how fast this machine is.
"""

import contextlib
import gc
import weakref
from functools import partial
from operator import ne

import fresh
import pytest
import torch
from gates import Gate, LateClock, in_threads, named, only_here, overlap, recorded, run_what_can
from held import held
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from waiting import wait_until

import d2lpar
from vgpu import Link, start_recording, stop_recording, virtual_gpus
from vgpu.runtime import registry
from vgpu.runtime.scheduler import Op

MIB = 2**20

pytestmark = pytest.mark.usefixtures("here_and_elsewhere")


# -- launches return at once


def test_an_operator_returns_before_it_ran(devices):
    event = torch.vgpu.Event()
    with Gate(devices[0]):
        y = torch.ones(3, device=devices[0]) + 1
        event.record()
        assert not event.query()
        assert not torch.vgpu.current_stream().query()
        assert y.shape == (3,)
    torch.vgpu.synchronize()
    assert event.query()
    assert torch.vgpu.current_stream().query()
    assert y.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0].item(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        repr,
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: f"{x[0]:.1f}",
        lambda x: torch.equal(x, x + 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: [1, 2, 3, 4][x[0].long()],
        lambda x: torch.accelerator.synchronize(x.device),
        lambda x: torch.vgpu.current_stream(x.device).synchronize(),
        lambda x: torch.vgpu.current_stream(x.device).record_event().synchronize(),
        lambda x: d2lpar.synchronize(),
        lambda x: d2lpar.synchronize(x.device),
    ],
    ids="item bool int float repr tolist cpu to format equal nonzero mask index synchronize "
    "stream event all device".split(),
)
@pytest.mark.parametrize("index", [0, 1])
def test_reading_a_value_waits(devices, read, index):
    with Gate(devices[index]) as gate:
        x = torch.ones(3, device=devices[index])
        with gate.opened_later():
            read(x)


def test_synchronize_waits_for_one_device_only(devices):
    with Gate(devices[1]):
        torch.vgpu.synchronize(devices[0])
        torch.vgpu.synchronize()
        d2lpar.synchronize(devices[0])
        assert not torch.vgpu.current_stream(devices[1]).query()


def test_kernels_of_two_devices_overlap_and_those_of_one_do_not(devices):
    with recorded() as recording, held(2):
        for _ in range(2):
            for device in devices:
                with torch.vgpu.device(device):
                    torch.vgpu._sleep(0.05)
    a, b = ([op for op in recording if op.device == device] for device in devices)
    kernels = [[op for op in ops if op.kind == "kernel"] for ops in (a, b)]
    assert [len(ops) for ops in kernels] == [2, 2]
    assert any(overlap(x, y) for x in kernels[0] for y in kernels[1])
    assert not any(overlap(*ops) for ops in kernels)


# -- copies


def test_copy_to_the_cpu_without_blocking_returns_before_the_data_is_there(devices):
    x = torch.zeros(1000, device=devices[0])
    with Gate(devices[0]):
        x += 1
        y = torch.full((1000,), -1.0).pin_memory()
        y.copy_(x, non_blocking=True)
        fresh = x.to("cpu", non_blocking=True)
        assert y.eq(-1).all()
        assert fresh.is_pinned()
    torch.vgpu.synchronize()
    assert y.eq(1).all()
    assert fresh.eq(1).all()
    assert not x.cpu().is_pinned()


def test_pageable_copies_block_and_pinned_ones_do_not(devices):
    pageable, pinned = torch.ones(10), torch.ones(10).pin_memory()
    with Gate(devices[0]) as gate:
        x = pinned.to(devices[0], non_blocking=True)
        assert not gate.open.is_set()
        with gate.opened_later():
            pageable.to(devices[0], non_blocking=True)
    with Gate(devices[0]) as gate, gate.opened_later():
        pinned.to(devices[0])
    assert x.sum().item() == 10
    with Gate(devices[0]) as gate, gate.opened_later():
        torch.empty(10).copy_(x, non_blocking=True)


def test_copies_never_overlap_kernels_of_their_stream(devices):
    virtual_gpus(2, link=Link(1e9, 0.002))
    x = torch.rand(100, 100, device=devices[0])
    host = torch.empty(100, 100).pin_memory()
    torch.vgpu.synchronize()
    with recorded() as recording:
        for _ in range(5):
            y = x @ x
            host.copy_(y, non_blocking=True)
            x.copy_(host, non_blocking=True)
    ops = sorted((op for op in recording if op.kind in ("kernel", "copy")), key=lambda op: op.start)
    assert [op.engine for op in ops] == ["compute", "d2h", "h2d"] * 5
    assert not any(overlap(a, b) for i, a in enumerate(ops) for b in ops[i + 1 :])


def test_copies_of_a_side_stream_overlap_kernels_and_copies_the_other_way(devices):
    virtual_gpus(2, link=Link(1e9, 0.05))
    x = torch.ones(1000, device=devices[0])
    up = torch.ones(1000).pin_memory()
    down = torch.zeros(1000).pin_memory()
    first, second = torch.vgpu.Stream(devices[0]), torch.vgpu.Stream(devices[0])
    torch.vgpu.synchronize()
    with recorded() as recording, Gate(devices[0]) as gate:
        wait_until(lambda: gate.op.start)
        with held(2):
            with torch.vgpu.stream(first):
                down.copy_(x, non_blocking=True)
            with torch.vgpu.stream(second):
                y = up.to(devices[0], non_blocking=True)
        first.synchronize()
        second.synchronize()
        assert not gate.open.is_set()
        assert down.sum() == 1000
    (kernel,) = named(recording, "gate")
    d2h, h2d = sorted(named(recording, "copy"), key=lambda op: op.engine)
    assert (d2h.engine, h2d.engine) == ("d2h", "h2d")
    assert overlap(kernel, d2h) and overlap(kernel, h2d) and overlap(d2h, h2d)
    assert y.sum().item() == 1000


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("way", ["h2d", "d2h", "p2p"])
def test_a_copy_holds_its_engine_for_what_the_link_takes(devices, way, pinned, monkeypatch):
    link = Link(bandwidth=40e6, latency=0.01, pageable=20e6)
    virtual_gpus(2, link=link, peer_link=Link(10e6, 0.02))
    host = torch.zeros(100_000)
    host = host.pin_memory() if pinned else host
    x = torch.zeros(100_000, device=devices[0])
    d2lpar.synchronize()
    late = LateClock(monkeypatch)
    with recorded() as recording:
        if way == "h2d":
            x.copy_(host)
        elif way == "d2h":
            host.copy_(x)
        else:
            x.to(devices[1])
    (copy,) = named(recording, "copy")
    expected = {"h2d": 0.02 if pinned else 0.03, "p2p": 0.06}
    expected["d2h"] = expected["h2d"]
    assert 0 <= copy.end - copy.start - expected[way] <= 2 * late.LATE + 1e-9
    assert (copy.engine, copy.num_bytes) == (way, 400_000)
    cpu = torch.device("cpu")
    ends = {"h2d": (cpu, devices[0]), "d2h": (devices[0], cpu), "p2p": tuple(devices)}
    assert (copy.source, copy.target) == ends[way]


def test_peer_copy_runs_after_both_streams_and_before_later_work_of_both(devices):
    virtual_gpus(2, peer_link=Link(1e9, 0.02))
    source = torch.zeros(10, device=devices[0])
    target = torch.full((10,), 5.0, device=devices[1])
    for late in devices:
        source.zero_()
        target.fill_(5)
        with Gate(late):
            source += 1
            target += 1
            target.copy_(source)
            source += 10
            result = target * 2
            assert not torch.vgpu.current_stream(devices[1]).query()
        assert result.tolist() == [2] * 10
        assert source.tolist() == [11] * 10


def test_peer_copy_keeps_order_when_the_current_streams_are_side_streams(devices):
    virtual_gpus(2, peer_link=Link(1e9, 0.02))
    source = torch.zeros(10, device=devices[0])
    d2lpar.synchronize()
    with torch.vgpu.stream(torch.vgpu.Stream(devices[1])) as stream, Gate(devices[1], stream):
        with torch.vgpu.stream(torch.vgpu.Stream(devices[0])):
            source += 1
            copy = source.to(devices[1])
            source += 1
            assert not torch.vgpu.current_stream(devices[0]).query()
    d2lpar.synchronize()  # what follows is on the default stream, which waited for nothing
    assert copy.sum().item() == 10


def test_copy_on_the_same_device_is_a_kernel(devices):
    x = torch.ones(10, device=devices[0])
    with recorded() as recording:
        torch.empty_like(x).copy_(x)
        x.untyped_storage().resize_(0)  # no work of the device
    assert {op.kind for op in recording} - {"wait"} == {"kernel"}


def test_a_copy_of_another_dtype_and_layout_moves_the_bytes_of_its_source(devices):
    x = torch.arange(12).reshape(3, 4)
    y = x.t().to(devices[0], torch.float64)
    assert y.stride() == x.t().stride()
    assert torch.equal(y.cpu(), x.t().double())
    image = y[None, None].to("cpu", memory_format=torch.channels_last)
    assert image.stride() == (12, 1, 3, 1)
    with recorded() as recording:
        y.to("cpu", torch.float16)
    [copy] = named(recording, "copy")
    assert copy.num_bytes == 12 * 8
    target = torch.zeros(4, 3, dtype=torch.float16, device=devices[1])
    target.copy_(y)
    assert torch.equal(target.cpu(), x.t().half())
    target[:, 1] = torch.tensor([1, 2, 3, 4])
    assert target[:, 1].tolist() == [1, 2, 3, 4]


# -- streams and events


def test_reading_without_a_wait_gives_the_documented_error(devices):
    x = torch.ones(10).pin_memory()
    side = torch.vgpu.Stream(devices[0])
    with Gate(devices[0]):
        y = torch.ones(10, device=devices[0]) * 2
        with torch.vgpu.stream(side):
            z = y.to("cpu", non_blocking=True)
        with pytest.raises(torch.AcceleratorError, match="read before the stream that computes it"):
            side.synchronize()
    assert (y + 1).tolist() == [3] * 10
    del x, z


def test_elapsed_time_is_what_the_stream_slept(devices, monkeypatch):
    start, end = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    torch.vgpu.synchronize()
    late = LateClock(monkeypatch)
    with Gate(devices[0]):
        start.record()
        torch.vgpu._sleep(0.05)
        end.record()
        with pytest.raises(RuntimeError, match="not been reached yet"):
            start.elapsed_time(end)
    end.synchronize()
    assert 0 <= start.elapsed_time(end) - 50 <= 2e3 * late.LATE + 1e-6
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.vgpu.Event().elapsed_time(end)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(torch.vgpu.Event(enable_timing=True))


@only_here
def test_current_stream_and_device_are_restored(devices):
    default = torch.vgpu.default_stream(devices[1])
    side = torch.vgpu.Stream(devices[1])
    assert torch.vgpu.current_device() == 0
    with torch.vgpu.stream(side):
        assert torch.vgpu.current_device() == 1
        assert torch.vgpu.current_stream() == side
        assert default not in (side, torch.vgpu.default_stream(0))
        assert torch.vgpu.current_stream(devices[0]) == torch.vgpu.default_stream(devices[0])
        with side, torch.vgpu.device(0):
            assert torch.vgpu.current_device() == 0
            assert torch.zeros(1, device="vgpu").device == devices[0]
        assert torch.vgpu.current_stream(devices[1]) == side
    assert torch.vgpu.current_device() == 0
    assert torch.vgpu.current_stream(devices[1]) == default
    with torch.vgpu.device(devices[1]):
        assert torch.zeros(1, device="vgpu").device == devices[1]
        assert torch.zeros(1).to("vgpu").device == devices[1]
        with torch.vgpu.device(-1):
            assert torch.vgpu.current_device() == 1
    with pytest.raises(ZeroDivisionError), torch.vgpu.stream(side):
        raise ZeroDivisionError
    assert torch.vgpu.current_stream(devices[1]) == default
    with torch.vgpu.stream(None), torch.vgpu.device(None):
        assert torch.vgpu.current_device() == 0
    assert side.device == devices[1]
    assert len({default, torch.vgpu.default_stream(1), side}) == 2


def test_a_thread_has_its_own_current_stream_and_device(devices):
    seen = []

    def work():
        seen.append((torch.vgpu.current_device(), torch.vgpu.current_stream(0)))

    with torch.vgpu.stream(torch.vgpu.Stream(devices[0])), torch.vgpu.device(devices[1]):
        in_threads([work])
    assert seen == [(0, torch.vgpu.default_stream(0))]


# -- errors


def test_operands_on_two_devices_raise(devices):
    a, b = (torch.ones(3, device=device) for device in devices)
    text = (
        "Expected all tensors to be on the same device, but found at least two devices, "
        "vgpu:0 and vgpu:1!"
    )
    for operation in (
        lambda: a + b,
        lambda: torch.cat([a, b]),
        lambda: a.add_(b),
        lambda: torch.add(a, a, out=b),
        lambda: torch.nn.functional.linear(a, b[None]),
        lambda: a * b[0],
    ):
        with pytest.raises(RuntimeError) as caught:
            operation()
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, c: x + c,
        lambda x, c: c + x,
        lambda x, c: torch.stack([x, c]),
        lambda x, c: x.add_(c),
        lambda x, c: c.add_(x),
        lambda x, c: c.sum().add_(x.sum()),
        lambda x, c: torch._foreach_add_([c.sum()], [x.sum()]),
        lambda x, c: torch.add(x, x, out=c),
        lambda x, c: torch.sum(x, 0, out=c[0]),
        lambda x, c: torch.nn.functional.linear(x, c[None]),
        lambda x, c: torch.where(x > 0, x, c),
        lambda x, c: c.masked_fill_(x > 0, 1),
    ],
)
def test_a_tensor_of_the_cpu_among_the_operands_raises(devices, operation):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device.*cpu"):
        operation(torch.ones(3, device=devices[0]), torch.ones(3))


def test_a_wrong_shape_raises_at_the_call(devices):
    with Gate(devices[0]) as gate:
        a = torch.ones(2, 3, device=devices[0])
        with gate.opened_later(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            a @ a
    with pytest.raises(RuntimeError, match="must match the size"):
        a + torch.ones(2, 4, device=devices[0])
    with pytest.raises(RuntimeError, match="is invalid for input of size 6"):
        a.view(5)


def failing(device):
    """Issue an operator whose kernel fails: an index that is out of range."""
    weight = torch.ones(3, 4, device=device)
    index = torch.full((2,), 7, device=device)
    return torch.nn.functional.embedding(index, weight)


@pytest.mark.parametrize("index", [0, 1])
def test_an_asynchronous_error_surfaces_once_at_the_next_synchronize(devices, index):
    device = devices[index]
    failing(device)
    torch.ones(3, device=device) + 1
    torch.vgpu.synchronize(devices[1 - index])
    with pytest.raises(torch.AcceleratorError, match=f"aten.embedding on {device} failed") as info:
        torch.vgpu.synchronize(device)
    assert "index out of range" in str(info.value)
    assert isinstance(info.value.__cause__, IndexError)
    torch.vgpu.synchronize(device)
    assert (torch.ones(3, device=device) + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "wait",
    [
        lambda y: (y[0, 0] * 2).item(),
        lambda y: y.cpu(),
        lambda y: torch.ones(1, device=y.device).item(),
        lambda y: torch.vgpu.current_stream(y.device).synchronize(),
        lambda y: torch.vgpu.current_stream(y.device).record_event().synchronize(),
        lambda y: d2lpar.synchronize(),
        lambda y: repr(y),
        lambda y: y.nonzero(),
    ],
    ids="item cpu other stream event all repr nonzero".split(),
)
def test_any_wait_reports_an_asynchronous_error(devices, wait):
    y = failing(devices[1])
    with pytest.raises(torch.AcceleratorError, match="aten.embedding on vgpu:1 failed"):
        wait(y)
    torch.vgpu.synchronize(devices[1])


def test_results_of_a_failed_kernel_say_so_when_they_are_read(devices):
    y = failing(devices[0])
    with pytest.raises(torch.AcceleratorError):
        torch.vgpu.synchronize()
    z = y * 2 + 1
    torch.vgpu.synchronize()
    for read in (lambda: z.sum().item(), z.cpu, z.nonzero, lambda: z.to(devices[1]).cpu()):
        text = r"^vgpu error: \S+ reads a tensor whose kernel failed: IndexError: index out"
        with pytest.raises(torch.AcceleratorError, match=text):
            read()
    with pytest.raises(torch.AcceleratorError, match="add_ .*reads a tensor whose kernel failed"):
        torch.ones(2, 4, device=devices[0]).add_(y).cpu()
    d2lpar.synchronize()


def test_a_copy_of_what_failed_leaves_its_target_as_it_was(devices):
    bad = failing(devices[1])
    target = torch.ones(bad.shape, device=devices[0])
    target.copy_(bad)
    with pytest.raises(torch.AcceleratorError, match="aten.embedding"):
        torch.vgpu.synchronize(devices[1])
    assert target.min() == target.max() == 1


def test_of_several_asynchronous_errors_the_first_is_raised(devices):
    x, index = torch.ones(3, device=devices[0]), torch.tensor([9], device=devices[0])
    failing(devices[0])
    x.index_select(0, index)
    with pytest.raises(torch.AcceleratorError, match="aten.embedding"):
        torch.vgpu.synchronize()
    torch.vgpu.synchronize()


@only_here
def test_an_error_that_is_kept_does_not_keep_what_its_kernel_used(devices):
    used = []

    class Thing:
        pass

    def work(op):
        thing = Thing()
        used.append(weakref.ref(thing))
        raise ValueError("no")

    found = registry.find(devices[0])
    found.default_stream.issue(Op("fails", "kernel", found.compute, work))
    run_what_can()
    assert used[0]() is None
    with pytest.raises(torch.AcceleratorError, match="fails on vgpu:0 failed.*ValueError: no"):
        torch.vgpu.synchronize()


# -- memory


def test_memory_is_accounted_exactly(devices):
    gc.collect()
    a, b = devices
    before = torch.vgpu.memory_allocated(a), torch.vgpu.memory_allocated(b)
    x = torch.zeros(1024, 10, device=a)
    assert torch.vgpu.memory_allocated(a) - before[0] == 40_960
    views = [x[3], x.t(), x.view(-1), x.expand(2, 1024, 10), x.detach(), x.unbind(0), x.split(3)]
    assert torch.vgpu.memory_allocated(a) - before[0] == 40_960
    y = x.to(torch.float64)
    x += 1
    assert torch.vgpu.memory_allocated(a) - before[0] == 122_880
    assert torch.vgpu.memory_allocated(b) == before[1]
    z = y.to(b)
    assert torch.vgpu.memory_allocated(b) - before[1] == 81_920
    del x, y
    assert torch.vgpu.memory_allocated(a) - before[0] == 40_960
    del views
    assert torch.vgpu.memory_allocated(a) == before[0]
    del z
    assert torch.vgpu.memory_allocated(b) == before[1]


def test_out_of_memory_and_afterwards(devices):
    gc.collect()
    used = torch.vgpu.memory_allocated(devices[0])
    virtual_gpus(2, memory=used + 4 * MIB)
    x = torch.empty(3 * MIB, dtype=torch.uint8, device=devices[0])
    assert torch.vgpu.mem_get_info(devices[0]) == (MIB, used + 4 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as info:
        torch.empty(MIB, dtype=torch.float16, device=devices[0])
    text = str(info.value)
    assert "VGPU out of memory. Tried to allocate 2.00 MiB" in text
    assert "vgpu:0" in text and "1.00 MiB is free" in text
    with pytest.raises(torch.OutOfMemoryError):
        x + 0
    torch.empty(3 * MIB, dtype=torch.uint8, device=devices[1])
    assert torch.vgpu.memory_allocated(devices[0]) == used + 3 * MIB
    y = torch.empty(MIB, dtype=torch.uint8, device=devices[0])
    del x, y
    torch.empty(4 * MIB, dtype=torch.uint8, device=devices[0])


def test_only_a_mask_makes_indexing_wait(devices):
    x, i = torch.arange(6.0, device=devices[0]), torch.tensor([1, 3], device=devices[0])
    for _ in range(2):
        assert x[x > 3].tolist() == [4, 5]
    x[i]
    torch.vgpu.synchronize(devices[0])
    with Gate(devices[0]):
        y = x[i]
    assert y.tolist() == [1, 3]


def test_a_fraction_of_the_memory(devices):
    gc.collect()
    used, device = torch.vgpu.memory_allocated(devices[1]), devices[1]
    virtual_gpus(2, memory=2 * (used + MIB))
    torch.vgpu.set_per_process_memory_fraction(0.5, device)
    total = torch.vgpu.get_device_properties(device).total_memory
    assert total == torch.vgpu.mem_get_info(device)[1] == 2 * (used + MIB)
    assert [torch.vgpu.get_per_process_memory_fraction(d) for d in devices] == [1, 0.5]
    x = torch.empty(MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match=r"MiB of it is allowed to be used"):
        torch.empty(1, dtype=torch.uint8, device=device)
    torch.vgpu.set_per_process_memory_fraction(1, device)
    y = torch.empty(MIB, dtype=torch.uint8, device=device)
    del x, y
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"Invalid fraction value: {fraction}"):
            torch.vgpu.set_per_process_memory_fraction(fraction, device)
    torch.vgpu.set_per_process_memory_fraction(0.5, device)
    virtual_gpus(2)
    assert torch.vgpu.get_per_process_memory_fraction(device) == 1


def test_a_backward_that_did_not_fit_gives_its_memory_back_at_once(devices):
    def backward():
        x = torch.zeros(MIB // 4, device=devices[0], requires_grad=True)
        (x.exp() * x).sum().backward()

    backward()  # torch's first shape inference keeps frames until they are collected
    gc.collect()
    used = torch.vgpu.memory_allocated(devices[0])
    virtual_gpus(2, memory=used + 3 * MIB + 4)
    gc.disable()
    try:
        with contextlib.suppress(torch.OutOfMemoryError):
            backward()
            pytest.fail("it did fit")
        assert torch.vgpu.memory_allocated(devices[0]) == used
    finally:
        gc.enable()


def test_a_backward_that_failed_keeps_no_gradients_that_it_did_not_come_to(devices):
    def backward(hook):
        x = torch.zeros(1000, device=devices[0], requires_grad=True)
        first, second = x.sin(), x.cos()
        second.register_hook(hook)  # is called while the gradient of `first` waits in a queue
        loss = (first * second).sum()
        with torch.inference_mode():  # which backward does not mind
            loss.backward()

    backward(lambda grad: grad)  # torch's first shape inference keeps frames
    gc.collect()
    used = torch.vgpu.memory_allocated(devices[0])
    with contextlib.suppress(ZeroDivisionError):
        backward(lambda grad: 1 / 0)
        pytest.fail("nothing was raised")
    assert torch.vgpu.memory_allocated(devices[0]) == used


def test_a_module_that_did_not_fit_can_be_moved_once_it_fits(devices):
    gc.collect()
    used = torch.vgpu.memory_allocated(devices[0])
    net = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(1000, 1000))
    virtual_gpus(2, memory=used + MIB)
    with pytest.raises(torch.OutOfMemoryError):
        net.to(devices[0])
    virtual_gpus(2)
    net.to(devices[0])
    assert {parameter.device for parameter in net.parameters()} == {devices[0]}
    assert net[1](torch.ones(2, 1000, device=devices[0])).shape == (2, 1000)


def test_replicas_never_share_memory(devices):
    x = torch.ones(3)
    copies = [x.to(device) for device in devices] + [x.to("vgpu"), x.to(devices[0], copy=True)]
    copies += [copies[0].to(devices[1]), copies[0].cpu(), copies[0].to(devices[0], copy=True)]
    for i, copy in enumerate(copies):
        copy.fill_(i + 10)
    x.fill_(5)
    assert [copy[0].item() for copy in copies] == [10, 11, 12, 13, 14, 15, 16]
    y = copies[0]
    assert y.to(devices[0]) is y
    net = torch.nn.Linear(2, 2)
    weights = [parameter.detach().to(devices[0]) for parameter in net.parameters()]
    before = weights[0].tolist()
    with torch.no_grad():
        net.weight.zero_()
    assert weights[0].tolist() == before


# -- random numbers


def draw(device, seed=lambda: None):
    """Return what each kind of operator draws, with a call of `seed` before each."""
    net = torch.nn.Dropout(0.5)
    ones = torch.ones(20, device=device)
    draws = (
        lambda: torch.rand(5, device=device),
        lambda: torch.randn(3, 2, device=device),
        lambda: torch.randint(100, (4,), device=device),
        lambda: torch.randperm(10, device=device),
        lambda: net(ones),
        lambda: torch.empty(3, device=device).normal_(2, 3),
        lambda: torch.bernoulli(ones / 2),
        lambda: torch.multinomial(ones, 3),
        lambda: torch.rand_like(ones),
        lambda: torch.randn_like(ones),
        lambda: torch.randint_like(ones, 3, 9),
        lambda: torch.nn.init.kaiming_normal_(torch.empty(3, 3, device=device)),
    )
    return [each() for each in draws if (seed(), True)]


def lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def test_random_numbers_are_the_cpus_whatever_the_other_device_draws(devices):
    """The first after a seed are the CPU's; those after it are the same on all devices."""
    expected = lists(draw("cpu", seed=lambda: torch.manual_seed(3)))

    def seed():
        torch.manual_seed(3)
        torch.rand(100, device=devices[0])

    assert lists(draw(devices[1], seed)) == expected
    torch.manual_seed(3)
    a, b = lists(draw(devices[0])), lists(draw(devices[1]))
    assert a == b and a[0] == expected[0]
    assert all(map(ne, a[1:], expected[1:]))


# -- threads and processes


def test_several_threads_issue_to_both_devices(devices):
    torch.manual_seed(0)
    a = torch.rand(20, 20).double()
    expected = a
    for _ in range(20):
        expected = torch.tanh(expected @ a)
    results = []

    def work(device):
        with torch.vgpu.stream(torch.vgpu.Stream(device)):
            x = y = a.to(device).requires_grad_()
            for _ in range(20):
                y = torch.tanh(y @ x)
            y.sum().backward()
            results.append((y.cpu(), x.grad.cpu()))

    in_threads([partial(work, device) for device in devices * 3])
    assert len(results) == 6
    for y, grad in results:
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(grad, results[0][1])


FORK = """
import os, signal, sys, threading, time, torch, d2lpar
import multiprocessing
from vgpu.runtime import registry
from vgpu.runtime import engines
from vgpu.runtime.scheduler import Op

a, b = d2lpar.virtual_gpus(2)
x = torch.ones(3, device=a)
released = threading.Event()
engines.sleep_until = lambda moment: released.wait(60)
held = threading.Lock()

begun = threading.Event()

def work(op):
    with held:
        begun.set()
        time.sleep(0.3)

stream = registry.current().current_stream()
stream.issue(Op("locked", "kernel", registry.current().compute, work))
begun.wait(30)
with torch.vgpu.device(b):
    torch.vgpu._sleep(1)
    event = torch.vgpu.current_stream().record_event()
idle = torch.vgpu.Stream(b)

def attempt(name, function):
    try:
        function()
        print(name, "worked", flush=True)
    except RuntimeError as error:
        print(name, str(error).split(".")[0], flush=True)

def child():
    attempt("add", lambda: x + 1)
    attempt("rand", lambda: torch.rand(3, device=b))
    attempt("empty", lambda: torch.empty(3, device=b))
    attempt("item", lambda: x[0].item())
    attempt("busy", lambda: torch.vgpu.synchronize(b))
    attempt("event", event.synchronize)
    attempt("idle", idle.synchronize)
    attempt("wait", lambda: idle.wait_event(event))
    attempt("setup", lambda: d2lpar.virtual_gpus(2))
    attempt("more", lambda: d2lpar.virtual_gpus(3))
    attempt("dtype", lambda: torch.set_default_dtype(torch.float32))
    attempt("cpu", lambda: torch.manual_seed(1) and torch.rand(3).sum().item())
    print("lock", held.acquire(timeout=5), flush=True)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
print("child", process.exitcode, flush=True)
process.kill()
released.set()

loader = torch.utils.data.DataLoader(
    torch.arange(8.0), 4, num_workers=1, pin_memory=True, multiprocessing_context="fork"
)
for batch in loader:
    print("batch", batch.is_pinned(), batch.to(a, non_blocking=True).sum().item(), flush=True)
pid = os.fork()
if not pid:
    signal.alarm(30)  # it waits for no engine of its parent
    sys.exit(0)
print("plain fork", os.waitpid(pid, 0)[1], flush=True)
torch.vgpu.synchronize(b)
print("parent", (x + 1).tolist())
"""


@only_here
def test_a_forked_child_gets_an_error_and_a_data_loader_works():
    refused = "Cannot re-initialize vgpu in forked subprocess"
    result = fresh.run(FORK, fresh.SET_UP)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        *(f"{n} {refused}" for n in "add rand empty item busy event idle wait setup more".split()),
        "dtype worked",
        "cpu worked",
        "lock True",
        "child 0",
        "batch True 6.0",
        "batch True 22.0",
        "plain fork 0",
        "parent [2.0, 2.0, 2.0]",
    ]


FORK_WHILE_AN_ENGINE_STARTS = """
import os, torch

def start_one():  # runs after the one of virtual GPUs, which has taken hold of all engines
    if forking:
        host.to(a, non_blocking=True)

forking = False
os.register_at_fork(before=start_one)
import d2lpar
(a,) = d2lpar.virtual_gpus(1)
host = torch.ones(3).pin_memory()
x = torch.zeros(3, device=a) + 1
torch.vgpu.synchronize()
forking = True
pid = os.fork()
if not pid:
    try:
        x + 1
    except RuntimeError as error:
        os._exit(7)
forking = False
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print((x + host.to(a)).tolist())
"""


@only_here
def test_a_fork_while_an_engine_starts():
    result = fresh.run(FORK_WHILE_AN_ENGINE_STARTS, fresh.SET_UP)
    assert result.stdout.splitlines() == ["7", "[2.0, 2.0, 2.0]"], result.stderr
    assert "release" not in result.stderr


END = """
import d2lpar, torch
from vgpu.runtime import registry
from vgpu.runtime.scheduler import Op

(a,) = d2lpar.virtual_gpus(1)
for _ in range(30):
    torch.vgpu._sleep(0.1)
found = registry.find(a)
work = lambda op: print("it ran", flush=True)
found.default_stream.issue(Op("last", "kernel", found.compute, work))
print("end", flush=True)
raise SystemExit  # the whole of an end, modules and all
"""


@only_here
def test_a_process_does_not_wait_for_what_is_queued_when_it_ends():
    result = fresh.run(END, fresh.SET_UP)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


# -- recordings


@only_here
def test_a_recording_tells_what_ran_where_and_when(devices):
    x = torch.rand(10, 10, device=devices[1])
    side = torch.vgpu.Stream(devices[1])
    torch.vgpu.synchronize(devices[1])
    with recorded() as recording, Gate(devices[1]) as gate, gate.opened_later():
        x @ x
        side.wait_stream(torch.vgpu.current_stream(devices[1]))
        with torch.vgpu.stream(side):
            x.cpu()
    (kernel,) = named(recording, "aten.mm")
    (copy,) = named(recording, "copy")
    assert (kernel.kind, kernel.engine, kernel.device) == ("kernel", "compute", devices[1])
    assert (copy.kind, copy.engine, copy.device) == ("copy", "d2h", devices[1])
    assert (kernel.stream, copy.stream) == (0, side.stream_id)
    assert (copy.num_bytes, copy.source, copy.target) == (400, devices[1], torch.device("cpu"))
    for op in recording:
        assert op.issued <= op.start <= op.end
    hosts = [op for op in recording if (op.kind, op.engine) == ("wait", "host")]
    assert hosts and hosts[0].device == devices[1]
    ops = start_recording()
    stop_recording(ops)
    x @ x
    torch.vgpu.synchronize(devices[1])
    assert not ops
    with pytest.raises(ValueError, match="start_recording returned, not yet stopped"):
        stop_recording(ops)


def test_recordings_do_not_disturb_each_other(devices):
    x = torch.ones(3, device=devices[0])
    torch.vgpu.synchronize()
    first, second = start_recording(), start_recording()
    x.exp()
    torch.vgpu.synchronize()
    assert first == second and named(first, "aten.exp")
    stop_recording(first)
    x.sin()
    torch.vgpu.synchronize()
    stop_recording(second)
    assert named(second, "aten.sin") and not named(first, "aten.sin")


def test_a_stream_waits_once_and_not_longer_than_its_own_work_takes(devices):
    side, host = torch.vgpu.Stream(devices[0]), torch.ones(3).pin_memory()
    with recorded() as recording, Gate(devices[0], side):
        with Gate(devices[1]):
            side.wait_stream(torch.vgpu.current_stream(devices[1]))
            with torch.vgpu.stream(side):
                for _ in range(2):
                    host.to(devices[0], non_blocking=True)
                    side.wait_stream(side)
        torch.vgpu.synchronize(devices[1])
    [wait] = [op for op in recording if (op.kind, op.engine) == ("wait", "stream")]
    own, other = (next(op for op in named(recording, "gate") if op.device == d) for d in devices)
    assert other.end < own.end == wait.start == wait.end


def test_a_recording_keeps_all_that_a_stream_was_told_to_wait_for(devices):
    """A stream that is not recorded drops those that are over when it has been told 64 times."""
    side, host = torch.vgpu.Stream(devices[0]), torch.ones(3).pin_memory()
    with recorded() as recording:
        for _ in range(70):
            with Gate(devices[1]) as gate:
                side.wait_stream(torch.vgpu.current_stream(devices[1]))
                gate.let_go()
            torch.vgpu.synchronize(devices[1])
        with torch.vgpu.stream(side):
            host.to(devices[0], non_blocking=True)
    waits = [op for op in recording if (op.kind, op.engine) == ("wait", "stream")]
    assert len(waits) == 70


class Transparent(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_tensors_are_made_within_a_dispatch_mode():
    with Transparent():
        made = torch.tensor([1.0, 2.0], device="vgpu:1"), torch.ones(2, device="vgpu:1")
        total = made[0] + made[1]
    assert str(total.device) == "vgpu:1" and total.tolist() == [2, 3]


@pytest.mark.parametrize("where", ["cpu", "vgpu:0", "vgpu:1"])
def test_a_copy_of_a_wrong_shape_raises_at_the_call(devices, where):
    target = torch.ones(3, device=devices[0])
    with pytest.raises(RuntimeError, match="expand"):
        target.copy_(torch.ones(2, device=where))
    for device in devices:
        torch.vgpu.synchronize(device)


# -- dtypes


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "sizes"),
    [(torch.nn.LayerNorm, [8]), (torch.nn.GroupNorm, [2, 4]), (torch.nn.BatchNorm1d, [4])],
)
def test_norms_of_bfloat16(devices, norm, sizes, weights):
    results = []
    for device in ("cpu", devices[0]):
        net = norm(*sizes).to(device, weights)
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8).to(device, torch.bfloat16).requires_grad_()
        y = net(x)
        y.square().sum().backward()
        results.append([each.cpu() for each in (y, x.grad, net.weight.grad, net.bias.grad)])
    for found, expected in zip(*results[::-1], strict=True):
        # sixteen times the rounding of bfloat16
        torch.testing.assert_close(found, expected, rtol=0, atol=expected.abs().max().item() / 16)


def test_products_of_float16(devices):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 4, 40), torch.randn(8, 40), torch.randn(8)
    filters = torch.randn(8, 4, 3)

    def gradients(device):
        leaves = [each.to(device, torch.float16).requires_grad_() for each in (x, weight, filters)]
        y = torch.nn.functional.linear(leaves[0], leaves[1], bias.to(device, torch.float16))
        y = torch.cat([y, torch.conv1d(leaves[0], leaves[2])[:, :4, :8]])
        (y @ y.mT).sum().backward()
        return [each.cpu() for each in (y.detach(), *(leaf.grad for leaf in leaves))]

    for value, expected in zip(gradients(devices[0]), gradients("cpu"), strict=True):
        # the rounding of float16 for each of the 40 terms
        torch.testing.assert_close(value, expected, rtol=0, atol=0.02 * expected.abs().max().item())
    with pytest.raises(RuntimeError, match="dtype"):
        x[0].to(devices[0]).mm(weight.T.to(devices[0], torch.float16))


# -- beside other classes of tensors


class Wrapped(torch.Tensor):
    """A tensor that has another one, as AsyncCollectiveTensor has."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_a_tensor_of_another_class_is_asked_wherever_it_stands(devices):
    x = torch.ones(2, 2, device=devices[0])
    for result in (x + Wrapped(x), torch.addmm(x[0], Wrapped(x), x), torch.cat([x, Wrapped(x)])):
        assert type(result) is type(x)
    x.copy_(Wrapped(x))
    assert torch.cat([x, Wrapped(x)]).sum().item() == 8


INITIALIZED = """
import torch, d2lpar
a, b = d2lpar.virtual_gpus(2, model={model!r})
seen = [torch.vgpu.is_available(), torch.vgpu.device_count(), torch.vgpu.is_initialized()]
{use}
print(*seen, torch.vgpu.is_initialized())
"""


@pytest.mark.parametrize("model", [None, "v100"])
@pytest.mark.parametrize("use", ["torch.vgpu.set_device(1)", "torch.ones(1, device=a).cpu()"])
@only_here
def test_a_process_is_initialized_when_it_has_chosen_a_device_or_used_one(use, model):
    ran = fresh.run(INITIALIZED.format(use=use, model=model), fresh.SET_UP)
    assert ran.stdout.split() == ["True", "2", "False", "True"], ran.stderr
