"""Published measurements of vision and of small networks: one GPU, data parallel, pipelines.

Programs take a `Machine` and a number of GPUs. What a source leaves open stands beside its rows.
Programs of PyTorch before 2.0 update one parameter after the other and zero gradients in place, as
it did by default.
"""

import contextlib
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import d2lpar
from d2lpar._d2l import import_torchvision
from d2lpar.side_streams import receive, send
from vgpu import PRESETS, Link, clock, equal_ranks
from vgpu.modelled.datasheets import GPUS, MIB
from vgpu.modelled.hardware import Machine
from vgpu.modelled.links import BESIDE_GPUS, FOR_ALL_GPUS
from vgpu.modelled.modelled_gpu import GPU

from . import Row, modelled, seconds_of

# -- GPUs that d2lpar does not have. Peaks are dense, those of tensor cores with sums in float32.

PCIE3, PCIE4 = PRESETS["pcie3-measured"], PRESETS["pcie4-measured"]
P40 = GPU(
    "Tesla P40",
    22_919 * MIB,
    346e9,
    {"float32": 12e12, "float64": 12e12 / 32},
    30,
    PCIE3,
    source="NVIDIA Tesla P40 data sheet",
)
GTX_1080_TI = GPU(
    "GeForce GTX 1080 Ti",
    11_178 * MIB,
    484e9,
    {"float32": 11.3e12, "float64": 11.3e12 / 32},  # torch sums float16 in float32
    28,
    PCIE3,
    source="NVIDIA GeForce GTX 1080 Ti product page: 3584 cores at 1.58 GHz",
)
TITAN_V = GPU(
    "TITAN V",
    12_066 * MIB,
    652.8e9,
    {"float32": 14.9e12, "float16": 110e12, "float64": 7.45e12},
    80,
    PCIE3,
    source="NVIDIA TITAN V product page: 5120 cores at 1.455 GHz, 110 TFLOPS of tensor cores",
)
RTX_2080_TI = GPU(
    "GeForce RTX 2080 Ti",
    10_989 * MIB,
    616e9,
    {"float32": 13.4e12, "float16": 53.8e12, "float64": 13.4e12 / 32},
    68,
    PCIE3,
    source="NVIDIA Turing architecture whitepaper, table 1, reference clocks",
)
RTX_3090 = GPU(
    "GeForce RTX 3090",
    24_268 * MIB,
    936e9,
    {
        "float32": 35.6e12,
        "tf32": 35.6e12,
        "bfloat16": 71e12,
        "float16": 71e12,
        "float64": 35.6e12 / 64,
    },
    82,
    PCIE4,
    PRESETS["pcie4-through-host-measured"],  # GeForce cards have no peer access over PCIe
    "NVIDIA Ampere GA102 whitepaper, appendix A",
)
RTX_6000_ADA = GPU(
    "RTX 6000 Ada",
    48_646 * MIB,
    960e9,
    {
        "float32": 91.1e12,
        "tf32": 182.1e12,
        "bfloat16": 364.2e12,
        "float16": 364.2e12,
        "float64": 91.1e12 / 64,
    },
    142,
    PCIE4,
    source="NVIDIA RTX 6000 Ada data sheet, its sparse figures halved",
)
P100_PCIE = replace(
    GPUS["p100"],
    name="P100-PCIE-16GB",
    peaks={"float32": 9.3e12, "float64": 4.7e12},
    peer_link=None,
    source="NVIDIA Tesla P100 PCIe data sheet",
)
V100_PCIE = replace(
    GPUS["v100"],
    name="V100-PCIE-16GB",
    peaks={"float32": 14e12, "float16": 112e12, "float64": 7e12},
    peer_link=None,
    source="NVIDIA V100 data sheet",
)
A100_PCIE = replace(
    GPUS["a100-40gb"],
    name="A100-PCIE-40GB",
    peer_link=None,
    source="NVIDIA A100 40GB PCIe product brief",
)


def alone(gpu):
    """Return a machine with one GPU."""
    return Machine(gpu, gpus=1)


def nvlink2(gpu, links):
    """Return a V100 of whose NVLinks rings use so many: 24 of 25 GB/s each (Dell HPC)."""
    return replace(GPUS[gpu], peer_link=Link(links * 24e9, 5e-6, name=f"NVLink 2, {links} links"))


def network(rate, reached=FOR_ALL_GPUS):
    """Return the link of a network card, of whose bytes/s NCCL reaches so much."""
    return Link(reached * rate, 10e-6, name="network", startup=20e-6)


