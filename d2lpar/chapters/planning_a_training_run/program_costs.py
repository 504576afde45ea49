"""What the programs cost of which a step of GPT consists, on one modelled GPU for its equals.

They are a layer, the head, a message, and the sum of gradients with the optimizer.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2lpar.chapters.planning_a_training_run.gpt import Head, Layer
from d2lpar.chapters.planning_a_training_run.layouts import UNLIMITED
from d2lpar.devices import virtual_gpus
from d2lpar.memory_use import peak_bytes
from d2lpar.timelines.timeline import Timeline
from vgpu import equal_ranks


class Cost(NamedTuple):
    """What a program costs one GPU.

    Attributes:
        seconds: of the model's clock.
        busy: the seconds of these in which it runs kernels.
        kept: bytes that stay: of a layer until backward, of an optimizer for good.
        peak: the most bytes beside these, while it runs.
    """

    seconds: float
    busy: float = 0.0
    kept: int = 0
    peak: int = 0


def _device(machine):
    (device,) = virtual_gpus(1, model=machine, memory=UNLIMITED, values=False)
    return device


def _cost(device, work):
    """Return the `Cost` of `work()`; nothing is kept."""
    timelines = []
    [peak] = peak_bytes(lambda: timelines.append(Timeline.of(work, warmups=0)), [device])
    return Cost(timelines[0].seconds, timelines[0].busy(device), 0, peak)


def _group(count, stride=1):
    """Return a group of `count` ranks from 0 on, or None for one rank alone."""
    return dist.new_group(range(0, count * stride, stride)) if count > 1 else None


@functools.cache
def layer_cost(machine, width, heads, length, micro, t, recompute=True):
    """Return the `Cost` of a layer on one of t ranks: forward, forward again, and backward.

    It is a quarter of what six layers cost more than two. A layer keeps what torch saves for
    backward, or its input only if it is recomputed.
    """
    device = _device(machine)
    accel = torch.get_device_module(device)
    with equal_ranks(t):
        group = _group(t)
        with torch.device("meta"):  # no values on the CPU either
            layers = nn.ModuleList(Layer(width, heads, t, group) for _ in range(2)).half()
        layers.to_empty(device=device)
        x = torch.empty(length, micro, width, device=device, dtype=torch.half, requires_grad=True)
        kept = {}

        def run(count):
            before = accel.memory_allocated(device)
            y = x
            for i in range(count):
                layer = layers[i % 2]
                y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
            kept[count] = accel.memory_allocated(device) - before
            y.backward(torch.empty_like(y))

        run(2)  # makes the gradients
        few, many = (_cost(device, functools.partial(run, count)) for count in (2, 6))
        of_one = (kept[6] - kept[2]) // 4
        return Cost(
            (many.seconds - few.seconds) / 4,
            (many.busy - few.busy) / 4,
            of_one,
            max(0, few.peak - 2 * of_one),
        )


@functools.cache
def head_cost(machine, width, vocabulary, length, micro, t):
    """Return the `Cost` of embedding, head and loss, forward and backward."""
    device = _device(machine)
    with equal_ranks(t):
        with torch.device("meta"):
            head = Head(width, vocabulary, t, _group(t)).half()
        head.to_empty(device=device)
        x = torch.empty(length, micro, width, device=device, dtype=torch.half, requires_grad=True)
        targets = torch.zeros(length, micro, dtype=torch.long, device=device)
        head(x, targets).backward()  # makes the gradients
        return _cost(device, lambda: head(x, targets).backward())


@functools.cache
def update_cost(machine, parameters, t, d, p, zero=0):
    """Return the `Cost` of the sum of gradients over d ranks and of Adam.

    It keeps, for each parameter, 2 bytes each of weight and gradient, and 4 each of a float32 copy
    of both and of Adam's two averages. With the first stage of ZeRO a rank keeps these 16 bytes for
    a d-th of the parameters: it receives the sum of this part, a reduce-scatter, and the updated
    weights are gathered.
    """
    device = _device(machine)
    accel = torch.get_device_module(device)
    before = accel.memory_allocated(device)
    with equal_ranks(t * d * p):
        group = _group(d, t)
        parts = d if zero else 1
        part = -(-parameters // parts)  # the last one is filled up
        weights, gradients = torch.empty(2, parts * part, device=device, dtype=torch.half)
        my_weights, my_gradients = weights[:part], gradients[:part]  # as rank 0 has them
        master = torch.empty(part, device=device)
        master.grad = torch.empty_like(master)
        trainer = torch.optim.Adam([master], fused=True)

        def step():
            if parts > 1:
                dist.reduce_scatter(my_gradients, [*gradients.split(part)], group=group)
            elif group is not None:
                dist.all_reduce(gradients, group=group)
            master.grad.copy_(my_gradients)
            trainer.step()
            my_weights.copy_(master)
            if parts > 1:
                dist.all_gather([*weights.split(part)], my_weights, group=group)

        step()  # makes the averages
        return _cost(device, step)._replace(kept=accel.memory_allocated(device) - before)


@functools.cache
def message_seconds(machine, num_bytes, t, d):
    """Return the seconds in which activations get from a stage to the next, t d ranks further on.

    Each of t ranks sends a t-th, and the receivers gather them (Narayanan et al. 2021, section
    4.1). All ranks of a machine send at the same time, so each has its part of the network cards.
    """
    if machine.network is not None and machine.network_cards < (machine.gpus or 1):
        part = machine.network.bandwidth * machine.network_cards / machine.gpus
        network = replace(machine.network, bandwidth=part)
        machine = replace(machine, network=network, network_cards=machine.gpus)
    device = _device(machine)
    with equal_ranks(2 * t * d):
        group = _group(t)
        part, *parts = torch.empty(t + 1, num_bytes // t, dtype=torch.uint8, device=device)

        def message():
            dist.send(part, t * d)
            if t > 1:
                dist.all_gather(parts, part, group=group)

        return _cost(device, message).seconds
