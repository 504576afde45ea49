"""Programs on modelled GPUs: closed forms, the same bytes and values as by the wall clock."""

import random
import sys
import threading
from collections import Counter
from functools import partial, reduce

import fresh
import pytest
import torch
from gates import in_thread, in_threads, recorded
from modelling import Fixed, fixed_gpus, room, sleep
from torch import nn
from torch.nn import functional as F
from waiting import wait_until

import d2lpar
from d2lpar.chapters.pipeline_parallelism import (
    gpipe,
    one_forward_one_backward,
    pipeline_step,
    predict_schedule,
    split_into_stages,
)
from d2lpar.chapters.scaling import allreduce_seconds
from d2lpar.chapters.tensor_parallelism import copied, summed
from d2lpar.collectives import allgather, allreduce
from vgpu import Link, clock, hardware_name, host_takes, virtual_gpus
from vgpu.modelled import host, simulation
from vgpu.modelled.hardware import Machine
from vgpu.modelled.host import Host
from vgpu.runtime import registry, scheduler
from vgpu.runtime.scheduler import Op

# -- closed forms


@pytest.mark.parametrize(
    ("algorithm", "over"),
    [("star", "peer_link"), ("tree", "peer_link"), ("ring", "peer_link"), ("ring", "link")],
)
@pytest.mark.parametrize("k", [2, 3, 4, 5, 8])
def test_allreduce_takes_what_its_formula_says(algorithm, over, k):
    """In a ring each link, and be it PCIe's, carries one message in each direction at a time."""
    link = Link(1e9, 1e-3)
    devices = fixed_gpus(k, **{over: link})
    data = [torch.full((840,), float(i + 1), device=device) for i, device in enumerate(devices)]
    allreduce(data, algorithm)
    d2lpar.synchronize()
    expected = allreduce_seconds(algorithm, k, 840 * 4, link)
    assert clock() == pytest.approx(expected, rel=1e-12)
    assert all(each.tolist() == [k * (k + 1) / 2] * 840 for each in data)


class Sleep(torch.autograd.Function):
    """The identity, whose forward and backward take so many seconds."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.seconds = backward
        sleep(x.device, forward, torch.vgpu.current_stream(x.device))
        return x + weight

    @staticmethod
    def backward(ctx, grad):
        sleep(grad.device, ctx.seconds, torch.vgpu.current_stream(grad.device))
        return grad, grad.sum(), None, None


class Stage(nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seconds = forward, backward

    def forward(self, x):
        return Sleep.apply(x, self.weight, *self.seconds)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
def test_a_pipeline_of_unequal_stages_runs_as_predicted(schedule):
    forward, backward = [2.0, 1.0, 4.0], [3.0, 5.0, 6.0]
    devices = fixed_gpus(3)
    seconds = zip(forward, backward, devices, strict=True)
    stages = [Stage(f, b).to(device) for f, b, device in seconds]
    X = torch.ones(6, 3, device=devices[0])
    tasks = schedule(3, 6)
    with recorded() as spans:
        pipeline_step(stages, X, X.to(devices[-1]), F.mse_loss, tasks)
    for device, marks in zip(devices, predict_schedule(tasks, forward, backward), strict=True):
        found = [(op.start, op.end) for op in spans if (op.name, op.device) == ("sleep", device)]
        assert found == [(mark.start, mark.end) for mark in marks]


# -- backward, and its clock for each device


def test_a_backward_pass_issues_to_devices_at_the_same_time():
    """As autograd's threads do: each takes 1 s for an op that it issues, behind its inputs."""
    devices = fixed_gpus(2, launch=1.0)
    xs = [torch.ones(3, device=device, requires_grad=True) for device in devices]
    grads = [torch.ones(3, device=device) for device in devices]
    for _ in range(2):
        ys = [x.exp().exp().exp() for x in xs]
        d2lpar.synchronize()
        started = clock()
        with recorded() as spans:
            torch.autograd.backward(ys, grads)
        ends = [max(op.end for op in spans if op.device == device) for device in devices]
        counts = Counter(op.device for op in spans if op.kind == "kernel")
        assert counts[devices[0]] == counts[devices[1]] >= 3
        assert ends == [started + counts[devices[0]]] * 2
        assert clock() == started + counts[devices[0]]
    with recorded() as spans:
        xs[1].exp().to(devices[0]).exp().exp().exp().sum().backward()
    issued = [op.issued for op in spans if op.name == "aten.mul"]
    assert issued == sorted(issued) and len(issued) == 4