# All of a V100's six links lead to the other seven GPUs of a DGX-1; to three of them four do, and
# to one other two (nvidia-smi topo -m).
DGX1_16GB = Machine(
    nvlink2("v100", 6),
    gpus=8,
    gpus_per_switch=2,
    network=network(12.5e9, BESIDE_GPUS),
    network_cards=4,
    source="NVIDIA DGX-1 guide",
)
DGX_A100 = Machine(
    "a100",
    gpus=8,
    gpus_per_switch=2,
    network=network(25e9, BESIDE_GPUS),
    network_cards=8,
    source="NVIDIA DGX A100 guide",
)
P3DN = Machine(
    nvlink2("v100-32gb", 6),
    gpus=8,
    gpus_per_switch=2,
    network=network(12.5e9),
    source="AWS: p3dn.24xlarge",
)
P3DN_OF_4 = replace(P3DN, gpu=nvlink2("v100-32gb", 4))


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


def put(make_net, device, channels_last=False, half=False):
    """Return a network on a device; its parameters are made there, and nowhere else."""
    with torch.device("meta"):
        net = make_net()
    if half:
        net.half()
    net.to_empty(device=device)
    return net.to(memory_format=torch.channels_last) if channels_last else net


def batch(size, device, channels_last=False, half=False, pixels=224):
    """Return `size` images and their labels, (N, 3, H, W) and (N,)."""
    dtype = torch.half if half else torch.float32
    X = torch.empty(size, 3, pixels, pixels, dtype=dtype, device=device)
    X = X.contiguous(memory_format=torch.channels_last) if channels_last else X
    return X, torch.zeros(size, dtype=torch.long, device=device)


def sgd(parameters, modern=False):
    """Return SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-4, foreach=modern)


def sgd_with_momentum(parameters, modern=False):
    """Return SGD with momentum alone."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=modern)


def nesterov(parameters, modern=False):
    """Return what timm calls sgd."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, foreach=modern)


def plain_sgd(parameters, modern=False):
    """Return SGD without momentum."""
    return torch.optim.SGD(parameters, 0.01, foreach=modern)


def rmsprop(parameters, modern=False):
    """Return RMSprop with momentum and weight decay."""
    return torch.optim.RMSprop(parameters, 0.08, 0.9, 0.01, 1e-5, momentum=0.9, foreach=modern)


def adam(parameters, modern=False):
    """Return Adam."""
    return torch.optim.Adam(parameters, foreach=modern)


# -- programs


def autocast(amp):
    """Return the context of mixed precision, where `amp` is a dtype, or none."""
    return torch.autocast("vgpu", dtype=amp) if amp else contextlib.nullcontext()


def training_step(net, X, y, trainer, amp=None, scaled=True, modern=False, loss=F.cross_entropy):
    """Return a step of training; in float16 it scales the loss if `scaled`."""
    scaler = torch.amp.GradScaler("vgpu", enabled=scaled and amp == torch.float16)

    def step():
        trainer.zero_grad(set_to_none=modern)
        with autocast(amp):
            loss_value = loss(net(X), y)
        scaler.scale(loss_value).backward()
        scaler.step(trainer)
        scaler.update()

    return step


def trains(
    make_net,
    size,
    optimizer=sgd,
    amp=None,
    channels_last=False,
    memory=False,
    distributed=False,
    **options,
):
    """Return the program of a training step, with DDP where there are several GPUs.

    Args:
        make_net: a function that makes the network.
        size: the images of one GPU.
        optimizer: a function of parameters that makes the optimizer.
        amp: a dtype for autocast; None for float32.
        channels_last: whether network and images are in that layout.
        memory: True for a program that returns the peak of allocated bytes instead of seconds.
        distributed: whether one GPU has DDP, too.
        options: those of `training_step`.
    """

    def program(machine, k):
        (device,) = modelled(1, machine)
        net = put(make_net, device, channels_last)
        trainer = optimizer(net.parameters(), modern=options.get("modern", False))
        X, y = batch(size, device, channels_last)
        with equal_ranks(k) if distributed or k > 1 else contextlib.nullcontext():
            if distributed or k > 1:
                net = DistributedDataParallel(net)
            step = training_step(net, X, y, trainer, amp, **options)
            step()  # after which DDP builds its buckets anew
            seconds = seconds_of(step)
        return torch.vgpu.max_memory_allocated(device) if memory else seconds

    return program


def data_parallel(make_net, size, optimizer=plain_sgd, amp=None):
    """Return the program of a training step with nn.DataParallel, `size` images a GPU."""

    def program(machine, k):
        devices = modelled(k, machine)
        net = DataParallel(put(make_net, devices[0]), device_ids=devices)
        X, y = batch(size * k, devices[0])
        return seconds_of(training_step(net, X, y, optimizer(net.parameters()), amp))

    return program


def infers(make_net, size, amp=None, channels_last=False):
    """Return the program of a forward pass whose input is on the GPU."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(make_net, device, channels_last).eval()
        X, _ = batch(size, device, channels_last)

        @torch.no_grad()
        def step():
            with autocast(amp):
                net(X)

        return seconds_of(step)

    return program


