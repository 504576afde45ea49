"""Pipeline parallelism: a network cut by layers, micro-batches, and who computes what when."""

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
    """What a stage computes at one time: the `kind`, "forward" or "backward", of a micro-batch."""

    kind: str
    micro_batch: int


def split_layers(net, cuts, devices):
    """Copy a network to devices by its layers; return the stages, a list of `nn.Sequential`.

    Args:
        net: an `nn.Sequential`; it stays as it is.
        cuts: the indices of the layers with which the second, third, ... stage begin.
        devices: a list of devices, one more than cuts.

    Raises:
        ValueError: the cuts do not make a stage with parameters for each device.
    """
    bounds = [0, *cuts, len(net)]
    if len(bounds) != len(devices) + 1 or sorted(set(bounds)) != bounds:
        raise ValueError(
            f"cuts at {list(cuts)} do not split {len(net)} layers into {len(devices)} stages"
        )
    parts = [net[first:last] for first, last in itertools.pairwise(bounds)]
    for i, part in enumerate(parts):
        if next(part.parameters(), None) is None:
            raise ValueError(f"layers {bounds[i]} to {bounds[i + 1] - 1} have no parameters")
    return [copy.deepcopy(part).to(device) for part, device in zip(parts, devices, strict=True)]


def gpipe(num_stages, num_micro_batches):
    """Return the schedule of GPipe, a list of `Task`s for each stage: all forward passes first.

    Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965.
    """
    _check(num_stages, num_micro_batches)
    tasks = [Task(kind, i) for kind in ("forward", "backward") for i in range(num_micro_batches)]
    return [list(tasks) for _ in range(num_stages)]


def one_forward_one_backward(num_stages, num_micro_batches):
    """Return the schedule 1F1B, a list of `Task`s for each stage: backward passes come early.

    Stage s begins with the forward passes that it takes until the first micro-batch comes back,
    and then alternates, so that it holds at most ``num_stages - s`` micro-batches.

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
            raise ValueError(f"a pipeline needs at least one of its {name}, not {n}")


def predict_schedule(schedule, forward, backward, cores=None):
    """Work out when each task of a schedule runs: a calculation, nothing is measured.

    A task starts when its stage is free and its input is there. Sending takes no time.

    Args:
        schedule: a list with the `Task`s of each stage.
        forward, backward: seconds of one task, a list with one for each stage.
        cores: how many tasks run at full speed at a time; more of them share evenly. By default
            no stage slows another.

    Returns:
        A list with the `Mark`s of each stage, named "forward 0" and so on.

    Raises:
        ValueError: the tasks of the schedule wait for each other, or the seconds are not one figure
            for each stage.
    """
    for name, figures in (("forward", forward), ("backward", backward)):
        if len(figures) != len(schedule):
            raise ValueError(
                f"{len(figures)} figures of {name} seconds for a schedule of {len(schedule)} stages"
            )
    seconds = {"forward": forward, "backward": backward}
    cores = len(schedule) if cores is None else cores
    todo, running, marks = [list(tasks) for tasks in schedule], {}, [[] for _ in schedule]
    done, now = set(), 0.0
    while any(todo):
        for stage, tasks in enumerate(todo):
            if tasks and stage not in running and _inputs(stage, tasks[0], len(schedule)) <= done:
                running[stage] = [now, seconds[tasks[0].kind][stage]]
        if not running:
            waiting = {stage: tuple(tasks[0]) for stage, tasks in enumerate(todo) if tasks}
            raise ValueError(f"the tasks of the schedule wait for each other: {waiting}")
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
    """Return the set of (stage, task) that a task has to wait for."""
    if task.kind == "forward":
        return {(stage - 1, task)} if stage else set()
    forward = Task("forward", task.micro_batch)
    return {(stage, forward), (stage + 1, task)} if stage + 1 < num_stages else {(stage, forward)}


def bubble_fraction(marks):
    """Return the fraction of the time, from first to last mark, in which stages are idle.

    `marks` has for each stage the list of its marks, see `d2lpar.Mark`.
    """
    start = min(mark.start for stage in marks for mark in stage)
    end = max(mark.end for stage in marks for mark in stage)
    busy = sum(mark.end - mark.start for stage in marks for mark in stage)
    return 1 - busy / (len(marks) * (end - start))


def pipeline_step(stages, X, y, loss, schedule):
    """Compute a batch's loss, on the last device, and the gradients of all stages, by a schedule.

    The devices run their tasks at the same time, as far as the schedule permits. The gradients of
    the mean over the whole batch are added to `grad` of the stages' parameters.

    Args:
        stages: a list of modules, each on one device and with parameters.
        X, y: a batch, (b, ...) and (b, ...), on any device.
        loss: a function of outputs and labels that returns their mean loss.
        schedule: a list with the `Task`s of each stage, as `gpipe` returns it.

    Raises:
        ValueError: the schedule is for another number of stages, has more micro-batches than the
            batch has examples, its tasks wait for each other, or X and y differ in length.
    """
    check_batch(X, y)
    num_stages, m = len(stages), len({task.micro_batch for task in schedule[0]})
    if len(schedule) != num_stages or m > len(X):
        raise ValueError(
            f"a schedule of {len(schedule)} stages and {m} micro-batches does not fit {num_stages} "
            f"stages and {len(X)} examples"
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

    order = []
    for s, marks in enumerate(predict_schedule(schedule, [1] * num_stages, [1] * num_stages)):
        order += [(mark.start, s, task) for mark, task in zip(marks, schedule[s], strict=True)]
    for _, s, (kind, i) in sorted(order):
        (forward if kind == "forward" else backward)(s, i)
    return sum(losses)


def _device(stage):
    return next(stage.parameters()).device


def record_tasks(step, devices, repeats=3):
    """Measure when each device works on each marked part of the quickest of `repeats` steps.

    Args:
        step: a function that takes `mark`, the `Timeline.mark` of a recording, and marks what it
            launches; each part has a name of its own.
        devices: a list of devices.
        repeats: how many steps are recorded, after one to warm up.

    Returns:
        A list with the `Mark`s of each device: from the start of a part's first kernel there to
        the end of its last one.
    """
    runs = []
    for _ in range(repeats + 1):
        with Timeline() as timeline:
            step(mark=timeline.mark)
        runs.append(timeline)
    timeline = min(runs[1:], key=lambda timeline: timeline.seconds)
    marks = {device: [] for device in map(torch.device, devices)}
    for name in dict.fromkeys(mark.name for mark in timeline.marks):
        for device, of_device in marks.items():
            if spans := timeline.select(device, "kernel", mark=name):
                of_device.append(Mark(name, spans[0].start, max(span.end for span in spans)))
    return [sorted(of_device, key=lambda mark: mark.start) for of_device in marks.values()]


def task_seconds(stages, X):
    """Measure each stage alone, with a micro-batch that passes through all of them.

    Args:
        stages: a list of modules, each on one device.
        X: a micro-batch, (b, ...), on any device.

    Returns:
        The seconds of the forward and of the backward passes, two lists with a number per stage.
    """
    forward, backward = [], []
    for s, stage in enumerate(stages):
        work = functools.partial(stage, X.detach().to(_device(stage)).requires_grad_(s > 0))
        forward.append(best_seconds(work))
        backward.append(best_seconds(lambda work=work: work().sum().backward()) - forward[-1])
        X = work()
    return forward, backward