@pytest.mark.parametrize(
    "waits", [torch.Tensor.item, lambda grad: [sleep(grad.device, 100) for _ in range(6)]]
)
def test_a_wait_in_the_backward_of_a_gpu_holds_no_other_one_up(waits, monkeypatch):
    for module in (scheduler, simulation):
        monkeypatch.setattr(module, "QUEUE_LIMIT", 4)
    devices = fixed_gpus(2, launch=1.0)
    x, y = (torch.ones((), device=device, requires_grad=True) for device in devices)
    double, triple = y * 2, x * 3
    triple.register_hook(lambda grad: (sleep(devices[0], 100), waits(grad), grad * 2)[-1])
    with recorded() as spans:
        torch.autograd.backward([triple, double])
    last = {op.device: op.issued for op in spans if op.name == "aten.mul"}
    assert last[devices[0]] > 100 > last[devices[1]]


def test_a_hook_that_waits_for_what_has_long_ended_sets_no_clock_back():
    (device,) = fixed_gpus(1, launch=1.0)
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    early, grad = torch.vgpu.current_stream().record_event(), torch.ones(3, device=device)
    y.register_hook(lambda grad: early.synchronize())
    host_takes(100)
    with recorded() as spans:
        y.backward(grad)
    assert [span.issued for span in spans if span.name == "aten.mul"] == [3 + 100 + 1]
    assert all(span.start <= span.end for span in spans)


def test_a_backward_pass_begins_when_the_one_before_it_has_been_issued():
    devices = fixed_gpus(2, launch=1.0)
    x, y = (torch.ones(3, device=device, requires_grad=True) for device in devices)
    long, short = x.exp().exp().exp(), y.exp()
    again = y.exp()
    first, second = (torch.ones(3, device=device) for device in devices)
    d2lpar.synchronize()
    started = clock()

    def two_passes():  # in a thread that has used no stream, for which the end of a pass would wait
        torch.autograd.backward([long, short], [first, second])
        torch.autograd.backward([again], [second])

    with recorded() as spans, in_thread(two_passes):
        pass
    kernels = [op for op in spans if op.kind == "kernel" and op.device == devices[1]]
    assert kernels[-1].issued - started >= 3 + 1


# -- the same in every run


def data_parallel_step(n, batch=16):
    devices = virtual_gpus(n, model=Machine("v100", gpus=8, gpus_per_switch=2))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(devices[0])
    parallel = nn.DataParallel(net, device_ids=devices)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    X, y = torch.rand(batch, 4), torch.arange(batch) % 2
    seconds = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(X), y.to(devices[0]))
        loss.backward()
        optimizer.step()
        seconds.append(clock())
        loss.item()
        seconds.append(clock())
    torch.vgpu.synchronize()
    return (*seconds, clock())


def threads_on_devices_of_their_own():
    devices = virtual_gpus(4, model="t4")
    seconds = {}

    def work(index):
        x = torch.ones(64, 64, device=devices[index])
        for _ in range(5 + index):
            x = x @ x
        x.sum().item()
        seconds[index] = clock()
        x.exp()

    host_takes(1e-3)
    in_threads([partial(work, index) for index in range(4)])
    last = clock()
    d2lpar.synchronize()
    return tuple(seconds[index] for index in range(4)) + (last, clock())


