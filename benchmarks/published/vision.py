"""Programs of vision and of small networks: one GPU, data parallel, pipelines.

`vision.toml` has the rows. Programs take a `Machine` and a number of GPUs. Those of PyTorch before
2.0 update one parameter after the other and zero gradients in place, as it did by default.
"""

import contextlib
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import d2lpar
from d2lpar.side_streams import receive, send
from d2lpar.torchvision_import import import_torchvision
from vgpu import clock, equal_ranks

from . import modelled, read, seconds_of

# All published runs fitted into memory. Where the model needs more, it gives a time all the same.
modelled = functools.partial(modelled, room=4)


# -- networks, batches, optimizers


def torchvision_net(name, **options):
    """Return a function that makes a network of torchvision."""
    return lambda: getattr(import_torchvision().models, name)(**options)


def resnext101_32x4d():
    """Return ResNeXt-101 with 32 groups of width 4, which torchvision has no name for."""
    resnet = import_torchvision().models.resnet
    return resnet.ResNet(resnet.Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)


def without_values(name):
    """Return a function that makes a network of torchvision whose widths are computed by torch."""

    def make():
        with torch.device("cpu"):
            net = torchvision_net(name)()
        return net.to("meta")

    return make


NETS = {
    "resnext101_32x4d": resnext101_32x4d,
    "resnet50 of 400 classes": torchvision_net("resnet50", num_classes=400),
    **{name: without_values(name) for name in ("regnet_x_400mf", "regnet_x_3_2gf", "regnet_y_8gf")},
}


def net_of(name):
    """Return a function that makes the network of a row: one of NETS, or one of torchvision."""
    return NETS.get(name) or torchvision_net(name)


def put(make_net, device, channels_last=False, half=False):
    """Return a network on a device; its parameters are made there, and nowhere else."""
    with torch.device("meta"):
        net = make_net()
    if half:
        net.half()
    net.to_empty(device=device)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def images(size, device, channels_last=False, half=False, pixels=224):
    """Return `size` images and their labels, (N, 3, H, W) and (N,)."""
    dtype = torch.half if half else torch.float32
    X = torch.empty(size, 3, pixels, pixels, dtype=dtype, device=device)
    X = X.contiguous(memory_format=torch.channels_last) if channels_last else X
    return X, torch.zeros(size, dtype=torch.long, device=device)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {  # functions of parameters and `foreach`
    "sgd": functools.partial(SGD, weight_decay=1e-4),
    "sgd with momentum": SGD,
    "nesterov": functools.partial(SGD, nesterov=True),  # what timm calls sgd
    "plain sgd": functools.partial(torch.optim.SGD, lr=0.01),
    "rmsprop": functools.partial(
        torch.optim.RMSprop, lr=0.08, alpha=0.9, eps=0.01, weight_decay=1e-5, momentum=0.9
    ),
    "adam": torch.optim.Adam,
}
LOSSES = {  # functions of outputs and labels; None for gradients that are the outputs
    "cross-entropy": F.cross_entropy,
    "soft labels": lambda output, y: F.cross_entropy(output, torch.zeros_like(output)),
    "sum": lambda output, y: output.sum(),
    "outputs": None,
}


# -- programs


def autocast(amp):
    """Return the context of mixed precision, where `amp` names a dtype, or none."""
    return torch.autocast("vgpu", getattr(torch, amp)) if amp else contextlib.nullcontext()


def training_step(net, X, y, trainer, amp, scaled, modern, loss):
    """Return a step of training; in float16 it scales the loss if `scaled`."""
    scaler = torch.amp.GradScaler("vgpu", enabled=scaled and amp == "float16")

    def step():
        trainer.zero_grad(set_to_none=modern)
        with autocast(amp):
            loss_value = loss(net(X), y)
        scaler.scale(loss_value).backward()
        scaler.step(trainer)
        scaler.update()

    return step


