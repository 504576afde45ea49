"""Transformers in float32 on one GPU of six kinds, measured by the authors of NeuSight.

Lee, Phanishayee and Mahajan, Forecasting GPU Performance for Deep Learning Training and Inference,
ASPLOS 2025; github.com/sitar-lab/NeuSight, scripts/asplos/label, MIT licence. Networks are those of
Hugging Face with eager attention, PyTorch 2.1, without TF32; times are those of CUDA's events, of
the passes only.

Half of the kernels that the same authors measured (scripts/asplos/data/dataset), drawn by chance,
taught the model Winograd's two ways, the widths in TILES, TILE_STEPS, READS_OF_LONG_ROWS and the
figures of P100 and T4. Of the networks, `unseen.txt` names those that were drawn by chance and set
aside; with the others only the figure of the T4 was changed. Training of BERT-large and of GPT-2
large was run on an H200 (`measured/h200.csv`) to find out why these rows were off: alignment, split
sums and gradients of softmax followed from its kernels. Left out before any was predicted:
GPUs that are not modelled (P4, L4, AMD's), a mixture of experts, whose values decide its shapes,
compiled programs, and four GPUs with Megatron-LM.

`measured/neusight/networks.csv` has the milliseconds that were measured, those that the authors
predict, and those that they give for Habitat, for a linear model of each kernel (micro) and for a
roofline.
"""

import csv
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, relu

import d2lpar
from vgpu import Machine, clock

from . import Row, modelled
from .hardware import GPUS
from .language import BERTS, GPT2, Bert, on, text

GPUS_MEASURED = [
    GPUS[name]
    for name in (
        "P100 PCIe",
        "V100 PCIe 32 GB",
        "t4",
        "A100 PCIe 40 GB, 250 W",
        "A100 PCIe 80 GB",
        "h100",
    )
]
MEASURED = Path(__file__).parents[1] / "measured" / "neusight" / "networks.csv"


class OPTLayer(nn.Module):
    """A layer of OPT; its mask is added, and what is less than float32's least is raised to it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask, least):  # (N, T, C)
        h = self.first(x)
        scale = (h.shape[2] // self.heads) ** -0.5
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2).contiguous().flatten(0, 1)
            for part in (self.query(h) * scale, self.key(h), self.value(h))
        )
        scores = torch.bmm(q, k.transpose(1, 2)).unflatten(0, (len(x), -1))
        scores = torch.max(scores + mask, least).flatten(0, 1)
        attended = torch.bmm(scores.softmax(2), v).unflatten(0, (len(x), -1))
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(relu(self.up(self.second(x)))))


class OPT(nn.Module):
    """OPT of 1.3 billion parameters, which returns its scores."""

    def __init__(self, width=2048, heads=32, depth=24, vocabulary=50_272):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(2050, width)
        self.layers = nn.ModuleList(OPTLayer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):  # (N, T)
        x = self.words(tokens) + self.positions(torch.zeros_like(tokens))
        mask = torch.zeros(1, 1, x.shape[1], x.shape[1], device=x.device)
        least = torch.zeros((), device=x.device)
        for layer in self.layers:
            x = layer(x, mask, least)
        return linear(self.norm(x), self.words.weight)


NETWORKS = {  # the length of its sequences, and a function that makes it for training or not
    "bert_large": (512, lambda train: Bert(*BERTS["large"], "words" if train else "span", 30_522)),
    "gpt2_large": (1024, lambda train: GPT2(1280, 20, 36)),
    "gpt3_xl": (2048, lambda train: GPT2(3072, 24, 24, length=2048)),
    "gpt3_27": (2048, lambda train: GPT2(2560, 32, 32, length=2048)),
    "opt_13": (2048, lambda train: OPT()),
}


def passes(name, batch, train):
    """Return the program of a forward pass, or of it and the backward pass of a loss.

    Each begins on an idle GPU; between them the loss is computed, which was not timed.
    """
    length, make_net = NETWORKS[name]

    def seconds(work):
        d2lpar.synchronize()
        start = clock()
        result = work()
        d2lpar.synchronize()
        return result, clock() - start

    def program(machine, gpus):
        (device,) = modelled(1, machine)
        net = on(device, lambda: make_net(train)).train(train)
        tokens, _ = text(batch, length, device)

        def step():
            with torch.set_grad_enabled(train):
                scores, forward = seconds(lambda: net(tokens))
                if not train:
                    return forward
                loss = cross_entropy(scores.flatten(0, 1), tokens.flatten())
                del scores
                return forward + seconds(loss.backward)[1]

        step()
        return step()

    return program


def neusight():
    """Rows of five transformers: inference, and training without its optimizer."""
    gpus = {gpu.name: Machine(gpu, gpus=1) for gpu in GPUS_MEASURED}
    with open(MEASURED, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, batch, train = row["network"], int(row["batch"]), row["way"] == "training"
            yield Row(
                f"NeuSight, {name}, {row['way']}",
                "one GPU",
                gpus[row["GPU"]],
                1,
                float(row["measured"]) / 1e3,
                passes(name, batch, train),
                "github.com/sitar-lab/NeuSight, scripts/asplos/label, "
                f"{name}-{'train' if train else 'inf'}-{NETWORKS[name][0]}-{batch}.json",
            )


ROWS = list(neusight())