class Watched(nn.Module):
    """A network of three leaves and two operators that notes how long its forward takes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Identity(), nn.ReLU()))
        self.seconds = []

    def forward(self, x):
        begun = clock()
        x = self.body(x)
        self.seconds.append(clock() - begun)
        return x


@pytest.mark.parametrize("k", [1, 2, 4])
def test_replicas_share_pythons_lock_in_their_forward(k):
    """Each takes k times as long to issue as one alone would, and afterwards one is alone again."""
    devices = fixed_gpus(k, launch=Host(1.0, 0.25, 0.5))
    net = Watched().to(devices[0])
    parallel = nn.DataParallel(net, device_ids=devices)
    for _ in range(2):
        net.seconds.clear()
        parallel(torch.ones(8, 2, device=devices[0]))
        assert net.seconds == [k * (2 * 1.0 + 3 * 0.25)] * k
    net.seconds.clear()
    net(torch.ones(8, 2, device=devices[0]))
    assert net.seconds == [2 * 1.0 + 3 * 0.25]


def test_replicas_that_fail_leave_the_lock_to_one():
    devices = fixed_gpus(2, launch=1.0)

    def fails(x):
        raise KeyError("in forward")

    net = nn.ReLU()
    net.forward = fails
    with pytest.raises(KeyError):
        nn.DataParallel(net, device_ids=devices)(torch.ones(8, 2, device=devices[0]))
    begun = clock()
    torch.ones(3, device=devices[0])
    assert clock() - begun == 1.0


@pytest.mark.parametrize("k", [2, 4])
def test_copying_the_modules_of_replicas_takes_as_long_as_calling_them(k):
    """Six modules, of which three are leaves, on each of k GPUs; operators take no time here."""
    devices = fixed_gpus(k, launch=Host(0.0, 1.0, 0.0))
    parallel = nn.DataParallel(Watched().to(devices[0]), device_ids=devices)
    x = torch.ones(8, 2, device=devices[0])
    begun = clock()
    parallel(x)
    assert clock() - begun == k * 6 + k * 3
    virtual_gpus(2)
    assert parallel.module(torch.ones(8, 2)).shape == (8, 2)


@pytest.mark.parametrize("interval", [1e-6, 5e-3])
@pytest.mark.parametrize(
    "program",
    [lambda: data_parallel_step(2), lambda: data_parallel_step(8), threads_on_devices_of_their_own],
    ids=["2 devices", "8 devices", "threads"],
)
def test_the_clock_tells_the_same_to_the_last_digit_in_every_run(program, interval):
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        (seconds,) = {program() for _ in range(5)}
    finally:
        sys.setswitchinterval(before)
    assert all(each > 0 for each in seconds)


def test_a_thread_begins_at_the_clock_of_its_starter_and_hands_its_own_back():
    (device,) = fixed_gpus(1, launch=1.0)
    seen = []

    def work():
        seen.append(clock())
        host_takes(5)
        seen.append(clock())

    host_takes(3)
    thread = threading.Thread(target=work)
    thread.start()
    host_takes(1)
    seen.insert(0, clock())
    thread.join(0.0)
    thread.join()
    assert sorted(seen) == [3, 4, 8]
    assert clock() == 8
    thread.join()
    host_takes(1)
    thread.join()
    assert clock() == 9


def test_a_join_that_gives_up_takes_no_time():
    fixed_gpus(1)
    late, go = threading.Event(), threading.Event()
    with in_thread(lambda: (host_takes(100), late.set(), go.wait(30))) as thread:
        assert late.wait(30)
        thread.join(0.0)
        assert clock() == 0
        go.set()
    assert clock() == 100


@pytest.mark.parametrize(
    "work",
    [
        lambda go, seen: (host_takes(100), seen.append(0), go.wait(30)),
        lambda go, seen: (seen.append(0), go.wait(30), seen.append(clock())),
    ],
)
def test_a_thread_that_was_started_by_another_clock_begins_at_0_and_does_not_change_this(work):
    fixed_gpus(1)
    host_takes(100)
    go, seen = threading.Event(), []
    with in_thread(lambda: work(go, seen)):
        wait_until(lambda: seen)
        fixed_gpus(1)
        go.set()
    assert {clock(), *seen} == {0}


@pytest.mark.parametrize("where", ["its stream", "another stream"])
def test_an_op_is_not_issued_before_what_another_thread_issued_for_it(where):
    (device,) = fixed_gpus(1, launch=1.0)
    made = []

    def work():
        host_takes(10)
        made.append(torch.ones(3, device=device))  # issued at 11

    side, main = torch.vgpu.Stream(device), torch.vgpu.default_stream(device)
    with in_thread(work), recorded() as spans:
        wait_until(lambda: made)
        side.wait_stream(main)
        with torch.vgpu.stream(main if where == "its stream" else side):
            made[0].new_empty(3) + 1 if where == "its stream" else made[0] + 1
    assert [op.issued for op in spans if op.name == "aten.add"] == [12]


# -- the same program by both clocks


def step_of_data_parallel(devices):
    net = nn.DataParallel(d2lpar.lenet().to(devices[0]), device_ids=devices)
    X = torch.rand(8, 1, 28, 28)
    loss = F.cross_entropy(net(X.to(devices[0])), torch.arange(8, device=devices[0]))
    loss.backward()
    return [loss, *(p.grad for p in net.parameters())]


def sums(devices):
    results = []
    for algorithm in ("star", "tree", "ring"):
        data = [torch.rand(10, device=device) for device in devices]
        allreduce(data, algorithm)
        results += data
    return results + [each for gathered in allgather(results[:2]) for each in gathered]


def pipeline(devices):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    stages = split_into_stages(net, [2], devices)
    X, y = torch.rand(8, 4), torch.arange(8) % 3
    loss = pipeline_step(stages, X, y, F.cross_entropy, gpipe(2, 4))
    return [loss, *(p.grad for stage in stages for p in stage.parameters())]


def sharded(devices):
    X, Us, Vs = (
        [torch.rand(shape, device=device).requires_grad_() for device in devices]
        for shape in ((5, 8), (8, 8), (4, 8))
    )
    H = [F.relu(F.linear(*each)) for each in zip(copied(X), Us, strict=True)]
    outputs = summed([F.linear(*each) for each in zip(H, Vs, strict=True)])
    torch.autograd.backward([output.sum() for output in outputs])
    return [*outputs, *(each.grad for each in (*X, *Us, *Vs))]


def on_side_streams(devices):
    x = torch.rand(64, 64, device=devices[0], requires_grad=True)
    side = torch.vgpu.Stream(devices[0])
    side.wait_stream(torch.vgpu.current_stream(devices[0]))
    with torch.vgpu.stream(side):
        y = F.dropout(x @ x)
        there = torch.rand(64).pin_memory().to(devices[0], non_blocking=True)
        back = torch.zeros(64, 64).pin_memory().copy_(y.detach(), non_blocking=True)
    torch.vgpu.current_stream(devices[0]).wait_stream(side)
    (y * there).sum().backward()
    side.synchronize()
    return [y, back, x.grad, x.grad.to(devices[1])]


PROGRAMS = [step_of_data_parallel, sums, pipeline, sharded, on_side_streams]


def seen(program, devices):
    """Run a program; return its results, and all that does not depend on the clock."""
    torch.manual_seed(1)
    program(devices)  # what a first run allocates
    d2lpar.synchronize()
    streams = {}
    for device in devices:
        torch.vgpu.reset_peak_memory_stats(device)
    torch.manual_seed(1)
    with recorded() as spans:
        results = program(devices)
        peaks = [torch.vgpu.max_memory_allocated(device) for device in devices]
    ops = [op for op in spans if op.kind != "wait"]
    for op in ops:
        streams.setdefault((op.device, op.stream), []).append((op.name, op.engine, op.num_bytes))
    order = sorted((key[0].index, names) for key, names in streams.items())
    moved = Counter((str(op.source), str(op.target), op.num_bytes) for op in ops if op.num_bytes)
    in_use = [torch.vgpu.memory_allocated(device) for device in devices]
    return results, (order, moved, peaks, in_use)


@pytest.mark.parametrize("program", PROGRAMS)
def test_by_the_model_a_program_does_what_it_does_by_the_wall_clock(program):
    results, facts = seen(program, virtual_gpus(2))
    results, seconds = [each.detach().cpu() for each in results], set()
    for values in (True, False):
        modelled, found = seen(program, virtual_gpus(2, model="v100", values=values))
        assert found == facts
        found = [each.detach().cpu() for each in modelled]
        assert [each.shape for each in found] == [each.shape for each in results]
        # Without values a result has none, or the right ones if it follows from small tensors.
        for each, expected in zip(found, results, strict=True):
            assert torch.equal(each, expected) or not values and each.isnan().all()
        seconds.add(clock())
        del modelled
    assert len(seconds) == 1, "values take no time of the model"


# -- changing the clock


def test_what_there_was_before_goes_on_after_the_clock_has_changed():
    rng = random.Random(0)
    devices = virtual_gpus(2)
    torch.manual_seed(3)
    net = nn.Linear(4, 4).to(devices[0])
    expected = nn.Linear(4, 4)
    expected.load_state_dict({k: v.cpu() for k, v in net.state_dict().items()})
    optimizers = [
        torch.optim.Adam(each.parameters(), lr=0.1, foreach=False) for each in (net, expected)
    ]
    stream, event = torch.vgpu.Stream(devices[0]), torch.vgpu.Event(enable_timing=True)
    generator = torch.Generator(device=devices[0]).manual_seed(5)
    draws = [torch.rand(2, 4, device=devices[0], generator=generator).cpu() for _ in range(12)]
    generator.manual_seed(5)
    for drawn in draws:
        n = rng.choice([1, 2, 3])
        model = rng.choice([None, "v100", Fixed(0.5), "h100"])
        devices = virtual_gpus(n, model=model)
        assert len(devices) == n and torch.vgpu.device_count() == n
        started = clock()
        assert event.query()
        event.synchronize()
        torch.vgpu.current_stream(devices[0]).wait_event(event)
        stream.wait_stream(torch.vgpu.current_stream(devices[0]))
        with torch.vgpu.stream(stream):
            X = torch.rand(2, 4, device=devices[0], generator=generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = net(X).square().sum()
            loss.backward()
            optimizers[0].step()
            event.record()
        expected(drawn).square().sum().backward()
        optimizers[1].step()
        stream.synchronize()
        assert clock() - started < 100, "times of two clocks were mixed"
        for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x * torch.ones(3, device=x.device, requires_grad=True)).sum().backward(),
        lambda x: in_threads([lambda: x + 1]),
    ],
    ids=["in backward", "in another thread"],
)
def test_what_an_earlier_clock_has_written_holds_up_nothing(work):
    """Where several threads issue, or autograd, an op is no earlier than what it reads."""
    (device,) = fixed_gpus(1)
    host_takes(1000)
    x = torch.ones(3, device=device)
    assert clock() == 1000
    fixed_gpus(1)
    work(x)
    torch.vgpu.synchronize()
    assert clock() == 0


def test_random_numbers_of_one_clock_hold_up_no_draws_by_another():
    (device,) = fixed_gpus(1)
    generator, x = torch.Generator(device=device), torch.empty(3, device=device)
    for seconds in (50.0, 1.0):
        fixed_gpus(1, seconds=seconds)
        x.normal_(generator=generator)
        x.normal_()
        torch.vgpu.synchronize()
        assert clock() == 2 * seconds


def test_a_new_simulation_waits_for_the_old_one_and_begins_at_0():
    devices = fixed_gpus(2)
    sleep(devices[1], 7)
    x = torch.full((3,), 2.0, device=devices[1])
    event, seen = torch.vgpu.current_stream(devices[1]).record_event(), []
    (device,) = fixed_gpus(1)
    in_threads([lambda: seen.append(event.query())])
    assert clock() == 0 and seen == [True]
    sleep(device, 1)
    virtual_gpus(2)
    assert x.tolist() == [2] * 3
    assert hardware_name() == ""


def test_a_recording_goes_on_over_a_change_of_the_clock():
    (device,) = virtual_gpus(1)
    x = torch.ones(3, device=device)
    torch.vgpu.synchronize()
    with recorded() as spans:
        x + 1
        fixed_gpus(1, seconds=2.0)
        x * 2
        virtual_gpus(1)
        x - 1
    assert [op.name for op in spans if op.kind == "kernel"] == ["aten.add", "aten.mul", "aten.sub"]
    (modelled,) = [op for op in spans if op.name == "aten.mul"]
    assert (modelled.start, modelled.end) == (0, 2)


def test_an_error_of_a_kernel_shows_at_the_next_synchronize():
    (device,) = fixed_gpus(1, seconds=2.0)
    places = torch.full((1,), 7, device=device)
    torch.ones(3, device=device)[places]
    assert clock() == 0
    with pytest.raises(torch.AcceleratorError, match=r"aten\.index"):
        torch.vgpu.synchronize()
    assert clock() == 6
    assert (torch.ones(3, device=device) + 1).tolist() == [2] * 3


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_gpu_whose_kernels_take_no_possible_time_is_refused(seconds):
    (device,) = fixed_gpus(1, seconds=seconds)
    with pytest.raises(ValueError, match=f"for aten.fill_ must .*: got {seconds}"):
        torch.ones(2, device=device)


def test_a_copy_between_two_clocks_is_refused():
    by_the_wall_clock = torch.ones(2, device=virtual_gpus(2)[1])
    (device,) = virtual_gpus(1, model="v100")
    with pytest.raises(RuntimeError, match="vgpu:1 and vgpu:0 must have the same clock"):
        by_the_wall_clock.to(device)


def test_a_stream_does_not_wait_for_one_of_the_other_clock():
    stream = torch.vgpu.Stream(virtual_gpus(3)[2])
    virtual_gpus(1, model="v100")
    with stream:
        event = stream.record_event()
    event.wait(torch.vgpu.current_stream(0))  # nothing is under way: nothing to wait for
    gate = threading.Event()
    found = registry.devices[2]
    stream._stream.issue(Op("gate", "kernel", found.compute, lambda op: gate.wait(30)))
    try:
        with pytest.raises(RuntimeError, match="vgpu:0 and vgpu:2 must have the same clock"):
            torch.vgpu.current_stream(0).wait_stream(stream)
    finally:
        gate.set()


def test_timers_and_events_do_not_measure_across_clocks():
    (device,) = virtual_gpus(1, model="v100")
    timer, first = d2lpar.Timer(), torch.vgpu.Event(enable_timing=True)
    first.record()
    timeline = d2lpar.Timeline()
    with pytest.raises(RuntimeError, match="within this timeline"):
        with timeline:
            virtual_gpus(1, model="v100")
    with pytest.raises(RuntimeError, match="changed the clock since"):
        timer.stop()
    second = torch.vgpu.Event(enable_timing=True)
    second.record()
    with pytest.raises(RuntimeError, match="between these two events"):
        first.elapsed_time(second)
    timer.start()
    assert timer.stop() == 0


@pytest.mark.parametrize(
    "links, seconds", [((Link(2.0, 1), Link(4.0, 9)), 8 / 2 + 1), ((Link(4.0, 9), None), 8 / 4 + 9)]
)
@pytest.mark.parametrize("source", [0, 1])
def test_the_slower_of_two_links_decides(links, seconds, source):
    devices = virtual_gpus(2, model=Fixed(), peer_link=list(links))
    with d2lpar.Timeline() as timeline:
        room(8, devices[source]).to(devices[1 - source])
    (copy,) = timeline.select(kind="copy")
    assert copy.seconds == seconds


# -- what is changed in the process


def test_the_switch_interval_is_the_programs_own_but_for_engines_that_are_threads():
    before = sys.getswitchinterval()
    try:
        virtual_gpus(1, model="v100")
        sys.setswitchinterval(0.007)
        for model, expected in ((None, 1e-4), (None, 1e-4), ("v100", 0.007), ("t4", 0.007)):
            virtual_gpus(1, model=model)
            assert sys.getswitchinterval() == pytest.approx(expected, rel=0.01)
        virtual_gpus(1)
        sys.setswitchinterval(0.003)  # what the program sets meanwhile counts
        for model in (None, "v100"):
            virtual_gpus(1, model=model)
            assert sys.getswitchinterval() == pytest.approx(0.003, rel=0.01)
        sys.setswitchinterval(1e-5)
        virtual_gpus(1)
        assert sys.getswitchinterval() == pytest.approx(1e-5, rel=0.01)  # short enough
    finally:
        sys.setswitchinterval(before)


def test_threads_are_watched_once_and_what_others_make_of_them_stays(monkeypatch):
    virtual_gpus(1, model="v100")
    methods = threading.Thread.start, threading.Thread.join
    watched, calls = threading.Thread.start, []

    def start(self):  # a debugger's, which stays where it is
        calls.append(self)
        watched(self)

    with monkeypatch.context() as debugger:
        debugger.setattr(threading.Thread, "start", start)
        for model in (None, "v100", None):
            virtual_gpus(1, model=model)
            assert threading.Thread.start is start
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        assert calls[-1] is thread
    virtual_gpus(1, model="v100")
    virtual_gpus(1)
    assert (threading.Thread.start, threading.Thread.join) == methods


PROCESS = """
import atexit, os, sys
atexit.register(lambda: print(f"{sys.getswitchinterval():.3f}"))
sys.setswitchinterval(0.007)
registered, register = [], os.register_at_fork
os.register_at_fork = lambda **functions: (registered.append(functions), register(**functions))
import torch, d2lpar
import torch.distributed as dist
d2lpar.virtual_gpus(1)
before = len(registered)
for device in d2lpar.virtual_gpus(8):
    torch.ones(3, device=device)
