"""Kernels, copies, forward passes and steps on one GPU, measured where there is one, and modelled.

    python benchmarks/one_gpu.py measure taken.json           # on a machine with a GPU
    python benchmarks/one_gpu.py model modelled.json h100     # anywhere
    python benchmarks/one_gpu.py compare taken.json modelled.json

What is run is the same on both: a function of a device. Kernels are timed on the device, behind
work that keeps it busy until all of them are issued, so that the host is not in their time. Steps
are timed by the clock of the host.
"""

import contextlib
import csv
import functools
import json
import math
import random
import statistics
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import published
import torch
import torch.nn.functional as F
from published import language, neusight
from report import nine_of_ten
from torch import nn

import d2lpar
from d2lpar.models import resnet18
from d2lpar.torchvision_import import import_torchvision
from vgpu import clock
from vgpu.modelled.hardware import as_machine
from vgpu.modelled.host import as_host

HERE = Path(__file__).parent / "measured"
REPEATS = 20  # of a kernel, for one measurement
ROUNDS = 7
TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
TYPES["float16"] = torch.float16


@contextlib.contextmanager
def tf32(allowed):
    """Let products and convolutions use TF32, or neither."""
    products = torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, allowed
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            yield
    finally:
        products.allow_tf32 = before


def filled(device, *shape, dtype=torch.float32):
    """Return random numbers: products of zeros are faster than others."""
    return torch.randn(*shape, device=device, dtype=dtype)


# -- kernels: (class, name, function of a device that returns what launches it)


def products():
    """Matrices (m, k) by (k, n): square ones, and those of layers of language models."""
    square = [(n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192)]
    layers = [
        (64, 4096, 4096),
        (512, 2048, 1000),
        (2048, 768, 3072),
        (4096, 3072, 768),
        (8192, 1024, 4096),
        (8192, 4096, 1024),
        (8192, 1024, 50_304),
        (16_384, 2560, 7680),
        (1024, 65_536, 1024),
        (768, 8192, 768),
        (3072, 16_384, 768),
        (100, 300, 500),
        (1000, 1000, 1000),
    ]
    for kind in TYPES:
        for m, k, n in square + layers:

            def make(device, m=m, k=k, n=n, kind=kind):
                a = filled(device, m, k, dtype=TYPES[kind])
                b = filled(device, k, n, dtype=TYPES[kind])

                def launch():
                    with tf32(kind == "tf32"):
                        return torch.mm(a, b)

                return launch

            yield "product", f"mm {m}x{k}x{n} {kind}", make
        for batch, m, k, n in (
            (96, 1024, 64, 1024),
            (96, 1024, 1024, 64),
            (512, 128, 64, 128),
            (16, 2048, 128, 2048),
            (1024, 32, 32, 32),
        ):

            def make(device, batch=batch, m=m, k=k, n=n, kind=kind):
                a = filled(device, batch, m, k, dtype=TYPES[kind])
                b = filled(device, batch, k, n, dtype=TYPES[kind])

                def launch():
                    with tf32(kind == "tf32"):
                        return torch.bmm(a, b)

                return launch

            yield "product", f"bmm {batch}x{m}x{k}x{n} {kind}", make


CONVOLUTIONS = (  # images, channels, side, outputs, kernel, stride, groups
    (64, 3, 224, 64, 7, 2, 1),
    (64, 64, 56, 64, 1, 1, 1),
    (64, 64, 56, 64, 3, 1, 1),
    (64, 64, 56, 256, 1, 1, 1),
    (64, 256, 56, 64, 1, 1, 1),
    (64, 128, 56, 128, 3, 2, 1),
    (64, 128, 28, 128, 3, 1, 1),
    (64, 512, 28, 256, 1, 1, 1),
    (64, 256, 14, 256, 3, 1, 1),
    (64, 1024, 14, 2048, 1, 2, 1),
    (64, 512, 7, 512, 3, 1, 1),
    (64, 2048, 7, 512, 1, 1, 1),
    (32, 64, 224, 64, 3, 1, 1),
    (32, 512, 28, 512, 3, 1, 1),
    (128, 3, 32, 64, 3, 1, 1),
    (128, 64, 32, 64, 3, 1, 1),
    (256, 1, 28, 6, 5, 1, 1),
    (64, 32, 112, 32, 3, 1, 32),
    (64, 144, 56, 144, 3, 1, 144),
    (64, 576, 14, 576, 5, 1, 576),
    (64, 128, 56, 128, 3, 1, 32),
    (64, 3, 224, 768, 16, 16, 1),
    (1, 64, 56, 64, 3, 1, 1),
    (1, 512, 7, 512, 3, 1, 1),
)


