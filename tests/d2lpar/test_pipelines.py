import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar import Mark, Timeline
from d2lpar.chapters import pipeline_parallelism as pipelines
from d2lpar.chapters.pipeline_parallelism import (
    Task,
    gpipe,
    one_forward_one_backward,
    pipeline_step,
)

SCHEDULES = (gpipe, one_forward_one_backward)
WIDTH = 32


def network(num_layers=8):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def batch(b=16):
    return torch.randn(b, WIDTH), torch.randint(WIDTH, (b,))


def even_stages(net, p):
    n = len(net) // p
    return pipelines.split_into_stages(net, range(n, len(net), n), d2lpar.virtual_gpus(p))


def kinds(schedule):
    return ["".join(task.kind[0].upper() for task in tasks) for tasks in schedule]


def test_known_schedules():
    assert kinds(gpipe(2, 3)) == ["FFFBBB"] * 2
    assert kinds(one_forward_one_backward(4, 5)) == [
        "FFFFBFBBBB", "FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"
    ]  # fmt: skip
    assert kinds(one_forward_one_backward(4, 2)) == ["FFBB", "FFBB", "FFBB", "FBFB"]
    assert pipelines.bubble_fraction([[Mark("a", 1, 2)], [Mark("b", 2, 5)]]) == pytest.approx(0.5)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (4, 8), (5, 3)])
def test_every_stage_computes_each_task_once_and_the_bubble_is_the_formula(make, p, m):
    schedule = make(p, m)
    everything = {Task(kind, i) for kind in ("forward", "backward") for i in range(m)}
    assert all(len(tasks) == 2 * m and set(tasks) == everything for tasks in schedule)
    marks = pipelines.predict_schedule(schedule, [1.0] * p, [2.0] * p)
    assert pipelines.bubble_fraction(marks) == pytest.approx((p - 1) / (m + p - 1))
    assert [[mark.name for mark in stage] for stage in marks] == [
        [f"{kind} {i}" for kind, i in tasks] for tasks in schedule
    ]


@pytest.mark.parametrize("make, most", [*zip(SCHEDULES, ([8, 8, 8, 8], [4, 3, 2, 1]), strict=True)])
def test_micro_batches_under_way(make, most):
    for tasks, expected in zip(make(4, 8), most, strict=True):
        under_way = [0]
        for task in tasks:
            under_way.append(under_way[-1] + (1 if task.kind == "forward" else -1))
        assert max(under_way) == expected and under_way[-1] == 0


def test_predicted_marks_wait_for_inputs_and_share_cores():
    schedule = gpipe(2, 2)
    marks = pipelines.predict_schedule(schedule, [1.0, 3.0], [2.0, 1.0])
    assert marks[0] == [("forward 0", 0, 1), ("forward 1", 1, 2),
                        ("backward 0", 8, 10), ("backward 1", 10, 12)]  # fmt: skip
    assert marks[1] == [("forward 0", 1, 4), ("forward 1", 4, 7),
                        ("backward 0", 7, 8), ("backward 1", 8, 9)]  # fmt: skip
    shared = pipelines.predict_schedule(schedule, [1.0, 1.0], [1.0, 1.0], cores=1)
    assert shared[0][1] == ("forward 1", 1, 3) and shared[1][0] == ("forward 0", 1, 3)
    assert max(mark.end for stage in shared for mark in stage) == pytest.approx(8)