def validates(make_net, amp=None, channels_last=False):
    """Return the program of a step of validation with one image: loss, accuracies, their items."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(make_net, device, channels_last).eval()
        X, y = batch(1, device, channels_last)

        @torch.no_grad()
        def step():
            with autocast(amp):
                output = net(X)
                loss = F.cross_entropy(output, y)
            correct = output.topk(5, 1, True, True)[1].t().eq(y.view(1, -1))
            for figure in (*(correct[:n].float().sum().mul_(100.0) for n in (1, 5)), loss):
                figure.item()

        return seconds_of(step)

    return program


def forward_backward(name, half=False, training=True):
    """Return the program of passes with 16 images, the sum of whose outputs is the loss."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(torchvision_net(name), device, half=half).train(training)
        X, _ = batch(16, device, half=half)
        X.requires_grad_(training)

        def step():
            net.zero_grad(set_to_none=False)
            output = net(X)
            if training:
                output.sum().backward()

        with contextlib.nullcontext() if training else torch.no_grad():
            return seconds_of(step)

    return program


def with_copies(name, half=False, training=True):
    """Return the program of passes with 12 images a GPU, copied to it; nn.DataParallel over k."""

    def program(machine, k):
        devices = modelled(k, machine)
        net = put(torchvision_net(name), devices[0], half=half).train(training)
        if k > 1:
            net = DataParallel(net, device_ids=devices)
        X, y = batch(12 * k, "cpu", half=half)
        y = y.to(devices[0])

        def step():
            if not training:
                net(X.to(devices[0]))
                return
            net.zero_grad(set_to_none=False)
            F.cross_entropy(net(X.to(devices[0])), y).backward()

        with contextlib.nullcontext() if training else torch.no_grad():
            return seconds_of(step)

    return program


def imagenet_epoch(parallel):
    """Return the program of an epoch of ResNet-50, 400 images a GPU, with its validation.

    `parallel` is `DataParallel` or `DistributedDataParallel`. Batches come from pinned memory.
    """

    def program(machine, k):
        devices = modelled(k if parallel is DataParallel else 1, machine)
        size = 400 * len(devices)
        with contextlib.ExitStack() as stack:
            net = put(torchvision_net("resnet50"), devices[0])
            if parallel is DataParallel:
                net = DataParallel(net, device_ids=devices)
            else:
                stack.enter_context(equal_ranks(k))
                net = DistributedDataParallel(net)
            trainer = sgd(net.parameters())
            images, labels = (tensor.pin_memory() for tensor in batch(size, "cpu"))

            def load():
                return (each.to(devices[0], non_blocking=True) for each in (images, labels))

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


def torchgpipe_seconds(make_layers, loss, make_batch, balances, sizes):
    """Return the program of a pipeline's step that returns seconds an image.

    A step takes as much longer as it has more micro-batches, so it is measured for 8 and 16 of
    them, and from these follows the time for all.

    Args:
        make_layers: a function that makes the layers.
        loss: a function of outputs and labels.
        make_batch: a function of a size, the first and the last device that returns X and y.
        balances: numbers of layers of the stages, by the number of GPUs.
        sizes: images of a batch and micro-batches, by the number of GPUs.
    """

    def program(machine, k):
        devices = modelled(k, machine)
        stages = stages_of(make_layers, balances[k], devices)
        trainer = plain_sgd([p for stage in stages for p in stage.parameters()])
        size, chunks = sizes[k]
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


def images_and_labels(size, first, last):
    """Return images of 224 x 224 and their labels, on two devices."""
    return batch(size, first)[0], torch.zeros(size, dtype=torch.long, device=last)