dist.init_process_group("vccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3, device="vgpu:0"))
dist.destroy_process_group()
d2lpar.virtual_gpus(8, model="v100")
d2lpar.virtual_gpus(8)
print(len(registered) - before)
"""


AT_EXIT = """
import atexit, torch
atexit.register(lambda: print(torch.vgpu.memory_reserved(), x[1].item(), torch.vgpu.synchronize()))
from vgpu import virtual_gpus
virtual_gpus(1, model="v100")
x = torch.ones(3, device="vgpu") + 1
"""


def test_what_python_calls_at_its_exit_can_still_ask():
    """It was registered before the function that ends the simulator, and so is called after it."""
    result = fresh.run(AT_EXIT, fresh.SET_UP)
    assert result.stdout.split() == [str(2**21), "2.0", "None"], result.stderr


def test_a_process_gets_no_functions_for_each_engine_and_its_switch_interval_back():
    result = fresh.run(PROCESS, fresh.SET_UP)
    assert result.stdout.split() == ["0", "0.007"], result.stderr


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x[x > 0],
        lambda x: x[:, x[0, :, 0] > 0],
        lambda x: x[x[:, :, 0] > 0, 1],
        lambda x: x[None, x.sum((1, 2)) > 0],
        lambda x: x.clone().index_put_((x > 0,), torch.tensor(3.0).to(x.device)),
        lambda x: torch.autograd.functional.jvp(lambda x: x[x > 0] ** 2, x, x)[1],
    ],
)
def test_masks_choose_as_on_the_cpu(choose):
    """On modelled GPUs the host waits for the mask, and indexes by numbers."""
    (device,) = virtual_gpus(1, model="v100")
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose(x.to(device)).cpu(), choose(x))


HOST = Host(operator=1.0, module=10.0, autograd=100.0)


def recurrent_seconds(make, length):
    """Return the modelled seconds of the host for a call of a layer, and for its backward."""
    gpu = Fixed()
    (device,) = virtual_gpus(1, model=Machine(gpu, host=HOST), values=False)
    layer = make(3, 4).to(device)
    x = torch.empty(length, 2, 3, device=device)
    seconds = []
    for _ in range(2):  # the second finds gradients to add to
        begun = clock()
        out, _ = layer(x)
        called = clock()
        d2lpar.synchronize()
        loss = out.sum()
        summed = clock()
        loss.backward()
        seconds = called - begun, clock() - summed
    return seconds


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_recurrent_layer_is_one_operator_of_cudnn(make):
    """The call of a module and one operator, however many steps; nothing more is issued in Python.

    Backward: the sum's two operators, one of the layer's, and the gradients of four parameters.
    """
    forward, backward = recurrent_seconds(make, 5)
    assert forward == 11.0
    assert (forward, backward) == recurrent_seconds(make, 50)
    assert 200 <= backward <= 800


def test_after_an_error_in_a_recurrent_layer_operators_take_their_time():
    (device,) = virtual_gpus(1, model=Machine(Fixed(), host=HOST), values=False)
    layer, x = nn.LSTM(3, 4).to(device), torch.empty(2, 5, device=device)
    begun, seen = clock(), []
    work = lambda: ((x + x) * x, seen.append(clock()))  # noqa: E731
    layer.register_forward_pre_hook(lambda *_: in_threads([work]))  # not a part of its call
    with pytest.raises(RuntimeError, match="input.size"):
        layer(x)
    assert seen == [begun + 10.0 + 2.0]
    begun = clock()
    (x + x) * x
    assert clock() - begun == 2.0


@pytest.mark.parametrize("number", [1, 2])
def test_each_pass_through_recurrent_layers_takes_its_time(number, monkeypatch):
    """The start of a pass; of each layer one operator, gradients of 4 parameters; one of exp."""
    (device,) = virtual_gpus(1, model=Machine(Fixed(), host=HOST), values=False)
    monkeypatch.setattr(host, "_CALLS_KEPT", len(host.recurrent_calls.firsts) + 2)
    layers = [nn.LSTM(width, 4).to(device) for width in (3, 4)[:number]]
    x, ends = torch.empty(5, 2, 3, device=device), []
    losses = [reduce(lambda y, layer: layer(y)[0], layers, x).exp().sum() for _ in range(3)]
    for loss in (losses[2],) * 3:
        loss.backward(retain_graph=True)
        ends.append(clock())
    assert ends[2] - ends[1] == 1.0 + number * (100.0 + 4 * 100.0) + 100.0


def test_without_cudnn_a_recurrent_layer_is_issued_step_by_step():
    with torch.backends.cudnn.flags(enabled=False):
        assert recurrent_seconds(nn.GRU, 50)[0] > recurrent_seconds(nn.GRU, 5)[0] + 45


def test_parameters_travel_to_replicas_while_python_copies_the_modules():
    """Launching the copies takes no time here; to copy a module takes 1 s for each GPU."""
    devices = fixed_gpus(2, launch=Host(0.0, 1.0, 0.0))
    parallel = nn.DataParallel(nn.Linear(2, 3).to(devices[0]), device_ids=devices)
    x = torch.ones(8, 2, device=devices[0])
    begun = clock()
    with recorded() as spans:
        parallel(x)
    copies = [op for op in spans if op.kind == "copy" and op.target == devices[1]]
    assert sum(op.num_bytes for op in copies) == 4 * (2 * 3 + 3) + 4 * 8 // 2 * 2
    assert {op.start for op in copies} == {begun}
