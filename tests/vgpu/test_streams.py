"""Streams: order, waits, backward on the streams of forward, copies, and the host's lead."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from gates import (
    Gate,
    HeldLink,
    LateClock,
    frame_in,
    in_thread,
    in_threads,
    named,
    overlap,
    recorded,
    run_what_can,
)
from torch.utils.checkpoint import checkpoint
from waiting import wait_until

from vgpu import Link, virtual_gpus
from vgpu.devices.device import Device
from vgpu.operators import backward, comm
from vgpu.runtime import engines, registry, scheduler, threads
from vgpu.runtime.streams import StreamQueue

pytestmark = pytest.mark.usefixtures("devices")


def use(stream):
    return torch.vgpu.stream(stream)


# -- backward


def test_streams_and_events_of_torch_are_those_of_the_current_device(devices):
    x = torch.zeros(3, device=devices[1])
    with torch.vgpu.device(1):
        side, event = torch.Stream(), torch.Event()
    assert side.device == devices[1]
    with Gate(devices[1], side) as gate, torch.vgpu.device(1):
        with side:
            x += 1
            event.record()
        torch.vgpu.current_stream().wait_stream(side)
        torch.vgpu.Stream().wait_event(event)
        y = x + 1
        run_what_can()
        assert not event.query() and not torch.vgpu.current_stream().query()
        gate.let_go()
    assert y.tolist() == [2, 2, 2]


def test_backward_runs_each_operator_on_the_stream_of_its_forward(devices):
    first, second = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(first):
        y = x.exp()
    with use(second):
        z = x.sin()
    main = torch.vgpu.current_stream()
    main.wait_stream(first)
    main.wait_stream(second)
    loss = (y * z).sum()
    torch.vgpu.synchronize()
    with recorded() as spans:
        loss.backward()
    kernels = [op for op in spans if op.kind == "kernel"]
    assert {op.stream for op in named(kernels, "aten.cos")} == {second.stream_id}
    streams = {op.stream for op in named(kernels, "aten.mul")}
    assert streams == {0, first.stream_id, second.stream_id}
    torch.testing.assert_close(
        x.grad.cpu(), torch.ones(3).exp() * (torch.sin(torch.ones(3)) + torch.cos(torch.ones(3)))
    )


@pytest.mark.parametrize("held", [0, 1])
def test_backward_waits_for_what_other_streams_write(devices, held):
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(sides[0]):
        y = x * 2
    sides[1].wait_stream(sides[0])
    with use(sides[1]):
        loss = (y * 3).sum()
    torch.vgpu.synchronize()
    with Gate(devices[0], sides[held]):
        loss.backward()
        tenfold = x.grad * 10  # on the caller's stream, which waits for those of backward
        assert not torch.vgpu.current_stream().query()
    assert tenfold.tolist() == [60] * 3


class Through(torch.autograd.Function):
    """The identity, whose backward is a function of the gradient."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.function = backward
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.function(grad), None


def as_it_is(grad, *others):
    return grad


@pytest.mark.parametrize(
    ("write", "read", "expected"),
    [  # functions of the gradient, of a tensor that was there before, and of one of the other GPU
        (lambda grad, *_: grad.sort().values, as_it_is, [2, 2, 2]),
        (lambda g, *_: (g * 1).view(torch.int32).view(torch.float32), as_it_is, [2, 2, 2]),
        (lambda g, there, _: (there[1:].add_(g[1:]), there)[1], as_it_is, [0, 2, 2]),
        (lambda g, there, _: (there[1:].copy_(g[1:]), there)[1], as_it_is, [0, 2, 2]),
        (lambda g, there, _: (torch._foreach_add_([there], [g]), there)[1], as_it_is, [2, 2, 2]),
        (lambda grad, *_: comm.pack([grad]), as_it_is, [2, 2, 2]),
        (lambda _, there, other: (there[1:].copy_(other[1:]), there)[1], as_it_is, [0, 14, 14]),
        (lambda g, there, _: torch.neg(g, out=there), as_it_is, [-2, -2, -2]),
        (lambda g, *_: g.neg(), lambda g, *_: g.to("vgpu:1").to("vgpu:0"), [-2, -2, -2]),
        (lambda g, *_: g.neg(), lambda g, *_: torch.stack([g, g]).sum(0), [-4, -4, -4]),
    ],
    ids="sorted view_of_view into_view copy_into_view list one_vector from_other out through_other "
    "stack".split(),
)
def test_backward_waits_however_a_gradient_is_written_and_read(devices, write, read, expected):
    tensors = torch.zeros(3, device=devices[0]), torch.full((3,), 7.0, device=devices[1])
    reading, writing = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(reading):
        y = Through.apply(x * 2, lambda grad: read(grad, *tensors))
    writing.wait_stream(reading)
    with use(writing):
        loss = Through.apply(y, lambda grad: write(grad, *tensors)).sum()
    for device in devices:
        torch.vgpu.synchronize(device)
    with Gate(devices[0], writing):
        loss.backward()
    assert x.grad.tolist() == expected