def images_and_masks(size, first, last):
    """Return images of 192 x 192 and a mask for each, on two devices."""
    return batch(size, first, pixels=192)[0], torch.empty(size, 1, 192, 192, device=last)


def unet_memory(num_convs, width, balance, chunks):
    """Return the program of a step with 32 images that returns all GPUs' peaks of reserved bytes.

    The source takes two steps; the second has the same peak, since a step's first backward pass
    makes all gradients.
    """

    def program(machine, k):
        devices = modelled(k, machine)
        stages = stages_of(lambda: unet_layers(num_convs, width), balance, devices)
        trainer = plain_sgd([p for stage in stages for p in stage.parameters()])
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


def loads_and_trains(make_net, make_batch, optimizer):
    """Return the program of a training step whose batch comes from memory that is not pinned."""

    def program(machine, k):
        (device,) = modelled(k, machine)
        net = put(make_net, device)
        trainer = optimizer(net.parameters())
        X, y = make_batch()

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
    X, _ = batch(32, "cpu")
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
    trainer = adam(net.parameters())
    X, y = torch.empty(64 * k, 3, 224, 224), torch.empty(64 * k, 14)

    def step():
        inputs, labels = (each.to(devices[0], non_blocking=True) for each in (X, y))
        loss = F.binary_cross_entropy(net(inputs), labels)
        trainer.zero_grad(set_to_none=False)
        loss.item()
        loss.backward()
        trainer.step()

    return seconds_of(step)


# -- the rows

HALF = torch.float16


def torchgpipe():
    """Eight P40s: throughput and memory of pipelines.

    Seconds are those of an image, since each number of GPUs has its own batch; balances, batches
    and micro-batches stand in `benchmarks/*/main.py`. Memory is the sum of
    `torch.cuda.max_memory_cached` of all GPUs, and gradients are never set to zero. The machine's
    PCIe topology is not published: each GPU is taken to have a link of its own.
    """
    source = "github.com/kakaobrain/torchgpipe, docs/benchmarks.rst"
    machine = Machine(P40, gpus=8)
    program = torchgpipe_seconds(
        resnet101_layers,
        F.cross_entropy,
        images_and_labels,
        {
            1: [370],
            2: [135, 235],
            4: [44, 92, 124, 110],
            8: [26, 22, 33, 44, 44, 66, 66, 69],
        },
        {1: (118, 1), 2: (25_000, 1667), 4: (5632, 256), 8: (5400, 150)},
    )
    for gpus, rate in ((2, 135.539), (4, 265.958), (8, 411.662)):
        yield Row(
            "torchgpipe, ResNet-101",
            "pipeline",
            machine,
            gpus,
            1 / rate,
            program,
            f"{source}: ResNet-101 Speed Benchmark, pipeline-{gpus}",
            1 / 95.862,
        )
    program = torchgpipe_seconds(
        lambda: unet_layers(5, 64),
        F.binary_cross_entropy_with_logits,
        images_and_masks,
        {
            1: [241],
            2: [104, 137],
            4: [30, 66, 84, 61],
            8: [16, 27, 31, 44, 22, 57, 27, 17],
        },
        {1: (40, 1), 2: (512, 32), 4: (512, 16), 8: (640, 40)},
    )
    for gpus, rate in ((2, 35.502), (4, 67.042), (8, 88.497)):
        yield Row(
            "torchgpipe, U-Net",
            "pipeline",
            machine,
            gpus,
            1 / rate,
            program,
            f"{source}: U-Net (5, 64) Speed Benchmark, pipeline-{gpus}",
            1 / 28.5,
        )
    for name, size, balance, chunks, gibibytes in (
        ("baseline", (6, 72), [285], 1, 20.3),
        ("pipeline-1", (11, 128), [505], 32, 20.5),
    ):
        yield Row(
            "torchgpipe, memory of U-Net",
            "memory",
            machine,
            1,
            gibibytes * 2**30,
            unet_memory(*size, balance, chunks),
            f"{source}: U-Net (B, C) Memory Benchmark, {name}",
        )