def trains(
    net,
    batch,
    optimizer,
    amp="",
    channels_last=False,
    data_parallel=False,
    distributed=False,
    memory=False,
    scaled=True,
    modern=False,
    loss="cross-entropy",
):
    """Return the program of a training step, with DDP where there are several GPUs.

    Args:
        net: the name of a network, see `net_of`.
        batch: the images of one GPU.
        optimizer: one of OPTIMIZERS.
        amp: a dtype for autocast; "" for float32.
        channels_last: whether network and images are in that layout.
        data_parallel: whether nn.DataParallel takes the place of DDP.
        distributed: whether one GPU has DDP, too.
        memory: True for a program that returns the peak of allocated bytes instead of seconds.
        scaled: whether the loss is scaled in float16.
        modern: whether the optimizer updates all parameters at a time, and drops gradients.
        loss: one of LOSSES.
    """

    def program(machine, k):
        devices = modelled(k if data_parallel else 1, machine)
        placed = put(net_of(net), devices[0], channels_last)
        trainer = OPTIMIZERS[optimizer](placed.parameters(), foreach=modern)
        X, y = images(batch * len(devices), devices[0], channels_last)
        in_ddp = not data_parallel and (distributed or k > 1)
        with equal_ranks(k) if in_ddp else contextlib.nullcontext():
            if data_parallel:
                placed = DataParallel(placed, device_ids=devices)
            elif in_ddp:
                placed = DistributedDataParallel(placed)
            step = training_step(placed, X, y, trainer, amp, scaled, modern, LOSSES[loss])
            if not data_parallel:
                step()  # after which DDP builds its buckets anew
            seconds = seconds_of(step)
        return torch.vgpu.max_memory_allocated(devices[0]) if memory else seconds

    return program


def infers(net, batch, amp="", channels_last=False, validated=False):
    """Return the program of a forward pass whose input is on the GPU.

    With `validated` also the loss, two accuracies and their items.
    """

    def program(machine, k):
        (device,) = modelled(k, machine)
        placed = put(net_of(net), device, channels_last).eval()
        X, y = images(batch, device, channels_last)

        @torch.no_grad()
        def step():
            with autocast(amp):
                output = placed(X)
                loss = F.cross_entropy(output, y) if validated else None
            if validated:
                correct = output.topk(5, 1, True, True)[1].t().eq(y.view(1, -1))
                for figure in (*(correct[:n].float().sum().mul_(100.0) for n in (1, 5)), loss):
                    figure.item()

        return seconds_of(step)

    return program


def passes(net, batch, loss, half=False, training=True, copied=False):
    """Return the program of a forward pass, and a backward pass in training; no optimizer.

    Args:
        net: the name of a network, see `net_of`.
        batch: the images of one GPU; several have nn.DataParallel.
        loss: one of LOSSES.
        half: whether network and images are in float16.
        training: whether there is a backward pass.
        copied: whether images come from the CPU, or have a gradient in training.
    """

    def program(machine, k):
        devices = modelled(k, machine)
        placed = put(net_of(net), devices[0], half=half).train(training)
        if k > 1:
            placed = DataParallel(placed, device_ids=devices)
        X, y = images(batch * k, "cpu" if copied else devices[0], half=half)
        X.requires_grad_(training and not copied)
        y = y.to(devices[0])

        def step():
            if not training:
                placed(X.to(devices[0]))
                return
            placed.zero_grad(set_to_none=False)
            output = placed(X.to(devices[0]))
            if LOSSES[loss] is None:
                output.backward(output.detach())
            else:
                LOSSES[loss](output, y).backward()

        with contextlib.nullcontext() if training else torch.no_grad():
            return seconds_of(step)

    return program


