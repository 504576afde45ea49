"""Programs of the rows of `later.toml`, collected after those of language and vision were met.

They take a `Machine` and a number of GPUs; `vision.py` has others.
"""

import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vgpu import equal_ranks

from . import read, seconds_of, vision
from .language import GPT2Block
from .vision import OPTIMIZERS, autocast, images, modelled, net_of, put


def pycls_step(net, batch):
    """Return the program of a training step of pycls: errors are summed over GPUs and read."""

    def program(machine, k):
        (device,) = modelled(1, machine)
        placed = put(net_of(net), device)
        trainer = OPTIMIZERS["nesterov"](placed.parameters(), foreach=False)
        pinned = [tensor.pin_memory() for tensor in images(batch, "cpu")]
        with equal_ranks(k):
            placed = DistributedDataParallel(placed)

            def step():
                X, y = (each.to(device, non_blocking=True) for each in pinned)
                output = placed(X)
                loss = F.cross_entropy(output, y)
                trainer.zero_grad(set_to_none=False)
                loss.backward()
                trainer.step()
                correct = output.topk(5, 1)[1].t().eq(y.view(1, -1))
                figures = [correct[:n].reshape(-1).float().sum() for n in (1, 5)]
                figures.append(loss.detach())
                waiting = [dist.all_reduce(figure, async_op=True) for figure in figures]
                for work in waiting:
                    work.wait()
                for figure in figures:
                    figure.mul_(1 / k).item()

            step()  # after which DDP builds its buckets anew
            return seconds_of(step)

    return program


class AwdLstm(nn.Module):
    """Three LSTMs whose recurrent weights, inputs and outputs are dropped out in part."""

    def __init__(self, vocabulary, width=400, hidden=1150):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        sizes = (width, hidden, hidden, width)
        self.layers = nn.ModuleList(nn.LSTM(sizes[i], sizes[i + 1]) for i in range(3))
        self.recurrent = nn.ParameterList()
        for lstm in self.layers:
            self.recurrent.append(lstm.weight_hh_l0)
            del lstm._parameters["weight_hh_l0"]
        self.bias = nn.Parameter(torch.empty(vocabulary))

    def dropped(self, x, rate):
        """Drop out units for all steps at once, (T, N, H)."""
        mask = x.new_empty(1, *x.shape[1:]).bernoulli_(1 - rate)
        return x * mask.div_(1 - rate)

    def forward(self, tokens, labels, states):  # (T, N) each
        weight = self.words.weight
        mask = weight.new_empty(weight.shape[0], 1).bernoulli_(0.9).expand_as(weight) / 0.9
        x = self.dropped(F.embedding(tokens, weight * mask), 0.65)
        ends = []
        for i, lstm in enumerate(self.layers):
            lstm.weight_hh_l0 = F.dropout(self.recurrent[i], 0.5)
            x, state = lstm(x, states[i])
            ends.append(tuple(each.detach() for each in state))
            raw, x = x, self.dropped(x, 0.4 if i == 2 else 0.25)
        loss = F.cross_entropy(F.linear(x.flatten(0, 1), weight, self.bias), labels.flatten())
        loss = loss + (2 * x.pow(2).mean()) + (raw[1:] - raw[:-1]).pow(2).mean()
        return loss, ends


def language_step(vocabulary, batch):
    """Return the program of a training step of `AwdLstm`, 70 words of each text."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(lambda: AwdLstm(vocabulary), device)
        trainer = torch.optim.SGD(net.parameters(), 30, weight_decay=1.2e-6, foreach=False)
        words = torch.zeros(70, batch, dtype=torch.long, device=device)
        kept = [[(torch.empty(1, batch, n, device=device),) * 2 for n in (1150, 1150, 400)]]

        def step():
            trainer.zero_grad(set_to_none=False)
            loss, kept[0] = net(words, words, kept[0])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25, foreach=False)
            trainer.step()

        return seconds_of(step)

    return program


class PlainBlock(GPT2Block):
    """One with an activation that is one kernel and a mask of numbers, without dropout."""

    def __init__(self, width, heads, length):
        super().__init__(width, heads, length)
        self.gelu = nn.GELU(approximate="tanh")
        self.register_buffer("visible", torch.empty(1, 1, length, length))

    def forward(self, x):  # (N, T, C)
        length = x.shape[1]
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).split(x.shape[2], 2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.visible[:, :, :length, :length] == 0, float("-inf"))
        attended = (F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(self.gelu(self.up(self.second(x))))


class PlainGPT2(nn.Module):
    """GPT-2 of 124 million parameters, which returns its loss."""

    def __init__(self, width=768, vocabulary=50_257, length=1024):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width, 12, length) for _ in range(12))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, labels):  # (N, T) each
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def gpt2_step(tf32, amp):
    """Return the program of a training step of GPT-2, 16 sequences of 1024 tokens."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(PlainGPT2, device)
        trainer = torch.optim.AdamW(net.parameters(), lr=3e-4)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            X, y = torch.zeros(2, 16, 1024, dtype=torch.long, device=device)

            def step():
                trainer.zero_grad()
                with autocast(amp):
                    loss = net(X, y)
                loss.backward()
                trainer.step()

            return seconds_of(step)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return program


PROGRAMS = vision.PROGRAMS | {
    "gpt2_step": gpt2_step,
    "language_step": language_step,
    "pycls_step": pycls_step,
}
UNITS = {
    "hours": lambda value, gpus, given: value * 36 / (1_281_167 // (gpus * given["batch"])),
    "s an epoch": lambda value, gpus, given: value / (given["tokens"] / given["batch"] / 70),
}
ROWS = list(read(Path(__file__).with_suffix(".toml"), PROGRAMS, UNITS))