def test_rounds_have_one_task_of_a_stage_whose_input_is_of_an_earlier_round():
    """A task that runs in the round of its input would use what has not been sent yet."""
    tuples = [[tuple(task) for task in tasks] for tasks in one_forward_one_backward(2, 2)]
    shown = [
        " ".join(f"{s}{kind[0]}{i}" for s, (kind, i) in row) for row in pipelines.rounds(tuples)
    ]
    assert shown == ["0f0", "0f1 1f0", "1b0", "0b0 1f1", "1b1", "0b1"]


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("p, m, b", [(1, 2, 16), (2, 4, 16), (2, 3, 7), (4, 8, 16)])
def test_gradients_are_those_of_the_whole_network(make, p, m, b):
    net, (X, y) = network().double(), batch(b)
    X = X.double()
    expected = F.cross_entropy(net(X), y)
    expected.backward()
    stages = even_stages(net, p)
    for step in (1, 2):  # the second adds to the first
        got = pipeline_step(stages, X, y, F.cross_entropy, make(p, m))
        assert not got.requires_grad and got.device == next(stages[-1].parameters()).device
        torch.testing.assert_close(got.cpu(), expected.detach())
        params = [param for stage in stages for param in stage.parameters()]
        for param, whole in zip(params, net.parameters(), strict=True):
            torch.testing.assert_close(param.grad.cpu(), step * whole.grad)


def test_what_is_sent_and_what_is_kept():
    p, m, (X, y) = 4, 8, batch(256)
    stages, peaks = even_stages(network(), p), {}
    devices = [next(stage.parameters()).device for stage in stages]
    X, y = X.to(devices[0]), y.to(devices[-1])
    for make in SCHEDULES:
        pipeline_step(stages, X, y, F.cross_entropy, make(p, m))
        work = functools.partial(pipeline_step, stages, X, y, F.cross_entropy, make(p, m))
        peaks[make] = d2lpar.peak_bytes(work, devices)
        with Timeline() as timeline:
            work()
        pairs = [*zip(devices, devices[1:], strict=False), *zip(devices[1:], devices, strict=False)]
        assert timeline.bytes_by_link() == dict.fromkeys(pairs, 4 * 256 * WIDTH)
    part = 4 * 256 // m * WIDTH  # bytes of one activation of one micro-batch
    difference = [a - b for a, b in zip(*peaks.values(), strict=True)]
    assert difference[0] == (m - p) * 2 * part  # two layers keep what they return
    assert all(d >= (m - p + s) * 2 * part for s, d in enumerate(difference))


def test_parts_of_a_step_are_recorded_where_their_kernels_ran():
    devices = d2lpar.virtual_gpus(2)
    a, b = (torch.ones(64, 64, device=device) for device in devices)

    def step(mark):
        a.mm(a)  # in no part
        for i in range(2):
            with mark(f"both {i}"):
                a.mm(a).relu()
                b.mm(b)
        with mark("second"):
            b.relu()

    marks = pipelines.record_tasks(step, devices)
    assert [[mark.name for mark in row] for row in marks] == [
        ["both 0", "both 1"], ["both 0", "both 1", "second"]
    ]  # fmt: skip
    for row in marks:
        assert all(mark.start < mark.end for mark in row)
        assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))


def test_a_modelled_part_has_its_last_kernel():
    """The model's launch of it ends when the part does, and another part begins."""
    [device] = d2lpar.virtual_gpus(1, model="v100", values=False)
    X = torch.ones(4096, 4096, device=device)

    def step(mark):
        for name in "ab":
            with mark(name):
                X.mm(X)
                X.mm(X)

    [[a, b]] = pipelines.record_tasks(step, [device])
    assert (a.name, b.name) == ("a", "b")
    assert a.end - a.start == pytest.approx(b.end - b.start) and a.end == pytest.approx(b.start)


@pytest.mark.parametrize("names", [["cpu", "vgpu:0"], ["vgpu:0", "cpu"], ["cpu", "cpu"]])
def test_stages_may_lie_on_the_cpu(names):
    d2lpar.virtual_gpus(1)
    net, (X, y) = network(4).double(), batch()
    X = X.double()
    F.cross_entropy(net(X), y).backward()
    stages = pipelines.split_into_stages(net, [2], names)
    pipeline_step(stages, X, y, F.cross_entropy, gpipe(2, 3))
    params = [param for stage in stages for param in stage.parameters()]
    for param, whole in zip(params, net.parameters(), strict=True):
        torch.testing.assert_close(param.grad.cpu(), whole.grad)


