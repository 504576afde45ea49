"""Predict the cost of a step of GPT in any layout from programs on one modelled GPU.

The programs are those of a rank of Megatron (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053): a layer, the head, a message between stages, and the allreduce of
gradients with the optimizer's step. Each runs once; the formula of the schedule 1F1B (Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473) weights them. `benchmarks/bench_layouts.py` compares the
predictions with 1,549 measured steps.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from d2lpar.chapters.planning_a_training_run.layouts import (
    UNLIMITED,
    Planned,
    candidates,
    refusal_of_memory,
    timed,
    why_not,
)
from d2lpar.devices import virtual_gpus
from d2lpar.plotting.progress import progress as shown
from vgpu import as_machine, equal_ranks

# A layer of Megatron-DeepSpeed takes more host time than other eager programs.
MEGATRON_HOST = as_machine("a100").host.scaled(
    1.6, "1.6 times eager, fitted to rows of GPT on 2 A100s"
)
# Measured over modelled seconds of an unsplit head (t = 1), fitted to the same rows. The excess
# grows with width and tokens; the cause is unknown.
WHOLE_HEAD = 1.45


@dataclass(frozen=True)
class GPT:
    """The sizes of a GPT.

    Attributes:
        layers, width, heads: of the transformer.
        length: tokens per sequence.
        vocabulary: size of the padded vocabulary, in tokens.
    """

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51_200

    @property
    def parameters(self):
        """The number of parameters (Narayanan et al. 2021, equation 2)."""
        h = self.width
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.length) * h

    def flops(self, batch):
        """Return the FLOPs of a step of `batch` sequences: forward, and twice as many backward.

        Source: Narayanan et al. 2021, equation 3, without recomputation.
        """
        s, h, tokens = self.length, self.width, batch * self.length
        return tokens * (
            72 * self.layers * h * h + 12 * self.layers * s * h + 6 * h * self.vocabulary
        )


# Narayanan et al. 2021, table 1: billions of parameters; layers, width, heads
SIZES = {
    1.7: GPT(24, 2304, 24),
    3.6: GPT(30, 3072, 32),
    7.5: GPT(36, 4096, 32),
    18.4: GPT(40, 6144, 48),
    39.1: GPT(48, 8192, 64),
    76.1: GPT(60, 10240, 80),
    145.6: GPT(80, 12288, 96),
    310.1: GPT(96, 16384, 128),
    529.6: GPT(105, 20480, 128),
    1008.0: GPT(128, 25600, 160),
}


class Split(torch.autograd.Function):
    """Megatron's f: identity in forward, allreduce of the gradient in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.group.size() > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """Megatron's g: allreduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        if group.size() > 1:
            dist.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowLinear(nn.Linear):
    """1/t of a linear layer split by inputs: outputs are summed, and the caller adds the bias."""

    def __init__(self, width, out, t, group):
        super().__init__(width, out)
        self.t, self.group = t, group

    def forward(self, x):
        x = functional.linear(x, self.weight)
        return Sum.apply(x, self.group) if self.t > 1 else x