def test_backward_waits_for_what_a_copy_from_the_cpu_writes(devices, monkeypatch):
    virtual_gpus(2, link=Link(1e9, 1e-3))
    host, target = torch.full((3,), 7.0).pin_memory(), torch.zeros(3, device=devices[0])
    reading, writing, last = (torch.vgpu.Stream(devices[0]) for _ in range(3))
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(reading):
        y = x * 2
    writing.wait_stream(reading)
    with use(writing):
        write = partial(target[1:].copy_, host[1:], non_blocking=True)
        loss = Through.apply(y, lambda grad: (write(), target)[1]).sum()
    torch.vgpu.synchronize()
    with HeldLink(monkeypatch) as link:
        loss.backward()
        assert link.reached.wait(30)
        with use(last):
            torch.ones(3, device=devices[0])
        last.synchronize()  # all kernels have run that do not wait for the copy
    assert x.grad.tolist() == [0, 14, 14]


def test_backward_waits_for_the_writers_of_what_an_operator_takes_by_name(devices):
    target, constant = torch.zeros(3, device=devices[0]), torch.ones(3, device=devices[0])

    def write(grad):
        target.copy_(grad)
        return constant

    def overwrite(grad):
        return torch.neg(grad, out=target)

    later, first = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(later):
        y = Through.apply(x, overwrite)
    first.wait_stream(later)
    with use(first):
        loss = Through.apply(y, write).sum()
    torch.vgpu.synchronize()
    with Gate(devices[0], first):
        loss.backward()
    torch.vgpu.synchronize()
    assert target.tolist() == [-1] * 3


def test_backward_within_a_backward_runs_on_streams(devices):
    side = torch.vgpu.Stream(devices[0])
    x = torch.ones(3, device=devices[0], requires_grad=True)
    side.wait_stream(torch.vgpu.current_stream())
    with use(side):
        y = checkpoint(lambda x: x.exp().sin(), x * 2, use_reentrant=True)
        y.sum().backward()
    torch.vgpu.synchronize()
    expected = torch.full((3,), 2.0).exp()
    torch.testing.assert_close(x.grad.cpu(), 2 * expected * expected.cos())


def test_the_streams_of_many_changes_are_known_as_far_back_as_is_kept(devices, monkeypatch):
    monkeypatch.setattr(threads.CurrentStreams, "MAX_CHANGES", 20)
    monkeypatch.setattr(threads.thread, "current", threads.CurrentStreams())
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    x = torch.ones(3, device=devices[0], requires_grad=True)
    total = x
    for i in range(100):
        sides[i % 2].wait_stream(sides[1 - i % 2])
        with use(sides[i % 2]):
            total = total * 1.0
    torch.vgpu.current_stream().wait_stream(sides[1])
    loss = total.sum() * 3
    torch.vgpu.synchronize()
    with recorded() as spans:
        loss.backward()
    assert x.grad.tolist() == [3] * 3
    last = [op.stream for op in named(spans, "aten.mul") if op.stream][:8]
    assert last == [sides[1 - i % 2].stream_id for i in range(8)]
    assert len(threads.thread.current._changes[0]) <= 21


def test_the_stream_that_calls_backward_waits_for_its_end(devices):
    forward, caller = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    x = torch.ones(3, device=devices[0], requires_grad=True)
    torch.vgpu.synchronize()
    with use(forward):
        loss = (x * 2).sum()
    torch.vgpu.synchronize()
    with Gate(devices[1]), use(caller), torch.vgpu.device(1):
        forward.wait_stream(torch.vgpu.current_stream(devices[1]))
        (grad,) = torch.autograd.grad(loss, x)
        tenfold = grad * 10
    torch.vgpu.synchronize()
    assert tenfold.tolist() == [20] * 3


def test_who_waits_for_the_caller_of_two_backwards_waits_for_both(devices):
    *sides, caller, later = [torch.vgpu.Stream(devices[0]) for _ in range(4)]
    given, products = torch.ones(3, device=devices[0]), []
    x = given.clone().requires_grad_()
    torch.vgpu.synchronize()
    for side in sides:
        with use(side):
            products.append(x * 2)
    torch.vgpu.synchronize()
    with Gate(devices[1]):
        sides[0].wait_stream(torch.vgpu.current_stream(devices[1]))
        with use(caller):
            grads = [torch.autograd.grad(y, x, given)[0] for y in products]
            later.wait_stream(caller)
        with use(later):
            tenfold = grads[0] * 10
    later.synchronize()
    assert tenfold.tolist() == [20] * 3