def u39kun():
    """16 images on four GPUs; the loss is the sum of the outputs, and there is no optimizer."""
    source = "github.com/u39kun/deep-learning-benchmark, PyTorch 0.3.0"
    for gpu, name, half, training, kind, milliseconds in (
        (GPUS["v100"], "vgg16", False, True, "one GPU", 83.5),
        (GPUS["v100"], "resnet152", False, True, "one GPU", 136.5),
        (GPUS["v100"], "resnet152", True, True, "one GPU", 92.9),
        (GPUS["v100"], "densenet161", True, False, "launch-bound", 35.7),
        (GTX_1080_TI, "vgg16", False, False, "one GPU", 39.3),
        (GTX_1080_TI, "resnet152", False, True, "one GPU", 206.4),
        (TITAN_V, "densenet161", False, True, "one GPU", 174.1),
        (RTX_2080_TI, "vgg16", True, True, "one GPU", 99.3),
    ):
        yield Row(
            f"u39kun, {name}",
            kind,
            alone(gpu),
            1,
            milliseconds * 1e-3,
            forward_backward(name, half, training),
            f"{source}: {'16' if half else '32'}-bit, {name} {'train' if training else 'eval'}",
        )


def ryujaehun():
    """12 images a GPU, copied to it, on four RTX 2080 Ti; nn.DataParallel, no optimizer.

    Means of the 50 steps in the CSV files. These cards have no peer access over PCIe.
    """
    source = "github.com/ryujaehun/pytorch-gpu-benchmark, new_results/GeForce RTX 2080 Ti"
    machine = Machine(RTX_2080_TI, gpus=4)
    for name, half, training, milliseconds in (
        ("mobilenet_v2", True, False, 6.766),
        ("shufflenet_v2_x1_0", True, False, 7.998),
        ("densenet121", True, False, 16.299),
        ("mnasnet1_0", True, True, 28.81),
    ):
        mode = "train" if training else "inference"
        yield Row(
            f"ryujaehun, {name}",
            "launch-bound",
            machine,
            1,
            milliseconds * 1e-3,
            with_copies(name, half, training),
            f"{source}_1_gpus__half_model_{mode}_benchmark.csv",
        )
    for name, half, gpus, milliseconds, of_one in (
        ("resnet50", False, 4, 121.799, 56.683),
        ("vgg16", False, 4, 233.025, 85.997),
        ("densenet121", False, 4, 251.109, 91.833),
        ("resnet152", True, 2, 179.567, 91.743),
    ):
        precision = "half" if half else "float"
        yield Row(
            f"ryujaehun, {name}",
            "data parallel, one machine",
            machine,
            gpus,
            milliseconds * 1e-3,
            with_copies(name, half),
            f"{source}_{gpus}_gpus__{precision}_model_train_benchmark.csv",
            of_one * 1e-3,
        )


def nvidia():
    """NVIDIA's networks for ImageNet; batches and layouts stand in `configs.yml`.

    A step of inference has the loss, two accuracies and their items (`training.py`, `validate`).
    EfficientNet and ResNeXt are torchvision's, which have the same layers. On fewer GPUs NVIDIA's
    scripts step the optimizer once in several batches; here each batch has its step.
    """
    source = "github.com/NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets"
    resnet50, efficientnet = torchvision_net("resnet50"), torchvision_net("efficientnet_b0")
    for where, make_net, gpu, amp, milliseconds in (
        ("resnet50v1.5: V100 16GB, FP32", resnet50, "v100", None, 10.37),
        ("resnet50v1.5: V100 16GB, mixed precision", resnet50, "v100", HALF, 12.78),
        ("efficientnet: B0, A100, TF32", efficientnet, "a100", None, 9.33),
        ("resnext101-32x4d: T4, FP32", resnext101_32x4d, "t4", None, 18.18),
    ):
        yield Row(
            f"NVIDIA, inference of {where.partition(':')[0]}",
            "launch-bound",
            alone(gpu),
            1,
            milliseconds * 1e-3,
            validates(make_net, amp, channels_last=amp is not None),
            f"{source}/{where} inference latency, batch size 1",
        )
    in_half = {"amp": HALF, "channels_last": True}
    for where, machine, gpus, size, rate, of_one, program in (
        (
            "resnet50v1.5: DGX-1 16GB, mixed precision",
            DGX1_16GB,
            8,
            256,
            8322,
            1200,
            trains(resnet50, 256, sgd, **in_half),
        ),
        (
            "resnet50v1.5: DGX A100, TF32",
            DGX_A100,
            8,
            256,
            7248,
            938,
            trains(resnet50, 256, sgd),
        ),
        (
            "resnext101-32x4d: DGX A100, mixed precision",
            DGX_A100,
            8,
            128,
            7925,
            1211,
            trains(resnext101_32x4d, 128, sgd, **in_half),
        ),
        (
            "efficientnet: B0, A100, TF32",
            DGX_A100,
            16,
            256,
            16_137,
            1078,
            trains(efficientnet, 256, rmsprop),
        ),
    ):
        yield Row(
            f"NVIDIA, training of {where.partition(':')[0]}",
            f"data parallel, {'several machines' if gpus > 8 else 'one machine'}",
            machine,
            gpus,
            gpus * size / rate,
            program,
            f"{source}/{where} training performance",
            size / of_one,
        )