def imagenet_epoch(data_parallel):
    """Return the program of an epoch of ResNet-50, 400 images a GPU, with its validation.

    It has nn.DataParallel or DDP. Batches come from pinned memory.
    """

    def program(machine, k):
        devices = modelled(k if data_parallel else 1, machine)
        size = 400 * len(devices)
        with contextlib.ExitStack() as stack:
            net = put(torchvision_net("resnet50"), devices[0])
            if data_parallel:
                net = DataParallel(net, device_ids=devices)
            else:
                stack.enter_context(equal_ranks(k))
                net = DistributedDataParallel(net)
            trainer = OPTIMIZERS["sgd"](net.parameters(), foreach=False)
            pinned = [tensor.pin_memory() for tensor in images(size, "cpu")]

            def load():
                return (each.to(devices[0], non_blocking=True) for each in pinned)

            def train():
                X, y = load()
                output = net(X)
                trainer.zero_grad(set_to_none=False)
                F.cross_entropy(output, y).backward()
                trainer.step()

            @torch.no_grad()
            def validate():
                X, y = load()
                F.cross_entropy(net(X), y)

            train()
            training = -(-1_281_167 // (400 * k)) * seconds_of(train)
            net.eval()
            return training + -(-50_000 // (400 * k)) * seconds_of(validate)

    return program


# -- pipelines of torchgpipe: flat layers, of which some keep a tensor and later ones join it


class Keep(nn.Module):
    """Keeps what passes under a name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x


class Cat(Keep):
    """Concatenates what passes and what was kept."""

    def forward(self, x, kept):
        return torch.cat((x, kept), 1)


class Add(Keep):
    """Adds what was kept, after the layers of `downsample`, to what passes."""

    def __init__(self, name, downsample):
        super().__init__(name)
        self.downsample = downsample

    def forward(self, x, kept):
        return x + (kept if self.downsample is None else self.downsample(kept))


class Stage(nn.Module):
    """Some of the layers of a network; it `needs` tensors from stages before, and `gives` some."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        kept, joined = [], []
        for layer in self.layers:
            if isinstance(layer, (Cat, Add)):
                joined.append(layer.name)
            elif isinstance(layer, Keep):
                kept.append(layer.name)
        self.needs = [name for name in joined if name not in kept]
        self.gives = [name for name in kept if name not in joined]

    def forward(self, x, *needed):
        kept = dict(zip(self.needs, needed, strict=True))
        for layer in self.layers:
            if isinstance(layer, (Cat, Add)):
                x = layer(x, kept.pop(layer.name))
            else:
                x = layer(x)
                if isinstance(layer, Keep):
                    kept[layer.name] = x
        return x, *(kept[name] for name in self.gives)


class Move(torch.autograd.Function):
    """Moves a tensor to another device, on side streams; its gradient goes the way back."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.source = x.device
        return receive(send(x, torch.empty_like(x, device=device)))

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        return receive(send(gradient, torch.empty_like(gradient, device=ctx.source))), None


def resnet101_layers():
    """Return the 370 layers of ResNet-101: torchvision's bottlenecks, flattened."""
    net = import_torchvision().models.resnet101()
    layers = [net.conv1, net.bn1, nn.ReLU(), net.maxpool]
    for i, block in enumerate(b for n in (1, 2, 3, 4) for b in getattr(net, f"layer{n}")):
        layers += [Keep(f"block {i}"), block.conv1, block.bn1, nn.ReLU()]
        layers += [block.conv2, block.bn2, nn.ReLU(), block.conv3, block.bn3]
        layers += [Add(f"block {i}", block.downsample), nn.ReLU()]
    return [*layers, net.avgpool, nn.Flatten(), net.fc]


def unet_layers(num_convs, width, depth=5):
    """Return the layers of torchgpipe's simplified U-Net with its B = `num_convs`, C = `width`."""

    def cell(into, middle, out):
        channels = [into, *[middle] * (num_convs - 1), out]
        for first, second in zip(channels, channels[1:], strict=False):
            yield nn.Conv2d(first, second, 3, padding=1, bias=False)
            yield nn.Dropout2d(0.1)
            yield nn.InstanceNorm2d(second)
            yield nn.LeakyReLU(0.01)

    layers, widths = [], [width * 2**i for i in range(depth + 1)]
    for i in range(depth):
        layers += [*cell(widths[i - 1] if i else 3, widths[i], widths[i]), Keep(f"level {i}")]
        layers.append(nn.MaxPool2d(2, stride=2))
    layers += cell(widths[depth - 1], widths[depth], widths[depth - 1])
    for i in reversed(range(depth)):
        half = widths[i] // 2
        layers += [nn.Upsample(scale_factor=2), Cat(f"level {i}"), *cell(widths[i + 1], half, half)]
    return [*layers, nn.Conv2d(width // 2, 1, 1, bias=False)]


def stages_of(make_layers, balance, devices):
    """Return a network's stages, each on its device: `balance` has their numbers of layers."""
    with torch.device("meta"):
        layers = make_layers()
    assert len(layers) == sum(balance) and len(balance) == len(devices)
    parts = iter(layers)
    return [
        Stage([next(parts) for _ in range(n)]).to_empty(device=device)
        for n, device in zip(balance, devices, strict=True)
    ]


def gpipe_forward(stages, devices, X, chunks):
    """Return the outputs of a batch that passes a pipeline in so many micro-batches.

    All but the last are computed again in the backward pass, as torchgpipe does by default. With
    one micro-batch none is.
    """
    inputs = list(X.chunk(chunks))
    kept = [{} for _ in inputs]
    target = {name: s for s, stage in enumerate(stages) for name in stage.needs}
    for tick in range(len(inputs) + len(stages) - 1):
        for s, stage in enumerate(stages):
            i = tick - s
            if not 0 <= i < len(inputs):
                continue
            x = inputs[i] if inputs[i].device == devices[s] else Move.apply(inputs[i], devices[s])
            needed = [kept[i].pop(name) for name in stage.needs]
            if i < len(inputs) - 1:
                x, *given = checkpoint(stage, x, *needed, use_reentrant=False)
            else:
                x, *given = stage(x, *needed)
            inputs[i] = x
            for name, tensor in zip(stage.gives, given, strict=True):
                kept[i][name] = Move.apply(tensor, devices[target[name]])
    return torch.cat(inputs)


def gpipe_step(stages, devices, X, y, chunks, loss, trainer, zeroed=True):
    """Return a step of training of a pipeline."""

    def step():
        loss(gpipe_forward(stages, devices, X, chunks), y).backward()
        trainer.step()
        if zeroed:
            trainer.zero_grad(set_to_none=False)

    return step


def images_and_labels(size, first, last):
    """Return images of 224 x 224 and their labels, on two devices."""
    return images(size, first)[0], torch.zeros(size, dtype=torch.long, device=last)


def images_and_masks(size, first, last):
    """Return images of 192 x 192 and a mask for each, on two devices."""
    return images(size, first, pixels=192)[0], torch.empty(size, 1, 192, 192, device=last)


PIPELINES = {  # functions that make the layers, the loss, and a batch
    "ResNet-101": (resnet101_layers, F.cross_entropy, images_and_labels),
    "U-Net": (
        lambda: unet_layers(5, 64),
        F.binary_cross_entropy_with_logits,
        images_and_masks,
    ),
}


def pipeline(network, balances, sizes):
    """Return the program of a pipeline's step that returns seconds an image.

    A step takes as much longer as it has more micro-batches, so it is measured for 8 and 16 of
    them, and from these follows the time for all.

    Args:
        network: one of PIPELINES.
        balances: numbers of layers of the stages, for some numbers of GPUs.
        sizes: images of a batch and micro-batches, for each of the balances.
    """
    make_layers, loss, make_batch = PIPELINES[network]
    settings = {len(each): (each, *size) for each, size in zip(balances, sizes, strict=True)}

    def program(machine, k):
        devices = modelled(k, machine)
        balance, size, chunks = settings[k]
        stages = stages_of(make_layers, balance, devices)
        trainer = plain_sgd(stages)
        few, many = (8, 16) if chunks > 16 else (chunks, chunks)
        seconds = {}
        for m in (1, few, many):  # gradients are made in the first step
            X, y = make_batch(-(-size // chunks) * m, devices[0], devices[-1])
            step = gpipe_step(stages, devices, X, y, m, loss, trainer)
            d2lpar.synchronize()
            start = clock()
            step()
            d2lpar.synchronize()
            seconds[m] = clock() - start
        total = seconds[many]
        if chunks > many:
            total += (chunks - many) * (seconds[many] - seconds[few]) / (many - few)
        return total / size

    return program


def plain_sgd(stages):
    """Return SGD without momentum for the parameters of all stages."""
    parameters = [p for stage in stages for p in stage.parameters()]
    return OPTIMIZERS["plain sgd"](parameters, foreach=False)


def unet_memory(num_convs, width, balance, chunks):
    """Return the program of a step with 32 images that returns all GPUs' peaks of reserved bytes.

    The source takes two steps; the second has the same peak, since a step's first backward pass
    makes all gradients.
    """

    def program(machine, k):
        devices = modelled(k, machine)
        stages = stages_of(lambda: unet_layers(num_convs, width), balance, devices)
        trainer = plain_sgd(stages)
        X, y = images_and_masks(32, devices[0], devices[-1])
        loss = F.binary_cross_entropy_with_logits
        step = gpipe_step(stages, devices, X, y, chunks, loss, trainer, zeroed=False)
        for device in devices:
            torch.vgpu.reset_peak_memory_stats(device)
        step()
        return sum(torch.vgpu.max_memory_reserved(device) for device in devices)

    return program


# -- small programs of ilkarman/DeepLearningFrameworks


class SmallVgg(nn.Module):
    """Four convolutions and two linear layers for images of 32 x 32."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 50, 3, padding=1), nn.Conv2d(50, 50, 3, padding=1)
        self.conv3, self.conv4 = nn.Conv2d(50, 100, 3, padding=1), nn.Conv2d(100, 100, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(100 * 8 * 8, 512), nn.Linear(512, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv2(F.relu(self.conv1(x))), 2))
        x = F.dropout(x, 0.25, self.training)
        x = F.relu(F.max_pool2d(self.conv4(F.relu(self.conv3(x))), 2))
        x = F.dropout(x, 0.25, self.training).flatten(1)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.5, self.training))


class Gru(nn.Module):
    """A GRU of 100 units that reads 150 words and classifies them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30_000, 125)
        self.gru = nn.GRU(125, 100, batch_first=True)
        self.out = nn.Linear(100, 2)

    def forward(self, tokens):
        states, _ = self.gru(self.embedding(tokens))
        return self.out(states[:, -1])


SMALL = {  # a network, its batch, and its optimizer
    "small VGG": (SmallVgg, lambda: torch.empty(64, 3, 32, 32), "sgd with momentum"),
    "GRU": (Gru, lambda: torch.zeros(64, 150, dtype=torch.long), "adam"),
}


def loads_and_trains(network):
    """Return the program of a training step whose batch comes from memory that is not pinned."""
    make_net, make_inputs, optimizer = SMALL[network]

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(make_net, device)
        trainer = OPTIMIZERS[optimizer](net.parameters(), foreach=False)
        X, y = make_inputs(), torch.zeros(64, dtype=torch.long)

        def step():
            inputs, labels = X.to(device), y.to(device)
            trainer.zero_grad(set_to_none=False)
            F.cross_entropy(net(inputs), labels).backward()
            trainer.step()

        return seconds_of(step)

    return program


def features(machine, k):
    """32 images through ResNet-50 without its last layer, and their features back (eval mode)."""
    (device,) = modelled(k, machine)
    resnet = torchvision_net("resnet50")
    net = put(lambda: nn.Sequential(*list(resnet().children())[:-1]), device).eval()
    X, _ = images(32, "cpu")
    return seconds_of(lambda: net(X.to(device)).detach().cpu())


def chest_x_rays(machine, k):
    """A step of DenseNet-121 under nn.DataParallel, 64 images a GPU, 14 labels an image."""
    devices = modelled(k, machine)

    def make_net():
        net = import_torchvision().models.densenet121()
        net.classifier = nn.Sequential(nn.Linear(1024, 14), nn.Sigmoid())
        return net

    net = put(make_net, devices[0])
    if k > 1:
        net = DataParallel(net, device_ids=devices)
    trainer = OPTIMIZERS["adam"](net.parameters(), foreach=False)
    X, y = torch.empty(64 * k, 3, 224, 224), torch.empty(64 * k, 14)

    def step():
        inputs, labels = (each.to(devices[0], non_blocking=True) for each in (X, y))
        loss = F.binary_cross_entropy(net(inputs), labels)
        trainer.zero_grad(set_to_none=False)
        loss.item()
        loss.backward()
        trainer.step()

    return seconds_of(step)


PROGRAMS = {
    "chest_x_rays": lambda: chest_x_rays,
    "features": lambda: features,
    "imagenet_epoch": imagenet_epoch,
    "infers": infers,
    "loads_and_trains": loads_and_trains,
    "passes": passes,
    "pipeline": pipeline,
    "trains": trains,
    "unet_memory": unet_memory,
}
ROWS = list(read(Path(__file__).with_suffix(".toml"), PROGRAMS))
