"""Chapter 09, pipeline parallelism: stages, micro-batches and schedules."""

import collections
import copy
import functools
import itertools
from typing import NamedTuple

import torch

from d2lpar.data.batches import check_batch
from d2lpar.side_streams import receive, send
from d2lpar.timelines.timeline import Mark, Timeline
from d2lpar.timing import best_seconds


class Task(NamedTuple):
    """A pass of a stage: `kind`, "forward" or "backward", of micro-batch `micro_batch`."""

    kind: str
    micro_batch: int


def split_into_stages(net, cuts, devices):
    """Split a network into stages, copied to devices; return a list of `nn.Sequential`.

    Args:
        net: an `nn.Sequential`; it is not changed.
        cuts: the indices of the first layers of the second, third, ... stage.
        devices: a list of devices, one more than cuts.

    Raises:
        ValueError: the number of stages is not that of devices, or a stage has no parameters.
    """
    bounds = [0, *cuts, len(net)]
    if len(bounds) != len(devices) + 1 or sorted(set(bounds)) != bounds:
        raise ValueError(
            f"cuts must split {len(net)} layers into {len(devices)} stages: got {list(cuts)}"
        )
    parts = [net[first:last] for first, last in itertools.pairwise(bounds)]
    for i, part in enumerate(parts):
        if next(part.parameters(), None) is None:
            last = bounds[i + 1] - 1
            raise ValueError(
                f"a stage must have parameters: layers {bounds[i]} to {last} have none"
            )
    return [copy.deepcopy(part).to(device) for part, device in zip(parts, devices, strict=True)]


def gpipe(num_stages, num_micro_batches):
    """Return the schedule GPipe, a list of `Task`s per stage: all forward passes come first.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965.
    """
    _check(num_stages, num_micro_batches)
    tasks = [Task(kind, i) for kind in ("forward", "backward") for i in range(num_micro_batches)]
    return [list(tasks) for _ in range(num_stages)]


def one_forward_one_backward(num_stages, num_micro_batches):
    """Return the schedule 1F1B, a list of `Task`s per stage: backward passes come early.

    Stage s starts with up to ``num_stages - s - 1`` forward passes, then alternates forward and
    backward, so it stores at most ``num_stages - s`` micro-batches.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473: 1F1B with a flush after each
    batch. PipeDream, Narayanan et al. 2019, https://doi.org/10.1145/3341301.3359646, has none.
    """
    _check(num_stages, num_micro_batches)
    schedule = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage - 1, num_micro_batches)
        tasks = [Task("forward", i) for i in range(ahead)]
        for i in range(num_micro_batches):
            if i + ahead < num_micro_batches:
                tasks.append(Task("forward", i + ahead))
            tasks.append(Task("backward", i))
        schedule.append(tasks)
    return schedule


def _check(num_stages, num_micro_batches):
    for name, n in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if n < 1:
            raise ValueError(f"the number of {name} must be at least 1: got {n}")


def predict_schedule(schedule, forward, backward, cores=None):
    """Calculate when each task of a schedule runs; nothing is measured.

    A task starts once its stage is idle and its input is available. Messages take no time.

    Args:
        schedule: a list of `Task`s, or of equal tuples, for each stage.
        forward, backward: seconds of one task, a list with one number per stage.
        cores: number of tasks that run at full speed at a time; more share the cores evenly. By
            default one per stage.

    Returns:
        For each stage a list of `Mark`s, named "forward 0" and so on.

    Raises:
        ValueError: the schedule deadlocks, or there is not one number of seconds per stage.
    """
    for name, figures in (("forward", forward), ("backward", backward)):
        if len(figures) != len(schedule):
            raise ValueError(
                f"{name} must have {len(schedule)} numbers, one per stage: got {len(figures)}"
            )
    seconds = {"forward": forward, "backward": backward}
    cores = len(schedule) if cores is None else cores
    todo = [[Task(*task) for task in tasks] for tasks in schedule]
    running, marks = {}, [[] for _ in schedule]
    done, now = set(), 0.0
    while any(todo):
        for stage, tasks in enumerate(todo):
            if tasks and stage not in running and _inputs(stage, tasks[0], len(schedule)) <= done:
                running[stage] = [now, seconds[tasks[0].kind][stage]]
        if not running:
            waiting = {stage: tuple(tasks[0]) for stage, tasks in enumerate(todo) if tasks}
            raise ValueError(f"the schedule deadlocks, tasks wait for each other: {waiting}")
        speed = min(1.0, cores / len(running))
        passed = min(left for _, left in running.values())
        now += passed / speed
        for stage, (start, left) in list(running.items()):
            running[stage][1] = left - passed
            if left - passed <= 1e-9 * now:
                task = todo[stage].pop(0)
                done.add((stage, task))
                marks[stage].append(Mark(f"{task.kind} {task.micro_batch}", start, now))
                del running[stage]
    return marks