def convolutions():
    """Layers of ResNet-50, VGG, MobileNet, EfficientNet, ResNeXt, LeNet and a transformer."""
    for case in CONVOLUTIONS:
        images, channels, side, outputs, size, stride, groups = case
        padding = 0 if stride == size else size // 2
        for kind, layout in (
            ("float32", "NCHW"),
            ("tf32", "NCHW"),
            ("float16", "NCHW"),
            ("float16", "NHWC"),
        ):
            for backward in (False, True):

                def make(
                    device,
                    shape=(images, channels, side, side),
                    weight=(outputs, channels // groups, size, size),
                    options=((stride,) * 2, (padding,) * 2, (1, 1)),
                    groups=groups,
                    kind=kind,
                    layout=layout,
                    backward=backward,
                ):
                    memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format
                    X, W = (
                        filled(device, *each, dtype=TYPES[kind]).contiguous(memory_format=memory)
                        for each in (shape, weight)
                    )
                    rest = *options, False, (0, 0), groups
                    forward = functools.partial(torch.ops.aten.convolution, X, W, None, *rest)
                    with tf32(kind != "float32"):
                        Y = forward()
                    mask = (weight[1] * groups > 3, True, False)

                    def launch():
                        with tf32(kind != "float32"):
                            if backward:
                                return torch.ops.aten.convolution_backward(
                                    Y, X, W, None, *rest, mask
                                )
                            return forward()

                    return launch

                way = "backward" if backward else "forward"
                name = "x".join(map(str, case))
                yield "convolution", f"convolution {name} {kind} {layout} {way}", make


def of_tensor(function, *shape, dtype=torch.float32):
    """Return what makes a kernel of one random tensor."""

    def make(device):
        X = filled(device, *shape, dtype=dtype)
        return lambda: function(X)

    return make


def bound_by_memory():
    """Kernels without products, of 4 KB to 1 GB."""
    for kind in (torch.float32, torch.bfloat16):
        short = str(kind).removeprefix("torch.")
        for count in (2**10, 2**16, 2**20, 2**22, 2**24, 2**26):

            def add(device, count=count, kind=kind):
                X, Y = (filled(device, count, dtype=kind) for _ in range(2))
                return lambda: X + Y

            yield f"add {count} {short}", add
            yield f"mul_ {count} {short}", of_tensor(lambda X: X.mul_(1.0), count, dtype=kind)
            yield f"relu {count} {short}", of_tensor(torch.relu, count, dtype=kind)
            yield f"sum {count} {short}", of_tensor(torch.sum, count, dtype=kind)
        for rows, width in ((1024, 1024), (8192, 1024), (16_384, 4096), (65_536, 256)):
            size = f"{rows}x{width} {short}"
            yield f"gelu {size}", of_tensor(F.gelu, rows, width, dtype=kind)
            yield f"softmax {size}", of_tensor(lambda X: X.softmax(1), rows, width, dtype=kind)
            yield (
                f"transposed copy {size}",
                of_tensor(lambda X: X.t().contiguous(), rows, width, dtype=kind),
            )
            yield f"sum of rows {size}", of_tensor(lambda X: X.sum(0), rows, width, dtype=kind)

            def norm(device, rows=rows, width=width, kind=kind, backward=False):
                X, weight = (
                    filled(device, rows, width, dtype=kind),
                    filled(device, width, dtype=kind),
                )
                aten = torch.ops.aten
                out, mean, rstd = aten.native_layer_norm(X, (width,), weight, weight, 1e-5)
                if backward:
                    rest = (mean, rstd, weight, weight, (True, True, True))
                    return lambda: aten.native_layer_norm_backward(out, X, (width,), *rest)
                return lambda: aten.native_layer_norm(X, (width,), weight, weight, 1e-5)

            yield f"layer_norm {size}", norm
            yield (
                f"layer_norm backward {size}",
                lambda device, norm=norm: norm(device, backward=True),
            )
            yield (
                f"dropout {size}",
                of_tensor(lambda X: torch.native_dropout(X, 0.1, True), rows, width, dtype=kind),
            )

    for shape in ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 2048, 7, 7)):
        size = "x".join(map(str, shape))
        for kind in (torch.float32, torch.float16):
            short = str(kind).removeprefix("torch.")

            def batch_norm(device, shape=shape, kind=kind, backward=False):
                X = filled(device, *shape, dtype=kind)
                ones = [torch.ones(shape[1], device=device) for _ in range(4)]
                aten = torch.ops.aten

                def forward():
                    return aten.native_batch_norm(X, *ones, True, 0.1, 1e-5)

                out, mean, invstd = forward()
                if not backward:
                    return forward
                rest = (ones[0], ones[2], ones[3], mean, invstd, True, 1e-5, (True, True, True))
                return lambda: aten.native_batch_norm_backward(out, X, *rest)

            yield f"batch_norm {size} {short}", batch_norm
            yield (
                f"batch_norm backward {size} {short}",
                lambda device, make=batch_norm: make(device, backward=True),
            )
        yield f"max_pool2d {size}", of_tensor(lambda X: F.max_pool2d(X, 3, 2, 1), *shape)
        yield f"avg_pool2d {size}", of_tensor(lambda X: F.adaptive_avg_pool2d(X, 1), *shape)
        yield f"cat {size}", of_tensor(lambda X: torch.cat((X, X), 1), *shape)
    for words, width in ((8192, 1024), (65_536, 768)):

        def embedding(device, words=words, width=width, backward=False):
            index = torch.arange(words).to(device) % 50_257
            table, rows = filled(device, 50_257, width), filled(device, words, width)
            if backward:
                return lambda: torch.ops.aten.embedding_dense_backward(
                    rows, index, 50_257, -1, False
                )
            return lambda: F.embedding(index, table)

        yield f"embedding {words}x{width}", embedding
        yield (
            f"embedding backward {words}x{width}",
            lambda device, make=embedding: make(device, backward=True),
        )
    for rows, classes in ((256, 1000), (8192, 50_304)):
        yield (
            f"log_softmax {rows}x{classes}",
            of_tensor(lambda X: F.log_softmax(X, 1), rows, classes),
        )
    yield "cast float32 to bfloat16 67108864", of_tensor(lambda X: X.bfloat16(), 2**26)
    for count, size in ((160, 150_000), (400, 2000), (16, 10_000_000)):

        def sgd(device, count=count, size=size, optimizer=torch.optim.SGD, **options):
            parameters = [nn.Parameter(filled(device, size)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            trainer = optimizer(parameters, lr=1e-3, **options)
            trainer.step()
            return trainer.step

        yield f"SGD {count}x{size}", lambda device, make=sgd: make(device, momentum=0.9)
        yield (
            f"Adam foreach {count}x{size}",
            lambda device, make=sgd: make(device, optimizer=torch.optim.AdamW),
        )


def attention():
    """`scaled_dot_product_attention`, as torch chooses its kernel, forward and with backward."""
    for kind in (torch.bfloat16, torch.float32):
        for batch, heads, length, width in (
            (8, 12, 1024, 64),
            (8, 16, 2048, 64),
            (2, 32, 4096, 128),
            (64, 12, 197, 64),
            (32, 16, 512, 64),
        ):
            for causal in (False, True):
                for backward in (False, True):

                    def make(
                        device,
                        shape=(batch, heads, length, width),
                        kind=kind,
                        causal=causal,
                        backward=backward,
                    ):
                        q, k, v = (filled(device, *shape, dtype=kind) for _ in range(3))
                        for each in (q, k, v):
                            each.requires_grad_(backward)
                        gradient = filled(device, *shape, dtype=kind)

                        def launch():
                            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                            if backward:
                                torch.autograd.grad(out, (q, k, v), gradient)

                        return launch

                    words = ("causal " if causal else "") + ("and backward" if backward else "")
                    size = f"{batch}x{heads}x{length}x{width} {str(kind).removeprefix('torch.')}"
                    yield "attention", f"attention {size} {words}".strip(), make


def copies():
    """Copies between the memory of the host, pinned or not, and the GPU."""
    for count in (2**10, 2**16, 2**20, 2**24, 2**28):
        for way in ("pinned to GPU", "GPU to pinned", "pageable to GPU"):

            def make(device, count=count, way=way):
                there = torch.empty(count, dtype=torch.uint8, device=device)
                here = torch.empty(count, dtype=torch.uint8)
                if "pinned" in way:
                    here = here.pin_memory()
                a, b = (there, here) if way.startswith("GPU") else (here, there)
                return lambda: b.copy_(a, non_blocking=True)

            yield "copy", f"copy {count} bytes, {way}", make


def drawn_products():
    """Products of matrices whose sizes are drawn by chance; on tensor cores not all are aligned."""
    chance = random.Random("products, 2026-11-26, after the rules")
    for number in range(150):
        kind = chance.choice(("float32", "tf32", "bfloat16"))
        step = chance.choice((8, 8, 1)) if kind != "float32" else 8
        m, n, k = (step * max(8, round(2 ** chance.uniform(6, 13.5) / step)) for _ in range(3))
        batch = chance.choice((1, 1, 8, 32)) if max(m, n, k) <= 2048 else 1
        m = max(64, m // 8) if batch * m * n * k > 7e10 else m

        def make(device, kind=kind, batch=batch, m=m, n=n, k=k):
            a = filled(device, batch, m, k, dtype=TYPES[kind])
            b = filled(device, batch, n, k, dtype=TYPES[kind]).transpose(1, 2)

            def launch():
                with tf32(kind == "tf32"):
                    return torch.bmm(a, b) if batch > 1 else torch.mm(a[0], b[0])

            return launch

        yield "drawn product", f"{number}: bmm {batch}x{m}x{k}x{n} {kind}", make


def drawn_elementwise():
    """Operations on tensors that lie differently or are broadcast, and gradients of softmax."""
    chance = random.Random("elementwise, 2026-11-26, after the rules")
    aten = torch.ops.aten
    cases = {
        "bias": lambda X: X + X[0, 0, 0],
        "scaled rows": lambda X: X * X[..., :1],
        "masked_fill": lambda X: X.masked_fill(X[:1, :1] > 0, -1.0),  # and makes the mask
        "where": lambda X: torch.where(X[:1, :1] > 0, X, -1.0),
        "heads": lambda X: X.transpose(1, 2).contiguous(),
        "transposed": lambda X: X.transpose(2, 3).contiguous(),
        "gradient of softmax": aten._softmax_backward_data,
        "gradient of log_softmax": aten._log_softmax_backward_data,
    }
    for number in range(64):
        name, function = list(cases.items())[number % len(cases)]
        kind = chance.choice((torch.float32, torch.bfloat16))
        width = 2 ** chance.randrange(6, 11) + chance.choice((0, 8))
        is_gradient = name.startswith("gradient")
        if is_gradient:
            width *= chance.choice((1, 8, 32))
        size = chance.randrange(2, 9), chance.randrange(8, 33), chance.randrange(128, 1025), width
        if math.prod(size) > 2**28:
            size = 1, 8, *size[2:]
        words = f"{number}: {name} {'x'.join(map(str, size))} {str(kind).removeprefix('torch.')}"

        def of_gradient(device, function=function, size=size, kind=kind):
            gradient, out = (filled(device, *size, dtype=kind) for _ in range(2))
            return lambda: function(gradient, out, 3, kind)

        make = of_gradient if is_gradient else of_tensor(function, *size, dtype=kind)
        yield "drawn elementwise", words, make


def layers():
    """Linear layers in float32, with their bias and without, which cuBLAS computes differently."""
    for m, k, n in ((1024, 1024, 1024), (1024, 4096, 1024), (1024, 5120, 1280), (4096, 5120, 1280)):
        for name in ("mm", "addmm"):

            def make(device, sizes=(m, k, n), name=name):
                m, k, n = sizes
                x, weight, bias = (filled(device, *size) for size in ((m, k), (n, k), (n,)))
                if name == "mm":
                    return lambda: torch.mm(x, weight.t())
                return lambda: torch.addmm(bias, x, weight.t())

            yield "layer", f"{name} {m}x{k}x{n} float32, weights transposed", make


def kernels():
    """Yield (class, name, function of a device that returns what launches a kernel)."""
    yield from products()
    yield from convolutions()
    yield from (("bytes", *each) for each in bound_by_memory())
    yield from attention()
    yield from copies()
    yield from drawn_products()
    yield from drawn_elementwise()
    yield from layers()


# -- steps


class Block(nn.Module):
    """A block of a GPT whose attention is torch's."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """A GPT that returns the scores of the next words."""

    def __init__(self, width, heads, depth, vocabulary=50_304, length=1024):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.words(tokens) + self.places(places)))).flatten(
            0, 1
        )


class Recurrent(nn.Module):
    """A language model of two layers of LSTM."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(10_000, 650), nn.LSTM(650, 650, 2)
        self.head = nn.Linear(650, 10_000)

    def forward(self, tokens):
        return self.head(self.lstm(self.words(tokens))[0]).flatten(0, 1)


def images(size, pixels=224, channels=3, classes=1000):
    """Return a function of a device that returns images and their labels."""

    def make(device):
        labels = torch.arange(size).to(device) % classes
        return filled(device, size, channels, pixels, pixels), labels

    return make


def words(batch, length, vocabulary):
    """Return a function of a device that returns tokens and those that follow them."""

    def make(device):
        tokens = torch.arange(batch * length).reshape(batch, length).to(device) % vocabulary
        return tokens, tokens.flatten()

    return make


def torchvision_net(name):
    """Return what makes a network of torchvision."""
    return lambda: getattr(import_torchvision().models, name)()


def perceptron():
    layers = [nn.Linear(784, 2048), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(2048, 10))


def encoder():
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
    return nn.Sequential(
        nn.Embedding(30_522, 1024),
        nn.TransformerEncoder(layer, 24, enable_nested_tensor=False),
        nn.Linear(1024, 30_522),
        nn.Flatten(0, 1),
    )


NETWORKS = {  # name: (what makes it, {batch size: what makes its batch})
    "LeNet": (d2lpar.lenet, {n: images(n, 28, 1, 10) for n in (16, 256, 4096)}),
    "perceptron": (perceptron, {n: images(n, 28, 1, 10) for n in (64, 8192)}),
    "ResNet-18 of d2l": (lambda: resnet18(10), {n: images(n, 28, 1, 10) for n in (32, 512)}),
    "GPT of 124 million": (
        lambda: GPT(768, 12, 12),
        {n: words(n, 1024, 50_304) for n in (1, 8)},
    ),
    "GPT of 353 million": (
        lambda: GPT(1024, 16, 24),
        {n: words(n, 1024, 50_304) for n in (1, 8)},
    ),
    "encoder of 24 layers": (encoder, {n: words(n, 256, 30_522) for n in (2, 32)}),
    "LSTM": (Recurrent, {n: words(35, n, 10_000) for n in (20, 512)}),
    **{
        name: (torchvision_net(name), {n: images(n) for n in sizes})
        for name, sizes in (
            ("resnet50", (1, 16, 128)),
            ("resnet18", (8, 256)),
            ("vgg16", (4, 64)),
            ("mobilenet_v2", (8, 128)),
            ("efficientnet_b0", (8, 128)),
            ("densenet121", (8, 64)),
            ("resnext50_32x4d", (8, 64)),
            ("vit_b_16", (4, 64)),
            ("swin_t", (4, 64)),
            ("convnext_tiny", (4, 64)),
        )
    },
}


def steps():
    """Yield (class, name, function of a device that returns a step).

    A step trains with SGD and momentum, in float32 or in mixed precision, or infers.
    """
    for network, (make_net, batches) in NETWORKS.items():
        for size, make_batch in batches.items():
            for way in ("float32", "bfloat16", "inference"):

                def make(device, make_net=make_net, make_batch=make_batch, way=way):
                    with torch.device(device):
                        net = make_net().train(way != "inference")
                    X, y = make_batch(device)
                    mixed = torch.autocast(torch.device(device).type, torch.bfloat16)
                    if way == "inference":

                        @torch.no_grad()
                        def infer():
                            net(X)

                        return infer
                    trainer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

                    def step():
                        trainer.zero_grad()
                        with mixed if way == "bfloat16" else contextlib.nullcontext():
                            loss = F.cross_entropy(net(X), y)
                        loss.backward()
                        trainer.step()

                    return step

                yield "step", f"{network}, batch {size}, {way}", make


# -- forward passes, with CUDA's memory kept and given back before each


def forward_passes():
    """Yield (name, function of a device that returns a forward pass of training).

    Programs of NeuSight's rows, see `published/neusight.py`.
    """
    for network, batch in (("bert_large", 2), ("bert_large", 8), ("gpt2_large", 1)):
        length, make_net = neusight.NETWORKS[network]

        def make(device, make_net=make_net, size=(batch, length)):
            net = language.on(device, lambda: make_net(True)).train()
            for parameter in net.parameters():
                nn.init.normal_(parameter, std=0.02)
            for mask in net.buffers():
                mask.fill_(1)
            tokens = torch.ones(size, dtype=torch.long, device=device)
            return lambda: net(tokens)

        yield f"forward pass of {network}, batch {batch}", make


def pass_seconds(work, emptied):
    """Return the seconds of a forward pass by events, in the median; its memory is given back."""
    found = []
    for _ in range(8):
        if emptied:
            torch.cuda.empty_cache()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        result = work()
        end.record()
        torch.cuda.synchronize()
        del result
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[2:])


# -- measured


def kernel_seconds(launch):
    """Return the seconds between launches that wait in the queue of the GPU, in the median."""
    launch()
    torch.cuda.synchronize()
    start = time.perf_counter()
    launch()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    count = max(3, min(REPEATS, int(0.1 / took)))
    cycles = int(2e9 * min(1.5 * issued * count + 2e-4, 0.05))
    found = []
    for _ in range(ROUNDS if took < 0.02 else 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        for _ in range(count):
            launch()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(found)


def step_seconds(step):
    """Return the seconds of a step by the host's clock, in the median, and their least."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(1, min(10, int(0.05 / (time.perf_counter() - start))))
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found), min(found)


def operators_of(step):
    """Return rows [name, shapes, number, device seconds] of a step's operators, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as trace:
        step()
        torch.cuda.synchronize()
    rows = []
    for event in trace.key_averages(group_by_input_shape=True):
        if event.self_device_time_total and event.key.startswith("aten::"):
            shapes = str(event.input_shapes)
            rows.append([event.key, shapes, event.count, event.self_device_time_total / 1e6])
    return rows


def measure(path, seconds="200", *classes):
    """Measure everything on the GPU at hand, in a chance order, and write it to a JSON file.

    With `classes`, only kernels of these classes, and all passes and steps.
    """
    device = torch.device("cuda", 0)
    found = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    found |= {"kernels": {}, "steps": {}, "passes": {}, "failed": {}}
    ends = time.perf_counter() + float(seconds)

    def try_all(works, of):
        works = list(works)
        random.Random(0).shuffle(works)
        for kind, name, make in works:
            if time.perf_counter() > ends:
                found["failed"][name] = "no time"
                continue
            try:
                of(kind, name, make)
            except Exception as error:
                found["failed"][name] = f"{type(error).__name__}: {error}"[:300]
                torch.cuda.synchronize()

    def of_kernel(kind, name, make):
        with torch.no_grad() if kind != "attention" else contextlib.nullcontext():
            found["kernels"][name] = [kind, kernel_seconds(make(device))]

    def of_step(kind, name, make):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = make(device)
        middle, least = step_seconds(step)
        peak = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found["steps"][name] = [middle, least, *peak, operators_of(step)]

    def of_pass(kind, name, make):
        work = make(device)
        found["passes"][name] = pass_seconds(work, False), pass_seconds(work, True)

    try_all((each for each in kernels() if not classes or each[0] in classes), of_kernel)
    try_all((("forward pass", *each) for each in forward_passes()), of_pass)
    try_all(steps(), of_step)
    Path(path).write_text(json.dumps(found))
    print(f"{len(found['steps'])} steps, {len(found['kernels'])} kernels")
    for name, why in found["failed"].items():
        print(f"failed: {name}: {why}")


# -- modelled


def modelled(make, machine, repeats):
    """Return what `make` returns takes on a modelled GPU, seconds, and the peaks of its memory."""
    (device,) = published.modelled(1, machine)
    torch.vgpu.reset_peak_memory_stats(device)
    work = make(device)
    for _ in range(3):
        work()
    d2lpar.synchronize()
    start = clock()
    for _ in range(repeats):
        work()
    d2lpar.synchronize()
    seconds = (clock() - start) / repeats
    return seconds, torch.vgpu.max_memory_allocated(device), torch.vgpu.max_memory_reserved(device)


def model(path, name, host="", part="0/1"):
    """Write what a modelled GPU predicts for everything, or a part of it, to a JSON file.

    Kernels, and the first number of steps, are those of a host that takes no time; passes, and the
    second number of steps, are those of the host asked for, or of the default.
    """
    warnings.simplefilter("ignore")  # of operators counted by their bytes
    machine = as_machine(name)
    machine = replace(machine, host=as_host(host) if host else machine.host)
    free = replace(machine, host=0.0)
    number, parts = map(int, part.split("/"))
    found = {"kernels": {}, "steps": {}, "passes": {}}
    for name, make in list(forward_passes())[number::parts]:
        found["passes"][name] = modelled(make, machine, 1)[0]
    for kind, name, make in list(kernels())[number::parts] if not host else ():
        with torch.no_grad() if kind != "attention" else contextlib.nullcontext():
            found["kernels"][name] = [kind, modelled(make, free, 4)[0]]
    for _, name, make in list(steps())[number::parts]:
        found["steps"][name] = [modelled(make, free, 1)[0], *modelled(make, machine, 3)]
    Path(path).write_text(json.dumps(found))


# -- compared

COLUMNS = ("set", "class", "name", "unit", "measured", "modelled")
SET_ASIDE = 20_261_125  # the seed by which half of the kernels and networks were set aside


def compare(measured, *parts):
    """Write what was measured and modelled, from JSON files, to `measured/` and print the errors.

    Half of the kernels, and half of the networks, had met the model before it was changed; the
    others were set aside by chance, before anything was measured. Drawn products were drawn when
    all rules for them stood; with half of the drawn elementwise operations one was changed. Layers
    and passes were measured to find out why other rows are off, so they count as seen.
    """
    taken = json.loads(Path(measured).read_text())
    found = [json.loads(Path(part).read_text()) for part in parts]
    predicted = {}
    for part in found:
        predicted |= part["kernels"] | part["steps"] | part["passes"]
    networks = sorted({name.split(",")[0] for name in taken["steps"]})
    seen = set()
    later = "drawn product", "drawn elementwise", "layer"
    listed = [name for name, (kind, _) in taken["kernels"].items() if kind not in later]
    for names in (sorted(listed), networks):
        seen |= set(random.Random(SET_ASIDE).sample(names, len(names) // 2))
    for name, (kind, _) in taken["kernels"].items():
        if kind == "layer" or kind == "drawn elementwise" and int(name.split(":")[0]) // 8 % 2 == 0:
            seen.add(name)
    rows = []
    for name, (kind, seconds) in taken["kernels"].items():
        rows.append((name in seen, kind, name, "s", seconds, predicted[name][1]))
    for name, (wall, _, peak, _, operators) in taken["steps"].items():
        of_kernels, of_step, peak_modelled, _ = predicted[name]
        on_gpu = sum(seconds for *_, seconds in operators)
        for kind, unit, figures in (
            ("kernels of a step", "s", (on_gpu, of_kernels)),
            ("step", "s", (wall, of_step)),
            ("memory of a step", "bytes", (peak, peak_modelled)),
        ):
            rows.append((name.split(",")[0] in seen, kind, name, unit, *figures))
    for name, figures in taken["passes"].items():
        for what, seconds in zip(("kept", "emptied"), figures, strict=True):
            row = f"{name}, cache {what}", "s", seconds, predicted[name]
            rows.append((True, "forward pass", *row))
    rows.sort(key=lambda row: (not row[0], *row[1:3]))
    gpu = taken["device"].split()[1].lower()
    with open(HERE / f"{gpu}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for was_seen, *row, one, other in rows:
            figures = (f"{figure:.4g}" for figure in (one, other))
            writer.writerow(["seen" if was_seen else "unseen", *row, *figures])
    print(f"{taken['device']}, torch {taken['torch']}")
    for was_seen in (True, False):
        for kind in dict.fromkeys(row[1] for row in rows):
            errors = [row[5] / row[4] - 1 for row in rows if row[:2] == (was_seen, kind)]
            if not errors:
                continue
            sizes = sorted(map(abs, errors))
            print(f"{'seen' if was_seen else 'unseen':7}{kind:20}{len(sizes):4}", end="  ")
            print(f"median {statistics.median(sizes):6.1%}, nine of ten within", end=" ")
            print(f"{nine_of_ten(errors):6.1%}, middle {statistics.median(errors):+.1%}")


if __name__ == "__main__":
    {"measure": measure, "model": model, "compare": compare}[sys.argv[1]](*sys.argv[2:])