def test_a_stream_that_a_function_chooses_in_its_backward_is_waited_for(devices):
    chosen = torch.vgpu.Stream(devices[0])

    def backward(grad):
        chosen.wait_stream(torch.vgpu.current_stream())
        with use(chosen):
            constant.add_(1)
        return grad

    x = torch.ones(3, device=devices[0], requires_grad=True)
    constant = torch.ones(3, device=devices[0])
    with use(torch.vgpu.Stream(devices[0])):
        loss = Through.apply(x, backward).sum()
    torch.vgpu.synchronize()
    with Gate(devices[1]):
        chosen.wait_stream(torch.vgpu.current_stream(devices[1]))
        loss.backward()
        tenfold = constant * 10
    assert tenfold.tolist() == [20] * 3


def test_a_stream_chosen_in_a_backward_is_that_of_no_other_function(devices):
    first, second, chosen = (torch.vgpu.Stream(devices[0]) for _ in range(3))

    def backward(grad):
        with use(chosen):
            return grad.neg()

    x = torch.ones(3, device=devices[0], requires_grad=True)
    first.wait_stream(torch.vgpu.current_stream())
    with use(first):
        y = x.exp()
    second.wait_stream(first)
    with use(second):
        loss = Through.apply(y, backward).sum()
    torch.vgpu.synchronize()
    with recorded() as spans:
        loss.backward()
    assert [op.stream for op in named(spans, "aten.neg")] == [chosen.stream_id]
    assert [op.stream for op in named(spans, "aten.mul")] == [first.stream_id]


def test_a_function_that_chooses_a_stream_in_its_backward_waits_for_it_itself(devices):
    chosen = torch.vgpu.Stream(devices[0])

    def backward(grad):
        with use(chosen):
            there = grad.neg()
        return there * 2

    x = torch.ones(3, device=devices[0], requires_grad=True)
    with use(torch.vgpu.Stream(devices[0])):
        loss = Through.apply(x, backward).sum()
    torch.vgpu.synchronize()
    with Gate(devices[0], chosen):
        loss.backward()
    with pytest.raises(RuntimeError, match="read before the stream that computes it"):
        torch.vgpu.synchronize()


def test_backward_of_other_devices_keeps_its_threads(devices):
    seen = []
    for where, expected in (("meta", True), ("cpu", False)):
        x = torch.ones(3, device=where, requires_grad=True)
        x.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
        (x * 2).sum().backward()
        assert seen.pop() is expected
    x = torch.ones(3, device=devices[0], requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)
    for before in False, True:
        with torch.autograd.set_multithreading_enabled(before):
            with pytest.raises(ZeroDivisionError):
                (x * 2).sum().backward()
            assert torch._C._is_multithreading_enabled() is before


def test_two_threads_that_fail_in_backward_keep_their_own_errors(devices):
    barrier = threading.Barrier(2)
    seen = {}

    def fail(number):
        def hook(grad):
            barrier.wait(30)
            raise ValueError(f"of {number}")

        x = torch.ones(3, device=devices[number], requires_grad=True)
        x.register_hook(hook)
        with pytest.raises(ValueError, match="of") as caught:
            (x * 2).sum().backward()
        seen[number] = str(caught.value)

    with in_thread(lambda: fail(0)):
        fail(1)
    assert seen == {0: "of 0", 1: "of 1"}


# -- copies that are under way


@pytest.mark.parametrize("way", ["h2d", "p2p"])
def test_a_kernel_that_does_not_wait_for_a_copy_sees_the_old_bytes(devices, way, monkeypatch):
    virtual_gpus(2, link=Link(1e9, 1.0))
    a, b = devices
    host = torch.ones(4).pin_memory()
    source = host if way == "h2d" else torch.ones(4, device=b)
    target = torch.zeros(4, device=a)
    side = torch.vgpu.Stream(a)
    torch.vgpu.synchronize(b)
    torch.vgpu.synchronize(a)
    with HeldLink(monkeypatch) as link:
        with use(side):
            target.copy_(source, non_blocking=True)
        assert link.reached.wait(30)
        early = target + 0
        torch.vgpu.default_stream(a).synchronize()
        assert not side.query()
    side.synchronize()
    late = target + 0
    assert early.tolist() == [0] * 4
    assert late.tolist() == [1] * 4


