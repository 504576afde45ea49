"""Rows that were collected after the model had met those of `language.py` and `vision.py`.

Programs take a `Machine` and a number of GPUs. What a source leaves open stands beside its rows.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vgpu import equal_ranks
from vgpu.modelled.datasheets import MIB
from vgpu.modelled.hardware import MACHINES, Machine
from vgpu.modelled.modelled_gpu import GPU

from . import Row, seconds_of
from .language import GPT2Block
from .vision import (
    DGX1_16GB,
    P3DN,
    PCIE3,
    alone,
    autocast,
    batch,
    infers,
    modelled,
    nesterov,
    put,
    sgd,
    torchvision_net,
    trains,
)

GTX_1080 = GPU(
    "GeForce GTX 1080",
    8_114 * MIB,
    320e9,
    {"float32": 8.9e12, "float64": 8.9e12 / 32},
    20,
    PCIE3,
    source="NVIDIA GeForce GTX 1080 whitepaper: 2560 cores at 1.733 GHz",
)
TITAN_X = GPU(
    "GeForce GTX TITAN X",
    12_204 * MIB,
    336.5e9,
    {"float32": 6.6e12, "float64": 6.6e12 / 32},
    24,
    PCIE3,
    source="NVIDIA GeForce GTX TITAN X product page: 3072 cores at 1.075 GHz",
)
QUADRO_GP100 = GPU(
    "Quadro GP100",
    16_278 * MIB,
    717e9,
    {"float32": 10.3e12, "float64": 5.2e12},
    56,
    PCIE3,
    source="NVIDIA Quadro GP100 data sheet",
)


def without_values(name):
    """Return a function that makes a network of torchvision whose widths are computed by torch."""

    def make():
        with torch.device("cpu"):
            net = torchvision_net(name)()
        return net.to("meta")

    return make


def pycls_step(make_net, size):
    """Return the program of a training step of pycls: errors are summed over GPUs and read."""

    def program(machine, k):
        (device,) = modelled(1, machine)
        net = put(make_net, device)
        trainer = nesterov(net.parameters())
        images, labels = (tensor.pin_memory() for tensor in batch(size, "cpu"))
        with equal_ranks(k):
            net = DistributedDataParallel(net)

            def step():
                X, y = (each.to(device, non_blocking=True) for each in (images, labels))
                output = net(X)
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


def pycls():
    """Networks in float32 on Big Basin with 8 V100s, PyTorch 1.6: inference and training.

    Hours are those of 100 epochs of ImageNet with batches of the size named. The networks are
    torchvision's, whose layers are the same; pycls computes its Swish in parts.
    """
    source = "github.com/facebookresearch/pycls, MODEL_ZOO.md"
    for name, size, milliseconds, hours in (
        ("resnet50", 256, 53, 12.2),
        ("resnet101", 256, 90, 20.4),
        ("resnext50_32x4d", 256, 78, 18.0),
        ("regnet_x_400mf", 1024, 15, 3.9),
        ("regnet_x_3_2gf", 512, 57, 14.3),
        ("regnet_y_8gf", 512, 113, 28.1),
        ("efficientnet_b0", 256, 34, 11.7),
    ):
        make_net = without_values(name)
        yield Row(
            f"pycls, {name}",
            "one GPU",
            alone("v100"),
            1,
            milliseconds * 1e-3,
            infers(make_net, 64),
            f"{source}: {name}, inference of 64 images",
        )
        yield Row(
            f"pycls, {name}",
            "data parallel, one machine",
            DGX1_16GB,
            8,
            hours * 36 / (1_281_167 // size),
            pycls_step(make_net, size // 8),
            f"{source}: {name}, training on 8 GPUs",
        )


def swin():
    """Inference of 64 images in float32 on a V100 (get_started.md, Throughput)."""
    source = "github.com/microsoft/Swin-Transformer, README.md, FPS"
    for name, rate in (("swin_t", 755), ("swin_s", 437), ("swin_b", 278)):
        yield Row(
            f"Swin, {name}",
            "one GPU",
            alone("v100"),
            1,
            64 / rate,
            infers(torchvision_net(name), 64),
            f"{source}: {name}",
        )


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


def language_step(vocabulary, size, length=70):
    """Return the program of a training step of `AwdLstm`."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(lambda: AwdLstm(vocabulary), device)
        trainer = torch.optim.SGD(net.parameters(), 30, weight_decay=1.2e-6, foreach=False)
        tokens = torch.zeros(length, size, dtype=torch.long, device=device)
        kept = [[(torch.empty(1, size, n, device=device),) * 2 for n in (1150, 1150, 400)]]

        def step():
            trainer.zero_grad(set_to_none=False)
            loss, kept[0] = net(tokens, tokens, kept[0])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25, foreach=False)
            trainer.step()

        return seconds_of(step)

    return program