def _inputs(stage, task, num_stages):
    """Return the set of (stage, task) that a task depends on."""
    if task.kind == "forward":
        return {(stage - 1, task)} if stage else set()
    forward = Task("forward", task.micro_batch)
    return {(stage, forward), (stage + 1, task)} if stage + 1 < num_stages else {(stage, forward)}


def rounds(schedule):
    """Return the tasks of a schedule round by round: a list of (stage, task) for each round.

    In a round each stage runs at most one task, whose input was made in an earlier round.

    Args:
        schedule: a list of `Task`s, or of equal tuples, for each stage.

    Raises:
        ValueError: the schedule deadlocks.
    """
    by_start = collections.defaultdict(list)
    units = [1] * len(schedule)
    for stage, marks in enumerate(predict_schedule(schedule, units, units)):
        for mark, task in zip(marks, schedule[stage], strict=True):
            by_start[mark.start].append((stage, task))
    return [by_start[start] for start in sorted(by_start)]


def bubble_fraction(marks):
    """Return the idle fraction of all stages from the first mark to the last.

    Args:
        marks: for each stage a list of `d2lpar.Mark`s.
    """
    start = min(mark.start for stage in marks for mark in stage)
    end = max(mark.end for stage in marks for mark in stage)
    busy = sum(mark.end - mark.start for stage in marks for mark in stage)
    return 1 - busy / (len(marks) * (end - start))


def pipeline_step(stages, X, y, loss, schedule):
    """Run forward and backward of a batch by a schedule; return the loss, on the last device.

    The stages run concurrently, as far as the schedule permits. The gradients of the mean loss over
    the batch are added to `grad` of the parameters.

    Args:
        stages: a list of modules, each with parameters, on one device.
        X, y: a batch, (b, ...) and (b, ...), on any device.
        loss: a function of outputs and labels that returns the mean loss.
        schedule: a list of `Task`s for each stage, for example from `gpipe`.

    Raises:
        ValueError: the schedule has another number of stages, more micro-batches than examples or
            a deadlock, or X and y differ in length.
    """
    check_batch(X, y)
    num_stages, m = len(stages), len({task.micro_batch for task in schedule[0]})
    if len(schedule) != num_stages or m > len(X):
        raise ValueError(
            f"the schedule must fit {num_stages} stages and {len(X)} examples: "
            f"got {len(schedule)} stages and {m} micro-batches"
        )
    devices = [_device(stage) for stage in stages]
    inputs, labels = X.to(devices[0]).tensor_split(m), y.to(devices[-1]).tensor_split(m)
    sent, kept, losses = {}, {}, []

    def send_to(s, task, tensor):
        sent[s, task] = send(tensor, torch.empty_like(tensor, device=devices[s]))

    def forward(s, i):
        H = receive(sent.pop((s, ("forward", i)))).requires_grad_() if s else inputs[i]
        out = stages[s](H)
        if s + 1 < num_stages:
            send_to(s + 1, ("forward", i), out.detach())
        else:
            out = loss(out, labels[i]) * (len(labels[i]) / len(y))
            losses.append(out.detach())
        kept[s, i] = H, out

    def backward(s, i):
        H, out = kept.pop((s, i))
        is_last = s + 1 == num_stages
        torch.autograd.backward(out, None if is_last else receive(sent.pop((s, ("backward", i)))))
        if s:
            send_to(s - 1, ("backward", i), H.grad)

    for tasks in rounds(schedule):
        for s, (kind, i) in tasks:
            (forward if kind == "forward" else backward)(s, i)
    return sum(losses)


def _device(stage):
    return next(stage.parameters()).device


def record_tasks(step, devices):
    """Measure when each device runs each marked part of a step, after a warm-up step.

    Args:
        step: a function with an argument `mark`, a `Timeline.mark`, by which it names each part
            that it launches; names must be unique.
        devices: a list of devices.

    Returns:
        For each device a list of `Mark`s, from the start of a part's first kernel to the end of
        its last.
    """
    for _ in range(2):
        with Timeline() as timeline:
            step(mark=timeline.mark)
    marks = {device: [] for device in map(torch.device, devices)}
    for name in dict.fromkeys(mark.name for mark in timeline.marks):
        for device, of_device in marks.items():
            if spans := timeline.select(device, "kernel", mark=name):
                of_device.append(Mark(name, spans[0].start, max(span.end for span in spans)))
    return [sorted(of_device, key=lambda mark: mark.start) for of_device in marks.values()]


def task_seconds(stages, X):
    """Measure each stage alone, with one micro-batch.

    Args:
        stages: a list of modules, each on one device.
        X: a micro-batch, (b, ...), on any device.

    Returns:
        (forward, backward): two lists with the seconds of each stage.
    """
    forward, backward = [], []
    for s, stage in enumerate(stages):
        work = functools.partial(stage, X.detach().to(_device(stage)).requires_grad_(s > 0))
        forward.append(best_seconds(work))
        backward.append(best_seconds(lambda work=work: work().sum().backward()) - forward[-1])
        X = work()
    return forward, backward