@pytest.mark.parametrize("number", [1, 20])
def test_copies_in_one_direction_follow_each_other_and_no_delays_add_up(
    devices, number, monkeypatch
):
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(number)]
    virtual_gpus(2, link=Link(1e9, 0.005))
    x, host = torch.zeros(10, device=devices[0]), torch.zeros(10).pin_memory()
    torch.vgpu.synchronize()
    LateClock(monkeypatch)
    with recorded() as spans:
        with Gate(devices[0]):
            for i in range(20):
                sides[i % number].wait_stream(torch.vgpu.current_stream())
                with use(sides[i % number]):
                    x.copy_(host, non_blocking=True)
    copies = named(spans, "copy")
    seconds = copies[-1].end - copies[0].start
    assert len(copies) == 20
    assert 20 * 0.005 <= seconds < 20 * 0.005 + 5 * 2e-4
    assert all(a.end <= b.start for a, b in zip(copies, copies[1:], strict=False))


def test_a_copy_takes_as_long_when_another_has_just_ended(devices, monkeypatch):
    virtual_gpus(2, link=Link(1e9, 0.005))
    x, host = torch.zeros(10, device=devices[0]), torch.zeros(10).pin_memory()
    torch.vgpu.synchronize()
    clock = LateClock(monkeypatch)
    with recorded() as spans:
        for _ in range(3):
            x.copy_(host)
            clock.now += 2e-4
    copies = named(spans, "copy")
    assert len(copies) == 3
    assert all(copy.end - copy.start >= 0.005 for copy in copies)


def test_a_copy_is_written_no_earlier_than_writing_takes(devices, monkeypatch):
    virtual_gpus(2, link=Link(1e9, 1.0))
    x, host, moments = torch.zeros(10, device=devices[0]), torch.zeros(10), []
    torch.vgpu.synchronize()

    class Steps(LateClock):
        def read(self):
            self.now += 1e-3
            return self.now

        def sleep_until(self, moment):
            moments.append(moment)
            super().sleep_until(moment)

    engine = registry.find(devices[0]).h2d  # it is as before after the test
    monkeypatch.setattr(engine, "_seconds_per_byte", 1.0)  # measured while the process stood still
    Steps(monkeypatch)
    for _ in range(50):
        x.copy_(host)
    for i, most in (0, 0.6), (-2, 20e-3):  # of the first copy half its second, then what it takes
        assert 0 < moments[i + 1] - moments[i] < most


# -- streams and events


def test_an_event_that_is_recorded_again_stands_for_the_new_place(devices):
    event = torch.vgpu.Event()
    event.record()
    event.synchronize()
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    with Gate(devices[0]):
        x = torch.ones(3, device=devices[0]) * 2
        assert torch.vgpu.current_stream().record_event(event) is event
        assert not event.query()
        sides[0].wait_event(event)
        with use(sides[1]):
            event.wait()
        assert not sides[0].query() and not sides[1].query()
    for side in sides:
        with use(side):
            assert (x + 1).tolist() == [3] * 3


def test_the_time_of_an_event_on_an_idle_stream_is_when_it_was_recorded(devices):
    first, second = (torch.vgpu.Event(enable_timing=True) for _ in range(2))
    torch.ones(3, device=devices[0])
    torch.vgpu.synchronize()
    before = time.perf_counter()
    first.record()
    between = time.perf_counter()
    while time.perf_counter() < between + 1e-3:
        pass
    second.record()
    after = time.perf_counter()
    assert 1 <= first.elapsed_time(second) <= (after - before) * 1e3


def test_set_stream_makes_its_device_the_current_one(devices):
    side, accelerator = torch.vgpu.Stream(devices[1]), torch.accelerator
    accelerator.set_stream(side)
    try:
        assert torch.vgpu.current_device() == accelerator.current_device_index() == 1
        assert torch.vgpu.current_stream() == accelerator.current_stream() == side
        with accelerator.device_index(0):
            assert torch.vgpu.current_device() == 0
    finally:
        torch.vgpu.set_stream(torch.vgpu.default_stream(1))
        torch.vgpu.set_stream(torch.vgpu.default_stream(0))


def test_streams_in_use_have_numbers_of_their_own(devices):
    first, second = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    del first
    streams = [second, *(torch.vgpu.Stream(devices[0]) for _ in range(2))]
    assert len({stream.stream_id for stream in streams}) == 3


def test_a_negative_device_is_refused_but_where_torch_ignores_it(devices):
    for function in (torch.vgpu.synchronize, torch.vgpu.Stream):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            function(-1)
    assert torch.vgpu.set_device(-1) is None and torch.vgpu.current_device() == 0


def test_a_stream_entered_by_two_threads_leaves_each_where_it_was(devices):
    side = torch.vgpu.Stream(devices[1])
    own = torch.vgpu.Stream(devices[1])
    barrier = threading.Barrier(2)
    left = []

    def other():
        torch.vgpu.set_stream(own)
        barrier.wait(30)  # both are about to enter
        with side:
            barrier.wait(30)  # both have entered
        left.append((torch.vgpu.current_device(), torch.vgpu.current_stream()))

    with in_thread(other):
        barrier.wait(30)
        with side:
            barrier.wait(30)
        assert torch.vgpu.current_device() == 0
        assert torch.vgpu.current_stream(1) == torch.vgpu.default_stream(1)
    assert left == [(1, own)]