def lambda_labs():
    """ResNet-50 of NVIDIA's scripts on synthetic images, NCHW; batches are those of the logs.

    The CSV files have the rates. How RTX 3090s, 4090s and 6000 Adas are joined is not published:
    GeForce cards send through the host, the others over PCIe.
    """
    source = "github.com/lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput"
    for name, gpu, gpus, size, amp, rate, of_one in (
        ("RTX 3090", RTX_3090, 1, 224, None, 513, None),
        ("RTX 4090", GPUS["rtx4090"], 1, 448, HALF, 1301, None),
        ("2x RTX 3090", RTX_3090, 2, 224, None, 979, 513),
        ("2x RTX 4090", GPUS["rtx4090"], 2, 448, HALF, 2468, 1301),
        ("4x RTX 6000 Ada", RTX_6000_ADA, 4, 496, None, 2559, 647),
        ("8x RTX 6000 Ada", RTX_6000_ADA, 8, 928, HALF, 9211, 1146),
        ("8x A100 80GB SXM4", GPUS["a100"], 8, 640, None, 7397, 1066),
        ("LambdaCloud 8xV100 16GB", DGX1_16GB.gpu, 8, 128, None, 2817, 369),
    ):
        yield Row(
            f"Lambda, {name.rpartition('x ')[2]}",
            "one GPU" if gpus == 1 else "data parallel, one machine",
            Machine(gpu, gpus=gpus),
            gpus,
            gpus * size / rate,
            trains(torchvision_net("resnet50"), size, sgd, amp),
            f"{source}-{'fp16' if amp else 'fp32'}.csv: {name}",
            of_one and size / of_one,
        )


def timm():
    """Eager networks in mixed precision, without scaling of the loss (`benchmark.py`).

    The networks are torchvision's, whose parameters are as many; timm's VGG computes its first
    linear layer as a convolution.
    """
    source = "github.com/huggingface/pytorch-image-models, results/benchmark"
    for name, layout, size, milliseconds in (
        ("resnet50", "nhwc", 512, 419.528),
        ("resnet50", "nchw", 512, 618.983),
        ("resnet18", "nhwc", 512, 146.713),
        ("vgg16", "nhwc", 384, 702.994),
        ("densenet121", "nhwc", 256, 278.353),
        ("resnext101_32x8d", "nhwc", 128, 407.622),
    ):
        make_net, last = torchvision_net(name), layout == "nhwc"
        yield Row(
            f"timm, {name}",
            "one GPU",
            alone(RTX_3090),
            1,
            milliseconds * 1e-3,
            trains(make_net, size, nesterov, HALF, last, scaled=False),
            f"{source}-train-amp-{layout}-pt112-cu113-rtx3090.csv: {name}",
        )
    for name, layout, size, milliseconds in (
        ("resnet50", "nhwc", 512, 100.61),
        ("wide_resnet50_2", "nchw", 1024, 366.693),
    ):
        yield Row(
            f"timm, {name}",
            "one GPU",
            alone("rtx4090"),
            1,
            milliseconds * 1e-3,
            infers(torchvision_net(name), size, HALF, layout == "nhwc"),
            f"{source}-infer-amp-{layout}-pt240-cu124-rtx4090.csv: {name}, 224 pixels",
        )