class Layer(nn.Module):
    """1/t of a layer of Megatron's GPT; what TorchScript fuses there is one operator here."""

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
    """1/t of the output embedding, and Megatron's cross-entropy over the parts."""

    def __init__(self, width, vocabulary, t, group):
        super().__init__()
        self.norm, self.t, self.group = nn.LayerNorm(width), t, group
        self.weight = nn.Parameter(torch.empty(vocabulary // t, width))

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


class Cost(NamedTuple):
    """The cost of a program on one GPU.

    Attributes:
        seconds: modelled seconds.
        busy: modelled seconds in which kernels run.
        kept: bytes that remain allocated: of a layer until backward, of an optimizer for good.
        peak: peak of further bytes while it runs.
    """

    seconds: float
    busy: float = 0.0
    kept: int = 0
    peak: int = 0


def _device(machine):
    (device,) = virtual_gpus(1, model=machine, memory=UNLIMITED, values=False)
    return device


def _cost(device, work):
    """Return the `Cost` of `work()`, with `kept` 0."""
    accel = torch.get_device_module(device)
    accel.synchronize(device)
    before = accel.memory_allocated(device)
    accel.reset_peak_memory_stats(device)
    (seconds, busy), _ = timed(work)
    return Cost(seconds, busy[0], 0, accel.max_memory_allocated(device) - before)


def _group(count, stride=1):
    """Return a process group of `count` ranks from 0 on, or None for a single rank."""
    return dist.new_group(range(0, count * stride, stride)) if count > 1 else None


@functools.cache
def layer_cost(machine, width, heads, length, micro, t, recompute=True):
    """Return the `Cost` of a layer on one of t ranks: forward, recomputation, backward.

    It is a quarter of the difference between six layers and two. A layer keeps what torch saves
    for backward, or, if recomputed, its input only.
    """
    device = _device(machine)
    accel = torch.get_device_module(device)
    with equal_ranks(t):
        group = _group(t)
        with torch.device("meta"):  # allocates no values on the CPU
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

        run(2)  # allocates the gradients
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
        head(x, targets).backward()  # allocates the gradients
        return _cost(device, lambda: head(x, targets).backward())


@functools.cache
def update_cost(machine, parameters, t, d, p, zero=0):
    """Return the `Cost` of the allreduce of gradients over d ranks and of Adam.

    It keeps per parameter 2 bytes each of weight and gradient, and 4 each of a float32 copy of both
    and of Adam's two moments. With ZeRO stage 1 a rank keeps these 16 bytes for 1/d of the
    parameters only: a reduce-scatter sums the gradients of its part, and an allgather returns the
    updated weights.
    """
    device = _device(machine)
    accel = torch.get_device_module(device)
    before = accel.memory_allocated(device)
    with equal_ranks(t * d * p):
        group = _group(d, t)
        parts = d if zero else 1
        part = -(-parameters // parts)  # the last one is padded
        weights, gradients = torch.empty(2, parts * part, device=device, dtype=torch.half)
        my_weights, my_gradients = weights[:part], gradients[:part]  # of rank 0
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

        step()  # allocates Adam's moments
        return _cost(device, step)._replace(kept=accel.memory_allocated(device) - before)


@functools.cache
def message_seconds(machine, num_bytes, t, d):
    """Return the seconds of a message of activations to the next stage, t d ranks away.

    Each of t ranks sends 1/t, and the receivers gather them (Narayanan et al. 2021, section 4.1).
    All ranks of a machine send at the same time and share its network cards.
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


def step_of(gpt, layout, batch, machine):
    """Return the modelled cost of a step with a layout, a `Planned`.

    Memory is that of the first stage, with the activations of p micro-batches, or of the last one,
    with those of one micro-batch and the logits, whichever is larger.

    Args:
        gpt: a `GPT`.
        layout: a suitable `Layout`, for which `why_not` returns None.
        batch: sequences per step.
        machine: a `Machine`.
    """
    t, p, d, micro = layout.tensor, layout.pipeline, layout.data, layout.micro_batch
    m, stage = layout.micro_batches(batch), gpt.layers / p
    size = gpt.width, gpt.heads, gpt.length, micro, t
    layer = layer_cost(machine, *size, layout.recompute)
    head = head_cost(machine, gpt.width, gpt.vocabulary, gpt.length, micro, t)
    parameters = int(12 * stage * gpt.width**2 / t + gpt.vocabulary * gpt.width / t)
    update = update_cost(machine, parameters, t, d, p, layout.zero)
    passes = m + p - 1
    # Only the last stage has the head, so filling and draining the pipeline do not include it.
    seconds = passes * stage * layer.seconds + m * head.seconds * (WHOLE_HEAD if t == 1 else 1)
    seconds += update.seconds
    if p > 1:  # activations forward, gradients back
        num_bytes = gpt.length * micro * gpt.width * 2
        seconds += 2 * passes * message_seconds(machine, num_bytes, t, d)
    busy = m * (stage * layer.busy + head.busy / p) + update.busy
    first = min(p, m) * stage * layer.kept + layer.peak
    last = stage * layer.kept + max(layer.peak, head.peak)
    num_bytes = int(update.kept + max(first, last, update.peak))
    mfu = gpt.flops(batch) / (seconds * layout.gpus * machine.gpu.peaks["float16"])
    refused = refusal_of_memory(num_bytes, machine.gpu)
    return Planned(layout, seconds, num_bytes, 1 - busy / seconds, mfu, refused)


def plan(gpt, gpus, batch, model="dgxa100", progress=True, zero=0):
    """Return a list with a `Planned` for every layout of a GPT, refused ones included.

    Args:
        gpt: a `GPT`.
        gpus: the number of GPUs.
        batch: sequences per step.
        model: a machine, see `d2lpar.virtual_gpus`; its host is replaced by that of Megatron.
        progress: whether to show a progress bar, if tqdm is installed.
        zero: the stage of ZeRO, 0 or 1.

    Raises:
        ValueError: the machine or the stage is unknown, or several machines have no network.
    """
    machine = replace(as_machine(model), host=MEGATRON_HOST)
    if machine.gpus is not None and gpus > machine.gpus and machine.network is None:
        raise ValueError(f"gpus must be at most {machine.gpus} without a network: got {gpus}")
    every = candidates(gpus, zero=(zero,))
    rows = []
    for layout in shown(every, "layouts") if progress else every:
        reason = why_not(
            layout,
            batch=batch,
            layers=gpt.layers,
            heads=gpt.heads,
            gpus_per_machine=machine.gpus,
        )
        if reason:
            rows.append(Planned(layout, None, refused=reason))
        else:
            rows.append(step_of(gpt, layout, batch, machine))
    return rows