def test_a_stream_that_was_left_is_not_left_again(devices):
    entered, chosen = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    with use(entered):
        pass
    torch.vgpu.set_stream(chosen)
    try:
        assert not threads.thread.entered
        threads.leave_all()  # as a notebook does before each cell
        assert torch.vgpu.current_stream() == chosen
    finally:
        torch.vgpu.set_stream(torch.vgpu.default_stream(0))


def test_blocks_that_an_interrupt_left_entered_are_left_from_the_innermost(devices):
    current = torch.vgpu.current_device, *(partial(torch.vgpu.current_stream, d) for d in devices)
    before = [now() for now in current]
    for block in (
        torch.vgpu.Stream(devices[1]),
        torch.vgpu.device(1),
        torch.vgpu.stream(torch.vgpu.Stream(devices[1])),
        torch.vgpu.Stream(devices[0]),
        torch.vgpu.device(1),
    ):
        block.__enter__()
    threads.leave_all()
    assert [now() for now in current] == before
    block.__exit__(None, None, None)  # of a generator, say, that goes on later
    assert [now() for now in current] == before


def test_streams_and_events_of_torch_itself(devices):
    for where in (devices[1], "vgpu:1"):
        stream = torch.Stream(device=where, priority=-1)
        assert isinstance(stream, torch.vgpu.Stream) and isinstance(stream, torch.Stream)
        assert (stream.device, stream.priority) == (devices[1], -1)
        assert stream != torch.vgpu.default_stream(1)
    event = torch.Event(device=devices[1], enable_timing=True)
    assert isinstance(event, torch.vgpu.Event) and isinstance(event, torch.Event)
    event.record(stream)
    assert event.elapsed_time(event) == 0
    assert torch.Stream(stream_id=3, device_index=1, device_type=20).stream_id == 3


def test_streams_that_nobody_holds_are_forgotten(devices, no_garbage):
    found = registry.find(devices[0])
    for _ in range(50):
        stream = torch.vgpu.Stream(devices[0])
    assert stream._stream in found.streams
    assert len(found._streams) <= len(found.streams) + 1


def test_a_stream_keeps_no_waits_that_are_over(devices):
    side = torch.vgpu.Stream(devices[0])
    x = torch.ones(3, device=devices[1])
    for _ in range(100):
        x + 1
        with Gate(devices[1]):
            side.wait_stream(torch.vgpu.current_stream(1))
            x.to(devices[0])
        torch.vgpu.synchronize(1)
    assert len(side._stream.waits) <= 64
    assert len(registry.find(devices[0]).default_stream.waits or ()) <= 64


def test_devices_reach_one_another(devices):
    assert torch.vgpu.can_device_access_peer(0, 1)
    assert not torch.vgpu.can_device_access_peer(0, devices[0])
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.vgpu.can_device_access_peer(0, 2)


def test_a_stream_waits_for_all_that_it_was_told_to(devices):
    streams = [torch.vgpu.current_stream(device) for device in devices]
    host = torch.ones(3).pin_memory()

    class Dependents(list):
        def append(self, op):
            super().append(op)
            other.let_go()  # it ends while what the stream waits for is counted
            time.sleep(0.1)  # long enough for what does not wait

    for last in (0, 1):
        side = torch.vgpu.Stream(devices[0])
        with Gate(devices[last]) as gate:
            gate.op.dependents = Dependents()
            with Gate(devices[1 - last]) as other:
                for stream in streams:
                    side.wait_stream(stream)
                with use(side):
                    host.to(devices[0], non_blocking=True)
            run_what_can()
            assert not side.query()


def test_a_stream_that_is_told_to_wait_many_times_waits_for_the_first_too(devices):
    side, host = torch.vgpu.Stream(devices[0]), torch.ones(3).pin_memory()
    with Gate(devices[0]):
        side.wait_stream(torch.vgpu.current_stream(devices[0]))
        for _ in range(100):
            with Gate(devices[1]):
                side.wait_stream(torch.vgpu.current_stream(devices[1]))
        with use(side):
            host.to(devices[0], non_blocking=True)
        run_what_can()
        assert not side.query()


# -- which of the ops that are ready an engine takes