def awd_lstm():
    """Epochs of a language model of three cuDNN LSTMs on a Quadro GP100, PyTorch 0.2.

    An epoch counts as its tokens in parts of 70, the validation that ends it is left out.
    """
    source = "github.com/salesforce/awd-lstm-lm, README.md, Speed"
    for name, tokens, vocabulary, size, seconds in (
        ("Penn Treebank", 929_589, 10_000, 20, 65),
        ("Penn Treebank", 929_589, 10_000, 40, 45),
        ("WikiText-2", 2_088_628, 33_278, 80, 105),
    ):
        yield Row(
            f"AWD-LSTM, {name}",
            "one GPU",
            alone(QUADRO_GP100),
            1,
            seconds / (tokens / size / 70),
            language_step(vocabulary, size),
            f"{source}: {name}, batch size {size}",
        )


def passes(make_net):
    """Return the program of a forward and a backward pass of 16 images, without an optimizer."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(make_net, device)
        X, _ = batch(16, device)
        X.requires_grad_()

        def step():
            net.zero_grad(set_to_none=False)
            output = net(X)
            output.backward(output.detach())

        return seconds_of(step)

    return program


def jcjohnson():
    """Forward and backward passes of 16 images in Torch, the older one in Lua, with cuDNN 5."""
    source = "github.com/jcjohnson/cnn-benchmarks, README.md"
    for gpu, name, milliseconds in (
        (GTX_1080, "vgg16", 232.55),
        (TITAN_X, "vgg16", 262.42),
        (GTX_1080, "resnet18", 47.07),
        (GTX_1080, "resnet50", 153.90),
        (TITAN_X, "resnet50", 171.02),
    ):
        yield Row(
            f"jcjohnson, {name}",
            "one GPU",
            alone(gpu),
            1,
            milliseconds * 1e-3,
            passes(torchvision_net(name)),
            f"{source}: {name}, {gpu.name}, cuDNN 5005, total",
        )


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


def gpt2_step(tf32=False, amp=None):
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


def karpathy():
    """GPT-2 on an A100 with 80 GB in eager mode: marks of the video "Let's reproduce GPT-2".

    They are the names of its chapters: "1000ms", "TF32 precision, 333ms", "bfloat16, 300ms". The
    sizes are those of the video: 16 sequences of 1024 tokens.
    """
    source = "classcentral.com/course/youtube-let-s-reproduce-gpt-2-124m-295231, syllabus: "
    for milliseconds, name, options in (
        (1000, "float32", {}),
        (333, "TF32", {"tf32": True}),
        (300, "bfloat16", {"tf32": True, "amp": torch.bfloat16}),
    ):
        yield Row(
            "Karpathy, GPT-2",
            "one GPU",
            alone("a100"),
            1,
            milliseconds * 1e-3,
            gpt2_step(**options),
            source + name,
        )


def issues():
    """A step on 8 P100s, and one of TSN (96 images a GPU) on 8 V100s with 32 GB.

    How the P100s are joined is not named: SXM2 is assumed. The step of TSN reads its videos.
    """
    yield Row(
        "pytorch#4870, ResNet-50",
        "data parallel, one machine",
        MACHINES["bigbasin"],
        8,
        0.162,
        trains(torchvision_net("resnet50"), 32, sgd),
        "github.com/pytorch/pytorch/pull/4870: 8 P100s, 32 images a GPU",
    )
    yield Row(
        "mmaction2, TSN",
        "data parallel, one machine",
        Machine(P3DN.gpu, gpus=8),
        8,
        0.29,
        trains(torchvision_net("resnet50", num_classes=400), 96, sgd),
        "github.com/open-mmlab/mmaction2, docs/benchmark.md: tsn_r50_1x1x3_100e_kinetics400_rgb",
    )


ROWS = [row for rows in (pycls, swin, awd_lstm, jcjohnson, karpathy, issues) for row in rows()]