def willgpaik():
    """torchvision's networks with DDP in float16; all settings are in `benchmark_ddp.py`.

    Weak scaling has a batch for each GPU; in strong scaling a few images are left for each GPU, and
    the host decides. Memory is `torch.cuda.max_memory_allocated`. The machines are Lambda Cloud's.
    """
    source = "github.com/willgpaik/pytorch-ddp-scaling-benchmark, results"
    resnet = (torchvision_net("resnet152"), {"channels_last": True})
    vit = (torchvision_net("vit_b_16"), {})
    v100s = Machine(DGX1_16GB.gpu, gpus=8)
    a100s = Machine("a100", gpus=8)
    settings = {"amp": HALF, "distributed": True, "modern": True}
    for file, machine, (make_net, options), size, seconds, of_one in (
        ("a100_80gb/8gpu_weak_resnet152", a100s, resnet, 512, 0.441699, 0.430424),
        ("a100_80gb/8gpu_weak_vit_b_16", a100s, vit, 1024, 1.014948, 0.994291),
        ("v100_16gb/8gpu_weak_resnet152", v100s, resnet, 128, 0.266590, 0.254365),
        ("v100_16gb/8gpu_strong_resnet152", v100s, resnet, 8, 0.0943029, None),
        ("v100_16gb/8gpu_strong_vit_b_16", v100s, vit, 8, 0.0621011, None),
        ("a100_80gb/8gpu_strong_resnet152", a100s, resnet, 32, 0.1097337, None),
    ):
        _, scaling, net = file.split("_", 3)[1:]
        yield Row(
            f"willgpaik, {scaling} scaling of {net}",
            "launch-bound" if scaling == "strong" else "data parallel, one machine",
            machine,
            8,
            seconds,
            trains(make_net, size, sgd_with_momentum, **settings, **options),
            f"{source}/{file}_fp16_*.json: mean_step_sec",
            of_one,
        )
    for file, machine, (make_net, options), size, gibibytes in (
        ("a100_80gb/1gpu_weak_resnet152", a100s, resnet, 512, 44.10879898071289),
        ("v100_16gb/1gpu_weak_vit_b_16", v100s, vit, 128, 9.854957580566406),
    ):
        yield Row(
            f"willgpaik, memory of {file.partition('weak_')[2]}",
            "memory",
            machine,
            1,
            gibibytes * 2**30,
            trains(make_net, size, sgd_with_momentum, **settings, **options, memory=True),
            f"{source}/{file}_fp16_*.json: peak_mem_gb",
        )


def ray():
    """ResNet-50, 128 images a GPU, on AWS's p3dn.24xlarge, with nn.DataParallel and DDP.

    Apex' O1 is taken as autocast with a scaled loss. NCCL ran over TCP.
    """
    source = "github.com/ray-project/ray, python/ray/util/sgd/torch/examples/benchmarks/README.rst"
    make_net = torchvision_net("resnet50")
    replicas = data_parallel(make_net, 128)
    single, mixed = (trains(make_net, 128, plain_sgd, amp) for amp in (None, HALF))
    for name, gpus, machine, rate, of_one, program in (
        ("DataParallel", 4, P3DN_OF_4, 1289, 355.5, replicas),
        ("DataParallel", 8, P3DN, 2521, 355.5, replicas),
        ("Ray (PyTorch)", 8, P3DN, 2795, 356, single),
        ("Ray (PyTorch)", 16, P3DN, 5886.1, 356, single),
        ("Ray (PyTorch)", 64, P3DN, 23_317.9, 356, single),
        ("Ray (PyTorch) + Apex", 8, P3DN, 5862, 770, mixed),
        ("Ray (PyTorch) + Apex", 16, P3DN, 10_052.8, 770, mixed),
        ("Ray (PyTorch) + Apex", 64, P3DN, 38_642, 770, mixed),
    ):
        yield Row(
            f"Ray, {name}",
            f"data parallel, {'several machines' if gpus > 8 else 'one machine'}",
            machine,
            gpus,
            gpus * 128 / rate,
            program,
            f"{source}: {name}",
            128 / of_one,
        )


def dlperf():
    """ResNet-50 on up to four machines with 8 V100s each, as PyTorch's and NVIDIA's examples.

    The rows of float32 are those with DALI and 48 workers. Apex' DDP and its O1 in NVIDIA's example
    are taken as torch's DDP and autocast with a scaled loss.
    """
    source = "github.com/Oneflow-Inc/DLPerf"
    machine = replace(DGX1_16GB, network=network(12.5e9), network_cards=1, source=source)
    for where, gpus, size, amp, rate, of_one in (
        ("PyTorch/resnet50v1.5: FP32, DALI, worker=48", 16, 128, None, 5193.09, 350.66),
        ("PyTorch/resnet50v1.5: FP32, DALI, worker=48", 32, 128, None, 10_032.72, 350.66),
        ("NVIDIADeepLearningExamples: AMP, dynamic scale", 16, 256, HALF, 11_991.94, 802.9),
        ("NVIDIADeepLearningExamples: AMP, dynamic scale", 32, 256, HALF, 22_551.16, 802.9),
    ):
        yield Row(
            f"DLPerf, {where.partition(':')[0]}",
            "data parallel, several machines",
            machine,
            gpus,
            gpus * size / rate,
            trains(torchvision_net("resnet50"), size, sgd, amp),
            f"{source}, {where}",
            size / of_one,
        )