def kernels(spans):
    return [op.name for op in spans if op.kind == "kernel" and op.name != "gate"]


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_kernel_is_ready_when_the_copy_before_it_has_ended(devices, busy, told, monkeypatch):
    """It is issued first, while its engine is `busy` or not, and ready last. The copy is before
    it in its stream, or its stream is `told` to wait for that of the copy."""
    virtual_gpus(2, link=Link(1e9, 1.0))
    first, second, third = (torch.vgpu.Stream(devices[0]) for _ in range(3))
    x, y = torch.ones(2, 3, device=devices[0])
    host = torch.ones(3).pin_memory()
    torch.vgpu.synchronize()
    with recorded() as spans, HeldLink(monkeypatch) as link:
        gate = Gate(devices[0]) if busy else None
        with use(third if told else first):
            x.copy_(host, non_blocking=True)
        if told:
            first.wait_stream(third)
        with use(first):
            x.exp()
        with gate or Gate(devices[0]):
            with use(second):
                y.sin()
            link.open.set()
    assert kernels(spans) == ["aten.sin", "aten.exp"]


def test_a_kernel_that_waits_for_nothing_is_ready_when_it_is_issued(devices):
    first, second = (torch.vgpu.Stream(devices[0]) for _ in range(2))
    x, y = torch.ones(2, 3, device=devices[0])
    host = torch.ones(3).pin_memory()
    torch.vgpu.synchronize()
    with recorded() as spans, Gate(devices[0]):
        with use(first):
            x.copy_(host, non_blocking=True)
            x.exp()
        run_what_can()
        with use(second):
            y.sin()
    assert kernels(spans) == ["aten.exp", "aten.sin"]


def test_kernels_that_are_ready_at_once_run_in_the_order_of_their_issue(devices):
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(3)]
    x = torch.ones(3, device=devices[0])
    torch.vgpu.synchronize()
    with recorded() as spans, Gate(devices[0]):
        with Gate(devices[1]):
            for side, function in zip(sides, (torch.exp, torch.sin, torch.cos), strict=True):
                side.wait_stream(torch.vgpu.current_stream(devices[1]))
                with use(side):
                    function(x)
    assert kernels(spans) == ["aten.exp", "aten.sin", "aten.cos"]


# -- hosts that wait, and what is left of an op that has run


def test_all_hosts_that_wait_for_an_op_go_on(devices):
    gate = Gate(devices[0])

    class Waiters(list):
        def append(self, wake):
            if len(self) == 2:  # the op ends as the third is noted
                gate.let_go()
                time.sleep(0.1)  # long enough for what does not wait
            super().append(wake)

    gate.op.waiters = Waiters()
    in_threads([partial(scheduler.wait, gate.op, devices[0])] * 3)


def test_an_op_that_ends_just_before_a_host_is_noted_as_waiting(devices, monkeypatch):
    """The clock is read between the host's first look at the op and the note."""
    gate, clock = Gate(devices[0]), scheduler.perf_counter

    def clock_at_which_the_op_ends():
        gate.let_go()
        wait_until(lambda: gate.op.done)
        return clock()

    monkeypatch.setattr(scheduler, "perf_counter", clock_at_which_the_op_ends)
    in_threads([partial(scheduler.wait, gate.op, devices[0])])
    assert gate.op.done


def test_an_op_that_has_run_keeps_none_of_those_before_it(devices):
    side, x = torch.vgpu.Stream(devices[0]), torch.ones(3, device=devices[1])
    gates = [Gate(devices[0]), Gate(devices[0], side)]
    torch.vgpu.current_stream().wait_stream(side)
    x.to(devices[0])  # waits for both
    before = [weakref.ref(gate.op) for gate in gates]
    while gates:
        gates.pop(0).let_go()
    del side
    torch.ones(3, device=devices[0])
    run_what_can()  # the engines are done with them, too
    gc.collect()
    assert [op() for op in before] == [None, None]


# -- how far the host runs ahead


def test_ten_thousand_waits_in_a_row(devices, monkeypatch):
    monkeypatch.setattr(scheduler, "QUEUE_LIMIT", 10**6)
    sides = [torch.vgpu.Stream(devices[0]) for _ in range(2)]
    x = torch.zeros((), device=devices[0])
    with Gate(devices[0], sides[0]):
        for i in range(10_000):
            sides[i % 2].wait_stream(sides[1 - i % 2])
            with use(sides[i % 2]):
                x += 1
    sides[1].synchronize()
    assert x.item() == 10_000


def wait_until_held_back(host):
    wait_until(lambda: frame_in(host, scheduler.ReadyQueue.wait_for_room), seconds=30)


def test_the_host_waits_when_it_is_too_far_ahead(devices):
    x = torch.zeros((), device=devices[0])
    torch.vgpu.synchronize()
    host = threading.get_ident()
    with Gate(devices[0]) as gate:
        for _ in range(scheduler.QUEUE_LIMIT - 1):
            x += 1

        def open_then():
            wait_until_held_back(host)
            gate.let_go()

        with in_thread(open_then):
            x += 1
            assert gate.open.is_set(), "the host did not wait"
    assert x.item() == scheduler.QUEUE_LIMIT