def test_stages_are_copies_on_their_devices():
    net, devices = network(4), d2lpar.virtual_gpus(2)
    stages = pipelines.split_into_stages(net, [3], devices)
    assert [len(stage) for stage in stages] == [3, 1]
    for stage, device in zip(stages, devices, strict=True):
        assert {param.device for param in stage.parameters()} == {device}
    assert {param.device.type for param in net.parameters()} == {"cpu"}
    with torch.no_grad():
        pipelines.split_into_stages(net, [], ["cpu"])[0][0][0].weight.zero_()
    assert net[0][0].weight.any()


@pytest.mark.parametrize("cuts", [[], [0], [4], [2, 3], [3, 2]])
def test_cuts_that_do_not_fit(cuts):
    with pytest.raises(ValueError, match=f"must split 4 layers .*: got {re.escape(str(cuts))}"):
        pipelines.split_into_stages(network(4), cuts, ["cpu", "cpu"])


def test_a_stage_needs_parameters():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Tanh())
    with pytest.raises(ValueError, match="must have parameters: layers 1 to 2 have none"):
        pipelines.split_into_stages(net, [1], ["cpu"] * 2)


@pytest.mark.parametrize("make", SCHEDULES)
def test_empty_schedules(make):
    for p, m, text in ((0, 1, "stages must be at least 1: got 0"), (2, -1, "at least 1: got -1")):
        with pytest.raises(ValueError, match=text):
            make(p, m)


STUCK = [[Task("backward", 0), Task("forward", 0)], gpipe(2, 1)[1]]


@pytest.mark.parametrize(("schedule", "num_labels", "text"), [
    (gpipe(3, 2), 16, "fit 2 stages .*: got 3 stages and 2 micro-batches"),
    (gpipe(2, 17), 16, "16 examples: got 2 stages and 17 micro-batches"),
    (STUCK, 16, "wait for each other: {0: .'backward', 0.*1: "),
    (gpipe(2, 2), 15, "must have the same length: got 16 and 15"),
])  # fmt: skip
def test_schedules_that_do_not_fit(schedule, num_labels, text):
    stages = pipelines.split_into_stages(network(4), [2], ["cpu", "cpu"])
    X, y = batch()
    with pytest.raises(ValueError, match=text):
        pipeline_step(stages, X, y[:num_labels], F.cross_entropy, schedule)
    assert all(p.grad is None for stage in stages for p in stage.parameters())


@pytest.mark.parametrize("number", [1, 3])
def test_seconds_that_do_not_fit_the_stages(number):
    for name, seconds in (("forward", (number, 2)), ("backward", (2, number))):
        with pytest.raises(ValueError, match=f"{name} must have 2 numbers, .*: got {number}"):
            pipelines.predict_schedule(gpipe(2, 2), *([1.0] * n for n in seconds))


def test_each_stage_is_timed_with_what_it_would_receive(monkeypatch):
    """A backward pass takes what both passes take, less the forward pass."""
    received, seconds, has_grad = [], iter([1.0, 5.0, 2.0, 9.0]), []
    stages = even_stages(network(4), 2)
    for stage in stages:
        stage.register_forward_pre_hook(lambda module, inputs: received.append(inputs[0]))

    def best_seconds(work):
        work()
        has_grad.append([any(p.grad is not None for p in stage.parameters()) for stage in stages])
        return next(seconds)

    monkeypatch.setattr(pipelines, "best_seconds", best_seconds)
    X = batch(64)[0]
    assert pipelines.task_seconds(stages, X) == ([1.0, 2.0], [4.0, 7.0])
    assert has_grad == [[False, False], [True, False], [True, False], [True, True]]
    assert not received[0].requires_grad and received[-1].requires_grad
    assert received[-1].grad is not None and X.grad is None
    torch.testing.assert_close(received[-1].cpu(), stages[0](received[0]).cpu())
