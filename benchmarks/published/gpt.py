"""A step of GPT with t x d x p parallelism on A100s, beside 1,549 rows of VIA-Research/vTrain.

The rows are data/ground_truth_single.csv and ground_truth_multi.csv of that repository at f8dda84
(MIT licence); they come from Megatron-DeepSpeed on A100-SXM4 in machines of 8 with 800 Gbit/s.

A layer, the head, the sums of gradients and the optimizer are programs, each run on one modelled
GPU that stands for all. How often each counts is a formula, that of a pipeline that runs one
forward and one backward in turn (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473).
"""

import csv
import functools
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from d2lpar.virtual import equal_ranks
from d2lpar.virtual.hardware import MACHINES

from . import modelled, seconds_of
from .language import Split, Sum

VOCABULARY = 51_200
# eight A100 with four network cards of 200 Gbit/s
MACHINE = replace(MACHINES["dgxa100"], network_cards=4, name="eight A100, 800 Gbit/s")
COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "batch",
    "micro batch": "micro",
    "hidden size": "width",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "length",
    "tensor parallelism": "t",
    "data parallelism": "d",
    "pipeline parallelism": "p",
    "iteration time (ms)": "milliseconds",
}


class Step(NamedTuple):
    """A row: the sizes of a step, and the milliseconds that it took."""

    gpus: int
    batch: int
    micro: int
    width: int
    heads: int
    layers: int
    length: int
    t: int
    d: int
    p: int
    milliseconds: float


def read(path):
    """Return the `Step`s of a file of vTrain's."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Step(**{name: float(row[column]) for column, name in COLUMNS.items()}) for row in rows]


class RowLinear(nn.Linear):
    """A t-th of a linear layer whose parts are summed; it leaves the bias to its caller."""

    def __init__(self, width, out, t, group):
        super().__init__(width, out)
        self.t, self.group = t, group

    def forward(self, x):
        x = functional.linear(x, self.weight)
        return Sum.apply(x, self.group) if self.t > 1 else x


class Layer(nn.Module):
    """A t-th of a layer of Megatron's GPT; operators that it fuses by TorchScript are one here."""

    def __init__(self, width, heads, t, group):
        super().__init__()
        self.heads, self.t, self.group = heads // t, t, group
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.up = nn.Linear(width, 3 * width // t), nn.Linear(width, 4 * width // t)
        self.out = RowLinear(width // t, width, t, group)
        self.down = RowLinear(4 * width // t, width, t, group)
        self.softmax, self.dropout = nn.Softmax(-1), nn.Dropout(0.1)

    def split(self, x):
        return Split.apply(x, self.group) if self.t > 1 else x

    def forward(self, x):  # (s, b, h)
        s, b, _ = x.shape
        heads = self.qkv(self.split(self.first(x))).view(s, b * self.heads, -1).transpose(0, 1)
        q, k, v = heads.chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = self.dropout(self.softmax(scores))
        attended = self.out(torch.bmm(weights, v).transpose(0, 1).reshape(s, b, -1))
        x = x + functional.dropout(attended + self.out.bias, 0.1)
        hidden = self.down(functional.gelu(self.up(self.split(self.second(x)))))
        return x + functional.dropout(hidden + self.down.bias, 0.1)


class Head(nn.Module):
    """A t-th of the embedding as the last layer, and Megatron's cross-entropy over the parts."""

    def __init__(self, width, t, group):
        super().__init__()
        self.norm, self.t, self.group = nn.LayerNorm(width), t, group
        self.weight = nn.Parameter(torch.empty(VOCABULARY // t, width))

    def reduce(self, x):
        if self.t > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def forward(self, x, targets):  # (s, b, h), (s, b)
        x = self.norm(x)
        if self.t > 1:
            x = Split.apply(x, self.group)
        return _CrossEntropy.apply(functional.linear(x, self.weight).float(), targets, self).mean()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, head):
        logits = logits - head.reduce(logits.max(-1)[0]).unsqueeze(-1)
        chosen = head.reduce(logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
        weights = logits.exp()
        total = head.reduce(weights.sum(-1))
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), targets)
        return total.log() - chosen

    @staticmethod
    def backward(ctx, gradient):
        weights, targets = ctx.saved_tensors
        weights.scatter_add_(-1, targets.unsqueeze(-1), -gradient.new_ones(*targets.shape, 1))
        return weights.mul_(gradient.unsqueeze(-1)), None, None


def _group(count, stride=1):
    """Return a group of `count` ranks from 0 on, or None for one rank alone."""
    return dist.new_group(range(0, count * stride, stride)) if count > 1 else None


@functools.cache
def layer_seconds(machine, width, heads, length, micro, t):
    """Return the seconds of a layer on one of t ranks: forward, forward again, and backward."""
    (device,) = modelled(1, machine)
    with equal_ranks(t):
        group = _group(t)
        layers = nn.ModuleList(Layer(width, heads, t, group) for _ in range(2)).to(device).half()
        x = torch.empty(length, micro, width, device=device, dtype=torch.half, requires_grad=True)

        def run(count):
            y = x
            for i in range(count):
                y = checkpoint(layers[i % 2], y, use_reentrant=False)
            y.backward(torch.empty_like(y))

        return (seconds_of(lambda: run(6)) - seconds_of(lambda: run(2))) / 4


@functools.cache
def head_seconds(machine, width, length, micro, t):
    """Return the seconds of embedding, head and loss, forward and backward."""
    (device,) = modelled(1, machine)
    with equal_ranks(t):
        head = Head(width, t, _group(t)).to(device).half()
        x = torch.empty(length, micro, width, device=device, dtype=torch.half, requires_grad=True)
        targets = torch.zeros(length, micro, dtype=torch.long, device=device)
        return seconds_of(lambda: head(x, targets).backward())


@functools.cache
def update_seconds(machine, parameters, t, d, p):
    """Return the seconds of the sum of gradients over d ranks and of the optimizer."""
    (device,) = modelled(1, machine)
    with equal_ranks(t * d * p):
        group = _group(d, t)
        gradients = torch.empty(parameters, device=device, dtype=torch.half)
        master = torch.empty(parameters, device=device)
        master.grad = torch.empty_like(master)
        trainer = torch.optim.Adam([master], fused=True)

        def step():
            if group is not None:
                dist.all_reduce(gradients, group=group)
            master.grad.copy_(gradients)
            trainer.step()
            gradients.copy_(master)

        return seconds_of(step)


@functools.cache
def message_seconds(machine, num_bytes, distance):
    """Return the seconds of a message to the rank at this distance."""
    (device,) = modelled(1, machine)
    with equal_ranks(distance + 1):
        x = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return seconds_of(lambda: dist.send(x, distance))


def step_seconds(step, machine=MACHINE):
    """Return what a `Step` takes."""
    _, batch, micro, width, heads, layers, length, t, d, p = map(int, step[:10])
    passes = batch // (d * micro) + p - 1
    seconds = passes * layers / p * layer_seconds(machine, width, heads, length, micro, t)
    seconds += passes * head_seconds(machine, width, length, micro, t)
    if p > 1:  # activations forward, gradients back
        num_bytes = length * micro * width * 2
        seconds += 2 * passes * message_seconds(machine, num_bytes, t * d)
    parameters = int(12 * layers / p * width * width / t + VOCABULARY * width / t)
    return seconds + update_seconds(machine, parameters, t, d, p)