def test_an_op_has_been_counted_when_its_host_goes_on(devices, monkeypatch):
    engine, complete = registry.find(devices[0]).compute, scheduler.complete
    monkeypatch.setattr(scheduler, "complete", lambda op: (complete(op), time.sleep(0.3))[0])
    torch.ones(3, device=devices[0])
    wait_until(torch.vgpu.current_stream().query)
    assert engine.finished == engine.issued


def test_room_that_comes_just_before_a_host_is_noted_as_waiting_is_seen(devices, monkeypatch):
    engine, closed_gate = registry.find(devices[0]).compute, scheduler.closed_gate
    x = torch.zeros((), device=devices[0])
    torch.vgpu.synchronize()
    gate = Gate(devices[0])

    def closed_gate_when_there_is_room():
        gate.let_go()
        wait_until(lambda: engine.finished == engine.issued)
        return closed_gate()

    monkeypatch.setattr(scheduler, "QUEUE_LIMIT", 2)
    monkeypatch.setattr(scheduler, "closed_gate", closed_gate_when_there_is_room)
    in_threads([lambda: x.add_(1).add_(1)])
    monkeypatch.undo()
    assert x.item() == 2


def test_an_interrupt_ends_the_wait_of_a_host_that_is_too_far_ahead(devices):
    came = []

    def once(*_):
        if not came:
            came.append(True)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, once)
    x = torch.zeros((), device=devices[0])
    torch.vgpu.synchronize()
    host = threading.get_ident()
    try:
        with Gate(devices[0]):
            for _ in range(scheduler.QUEUE_LIMIT - 1):
                x += 1

            def interrupt():
                wait_until_held_back(host)
                while not came:  # the first may come a moment before the host sleeps
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(1e-2)

            with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
                x += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert x.item() == scheduler.QUEUE_LIMIT - 1
    assert (x + 1).item() == scheduler.QUEUE_LIMIT


def test_copies_of_two_devices_to_each_other_overlap(devices, monkeypatch):
    virtual_gpus(2, peer_link=Link(1e9, 1.0))
    tensors = [torch.ones(10, device=device) for device in devices]
    sides = [torch.vgpu.Stream(device) for device in devices]
    torch.vgpu.synchronize(0)
    torch.vgpu.synchronize(1)
    barrier = threading.Barrier(2)  # both copies are on their links at once, or this breaks
    calls = []

    def meet(moment):
        calls.append(moment)
        if len(calls) <= 2:
            barrier.wait(30)

    monkeypatch.setattr(engines, "sleep_until", meet)
    with recorded() as spans:
        for side, tensor, other in zip(sides, tensors, devices[::-1], strict=True):
            with use(side):
                tensor.to(other)
    copies = named(spans, "copy")
    assert {op.device for op in copies} == set(devices)
    assert overlap(*copies)


def test_streams_made_by_several_threads_are_all_waited_for(devices):
    found, start, made = registry.find(devices[0]), threading.Barrier(4), []

    def make():
        start.wait(30)
        made.extend([torch.vgpu.Stream(devices[0]) for _ in range(200)])

    in_threads([make] * 4)
    streams = {stream._stream for stream in made}
    assert streams <= set(found.streams)
    assert len({stream.index for stream in streams}) == 800


def test_a_stream_that_takes_its_waits_while_it_is_given_one(devices, monkeypatch):
    """The clock is read between the look at the target's waits and the step that adds to them."""
    x, target = torch.ones(3, device=devices[0]), registry.find(devices[1]).default_stream
    clock = scheduler.perf_counter

    def clock_at_which_another_thread_issues():
        if target.waits == {}:
            target.waits = None
        return clock()

    monkeypatch.setattr(scheduler, "perf_counter", clock_at_which_another_thread_issues)
    assert x.to(devices[1]).tolist() == [1, 1, 1]


def test_a_stream_told_to_wait_as_it_is_given_a_copy_waits_for_both(devices, monkeypatch):
    """It is told so between the look at its ops under way and the issue of the copy."""
    x, host = torch.ones(3, device=devices[0]), torch.ones(3).pin_memory()
    target, tail = registry.find(devices[1]).default_stream, StreamQueue.tail
    torch.vgpu.synchronize()
    with Gate(devices[0]) as gate:

        def tail_before_it_is_told(stream):
            ops = tail(stream)
            if stream is target:
                stream.wait_for([gate.op])
            return ops

        with use(torch.vgpu.Stream(devices[0])), monkeypatch.context() as patched:
            patched.setattr(StreamQueue, "tail", tail_before_it_is_told)
            x.to(devices[1])
        host.to(devices[1], non_blocking=True)
        run_what_can()
        assert not torch.vgpu.current_stream(devices[1]).query()