def high_flyer():
    """An epoch of ResNet-50 in float32 on 8 A100s with PCIe, 400 images a GPU.

    Convolutions are in TF32, PyTorch's default. The scripts also empty the allocator's cache after
    each step, on one GPU as on eight, which programs here do not. That the cards have PCIe and no
    NVLink is from arxiv.org/abs/2408.14158.
    """
    source = "github.com/HFAiLab/pytorch_distributed, README"
    machine = Machine(A100_PCIE, gpus=8, network=network(25e9))  # 1 card of 200 Gbit/s InfiniBand
    for name, seconds, parallel in (
        ("nn.DataParallel", 984.5840, DataParallel),
        ("torch.distributed", 239.3970, DistributedDataParallel),
    ):
        yield Row(
            f"High-Flyer, {name}",
            "data parallel, one machine",
            machine,
            8,
            seconds,
            imagenet_epoch(parallel),
            f"{source}: {name}",
            1786.7849,
        )


def ilkarman():
    """Training loops of small networks, and nn.DataParallel on four V100s with PCIe.

    Batches are slices of NumPy arrays; what the host takes to make tensors of them is left out.
    """
    source = "github.com/ilkarman/DeepLearningFrameworks, notebooks"

    def pictures():
        return torch.empty(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)

    def reviews():
        return torch.zeros(64, 150, dtype=torch.long), torch.zeros(64, dtype=torch.long)

    p100 = alone(P100_PCIE)
    for name, kind, seconds, program in (
        ("PyTorch_CNN", "one GPU", 51.2 / (10 * 781), (SmallVgg, pictures, sgd_with_momentum)),
        ("PyTorch_RNN", "launch-bound", 12.6 / (3 * 390), (Gru, reviews, adam)),
    ):
        yield Row(
            f"ilkarman, {name}",
            kind,
            p100,
            1,
            seconds,
            loads_and_trains(*program),
            f"{source}/{name}.ipynb: wall time of the training loop",
        )
    yield Row(
        "ilkarman, PyTorch_Inference",
        "one GPU",
        p100,
        1,
        2.44 / 40,
        features,
        f"{source}/PyTorch_Inference.ipynb: wall time of 40 batches",
    )
    yield Row(
        "ilkarman, PyTorch_MultiGPU",
        "data parallel, one machine",
        Machine(V100_PCIE, gpus=4),
        4,
        (8 * 60 + 36) / (5 * 341),
        chest_x_rays,
        f"{source}/PyTorch_MultiGPU.ipynb: synthetic data, 4 and 1 GPUs",
        (25 * 60 + 14) / (5 * 1364),
    )


def torchbench():
    """Steps of ResNet-50 with Adam and soft labels; a figure is that of three steps (`_train`)."""
    source = "github.com/pytorch/benchmark/pull/706: Latency by batch size, Eager"

    def soft(output, _):
        return F.cross_entropy(output, torch.zeros_like(output))

    for size, kind, milliseconds in (
        (1, "launch-bound", 89.033),
        (4, "launch-bound", 93.676),
        (16, "one GPU", 167.292),
        (64, "one GPU", 561.262),
    ):
        yield Row(
            "torchbench, ResNet-50",
            kind,
            alone("v100"),
            1,
            milliseconds * 1e-3 / 3,
            trains(torchvision_net("resnet50"), size, adam, loss=soft),
            f"{source}, {size}",
        )


def xwang233():
    """timm's training script on eight A100s, float32 with convolutions in TF32, NCHW.

    The machine is not named: a DGX A100 is assumed.
    """
    yield Row(
        "xwang233, ResNet-50",
        "data parallel, one machine",
        DGX_A100,
        8,
        8 * 128 / 6499.87,
        trains(torchvision_net("resnet50"), 128, nesterov),
        "gist.github.com/xwang233/d5136facb3361af54693081da346fd33: A100x8 (bs=128), eager",
    )


ROWS = [
    row
    for rows in (
        torchgpipe,
        u39kun,
        ryujaehun,
        nvidia,
        lambda_labs,
        timm,
        willgpaik,
        ray,
        dlperf,
        high_flyer,
        ilkarman,
        torchbench,
        xwang233,
    )
    for row in rows()
]