def test_an_engine_whose_thread_cannot_start_or_is_told_to_end_goes_on(devices, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    device, ran = Device(torch.device("vgpu", 7), 1, 1000, None, None), threading.Event()
    stops = scheduler.Op("stops", "kernel", device.compute, lambda op: sys.exit("no"))
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(engines._thread, "start_new_thread", refuse)
        device.default_stream.issue(stops)
    for op in (stops, scheduler.Op("next", "kernel", device.compute, lambda op: ran.set())):
        device.default_stream.issue(op)
    assert ran.wait(30)
    with pytest.raises(torch.AcceleratorError, match="stops on vgpu:7 failed.*SystemExit: no"):
        device.synchronize()
    device.compute.end()
    device.compute.join()


def test_an_interrupted_backward_ends_when_a_stream_is_used(devices, monkeypatch):
    x = torch.ones(3, device=devices[0], requires_grad=True)
    side = torch.vgpu.Stream(devices[0])
    with use(side):
        loss = (x * 2).sum()
    torch.vgpu.synchronize()
    with monkeypatch.context() as patched:
        patched.setattr(backward.StreamsOfForward, "__exit__", lambda self, *exception: None)
        with Gate(devices[0], side):
            loss.backward()
            assert not torch.vgpu.current_stream().query()
    assert type(threads.thread.current) is threads.CurrentStreams
    assert x.grad.tolist() == [2] * 3


def test_copies_of_a_list_block_only_where_they_must(devices, monkeypatch):
    virtual_gpus(2, link=Link(1e9, 1e-3))
    x, host = torch.zeros(3, device=devices[0]), torch.full((3,), 7.0).pin_memory()
    with HeldLink(monkeypatch) as link:
        torch._foreach_copy_([x], [host], non_blocking=True)
        assert link.reached.wait(30)
    assert x.tolist() == [7] * 3
    torch._foreach_copy_([x], [torch.ones(3)])
    assert torch.ones(0).to(devices[0]).tolist() == [] and x.tolist() == [1] * 3


def test_a_hook_that_sends_gradients_on_a_side_stream_overlaps_backward(devices):
    side = torch.vgpu.Stream(devices[0])
    x = torch.ones(3, device=devices[0], requires_grad=True)
    sent = torch.zeros(3).pin_memory()

    def send(param):
        side.wait_stream(torch.vgpu.current_stream())
        with torch.vgpu.stream(side):
            sent.copy_(param.grad, non_blocking=True)

    x.register_post_accumulate_grad_hook(send)
    with recorded() as spans:
        (x * 2).sum().backward()
    (copy,) = named(spans, "copy")
    assert copy.stream == side.stream_id
    assert sent.tolist() == [2] * 3


def test_streams_that_a_forward_has_used_are_given_up(devices):
    gc.collect()
    before = len(registry.find(devices[0]).streams)
    x = torch.ones(3, device=devices[0], requires_grad=True)
    for _ in range(20):
        with use(torch.vgpu.Stream(devices[0])):
            y = x * 2
    torch.vgpu.synchronize()
    gc.collect()  # a stream and its last op refer to each other
    assert len(registry.find(devices[0]).streams) <= before + 2  # the last one's `y` is still there
    y.sum().backward()
    assert x.grad.tolist() == [2] * 3


def test_an_op_counts_as_done_once_it_is_recorded(device):
    """A program that asks whether a stream is idle, and stops its timeline then, has all of it."""
    reached, may_go_on = threading.Event(), threading.Event()

    class Recording(list):
        def extend(self, spans):
            reached.set()
            assert may_go_on.wait(30), "nobody lets the engine go on"
            super().extend(spans)

    recording = scheduler.start_recording(Recording())
    try:
        x = torch.ones(3, device=device)
        assert reached.wait(30)
        assert not torch.vgpu.current_stream(device).query()
        may_go_on.set()
        assert x.sum().item() == 3
    finally:
        may_go_on.set()
        scheduler.stop_recording(recording)
    assert "aten.sum" in {span.name for span in recording}


@pytest.mark.parametrize("model", [None, "v100"])
def test_an_error_of_a_recording_shows_at_synchronize_and_ends_no_engine(model):
    class Recording:
        def extend(self, spans):
            if spans[0].kind == "kernel":
                raise KeyError("a span of no use")

    (device,) = virtual_gpus(1, model=model)
    recording = scheduler.start_recording(Recording())
    try:
        x = torch.ones(3, device=device)
        with pytest.raises(torch.AcceleratorError, match="KeyError: 'a span of no use'"):
            torch.vgpu.synchronize()
    finally:
        scheduler.stop_recording(recording)
    assert (x + 1).sum().item() == 6
