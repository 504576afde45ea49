"""Modelled GPUs against published measurements, and what a modelled step costs this machine.

(n) Each program is run on modelled GPUs. A row with one GPU shows how far the bare model is off;
    nothing in it was fitted to that row, unless hardware.py says so. For the rows with several GPUs
    all kernel times are multiplied by the one factor that makes the row with one GPU right, and
    then they are predictions. At least 15 % in every such row, 8 % in the median.
(q) Where this machine has a GPU, kernels and training steps on it, modelled and measured.
(o) A training step of ResNet-18 under nn.DataParallel on eight modelled GPUs without values takes
    at most 0.3 s of two cores, and the time grows linearly with the number of ops.
"""

import gc
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from report import median, ratio_row, seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import d2lpar
from d2lpar._d2l import import_torchvision
from d2lpar.models import resnet18
from d2lpar.parallel.pipelines import gpipe, pipeline_step
from d2lpar.parallel.strategies import split_by_data
from d2lpar.virtual import Link, clock, equal_ranks
from d2lpar.virtual.datasheets import GPUS
from d2lpar.virtual.hardware import MACHINES, Machine, Scaled


def seconds_of(step):
    """Return the modelled seconds of a step that has run once before."""
    step()
    d2lpar.synchronize()
    start = clock()
    step()
    d2lpar.synchronize()
    return clock() - start


def modelled(n, model, **options):
    gc.collect()  # the network before this one
    return d2lpar.virtual_gpus(n, model=model, values=False, **options)


# -- the programs: functions of a GPU and of a number of GPUs that return seconds


def products(gpu, k):
    """50 products of 4000 x 4000 on each of k GPUs (d2l 13.3)."""
    inputs = [torch.empty(4000, 4000, device=device) for device in modelled(k, gpu)]
    return seconds_of(lambda: [X.mm(X) for X in inputs for _ in range(50)])


def products_and_copies(gpu, copies, overlapped):
    """The same on one GPU with copies of the results to the CPU, after it or beside it."""
    (device,) = modelled(1, gpu)
    X = torch.empty(4000, 4000, device=device)
    results = [X.mm(X) for _ in range(50)]

    def step():
        outputs = [X.mm(X) for _ in range(50)] if overlapped or not copies else results
        for y in outputs if copies else ():
            y.to("cpu", non_blocking=overlapped)

    return seconds_of(step)


def lenet_epoch(k, loading):
    """An epoch of LeNet from scratch, 256 images in all, with `loading` seconds a batch."""
    devices = modelled(k, "v100")
    net, X, y = d2lpar.lenet(), torch.empty(256, 1, 28, 28), torch.zeros(256, dtype=torch.long)
    return 235 * (seconds_of(split_by_data(net, X, y, devices, 0.2).step) + loading)


def data_parallel_step(devices):
    """Return a step of ResNet-18 under nn.DataParallel, 256 images a GPU."""
    net = nn.DataParallel(resnet18(10).to(devices[0]), device_ids=devices)
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    size = 256 * len(devices)
    X, y = torch.empty(size, 1, 28, 28), torch.zeros(size, dtype=torch.long)

    def step():
        trainer.zero_grad()
        nn.functional.cross_entropy(net(X.to(devices[0])), y.to(devices[0])).backward()
        trainer.step()

    return step


def data_parallel_epoch(gpu, k):
    """An epoch of Fashion-MNIST with `data_parallel_step` (d2l 13.6)."""
    return seconds_of(data_parallel_step(modelled(k, gpu))) * -(-60_000 // (256 * k))


def ddp(make_net, make_batch, make_trainer, hosts, **options):
    """Return the program of a step with DDP: one rank that stands for k equal ones.

    The options are those of `DistributedDataParallel`.
    """

    def program(gpu, k):
        (device,) = modelled(1, **hosts(gpu, k))
        with torch.device("meta"):
            net = make_net()
        net.to_empty(device=device)
        trainer = make_trainer(net.parameters())
        X, y = make_batch(device)

        def step():
            trainer.zero_grad()
            nn.functional.cross_entropy(net(X).flatten(0, -2), y).backward()
            trainer.step()

        with equal_ranks(k):
            net = DistributedDataParallel(net, **options)
            step()  # after which DDP builds its buckets anew
            return seconds_of(step)

    return program


def images(batch_size):
    return lambda device: (
        torch.empty(batch_size, 3, 224, 224, device=device),
        torch.zeros(batch_size, dtype=torch.long, device=device),
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


class Layer(nn.Module):
    """A k-th of a layer of a transformer: heads and hidden units are split over the ranks."""

    def __init__(self, width, heads, k):
        super().__init__()
        self.heads = heads // k
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width // k), nn.Linear(width // k, width)
        self.up, self.down = nn.Linear(width, 4 * width // k), nn.Linear(4 * width // k, width)

    def forward(self, x):  # (N, T, C)
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(_Split.apply(self.first(x))).chunk(3, 2)
        )
        weights = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(3)
        weights = nn.functional.dropout(weights, 0.1)
        attended = self.out((weights @ v).transpose(1, 2).flatten(2))
        x = x + nn.functional.dropout(_Sum.apply(attended), 0.1)
        hidden = nn.functional.gelu(self.up(_Split.apply(self.second(x))))
        return x + nn.functional.dropout(_Sum.apply(self.down(hidden)), 0.1)


class _Split(torch.autograd.Function):
    """What all ranks have goes into the part of each, so gradients are summed (Megatron's f)."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """The sum of what all ranks have computed (Megatron's g)."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Megatron(nn.Module):
    """A k-th of a transformer that predicts tokens (N, T), and keeps the inputs of layers only."""

    def __init__(self, width, heads, depth, vocabulary, k):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary // k, width)
        self.layers = nn.ModuleList(Layer(width, heads, k) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x) @ self.embedding.weight.T


def tokens(batch_size, length):
    return lambda device: (
        torch.zeros(batch_size, length, dtype=torch.long, device=device),
        torch.zeros(batch_size * length, dtype=torch.long, device=device),
    )


MEGATRON = {1: (1920, 15, 24), 2: (2304, 18, 30), 4: (3072, 24, 36), 8: (4096, 32, 42)}


def megatron_step(gpu, k):
    """A step of Megatron-LM 1.0, weak scaling: width, heads and depth grow with k."""
    (device,) = modelled(1, gpu, peer_link=NVSWITCH)
    width, heads, depth = MEGATRON[k]
    with torch.device("meta"):
        net = Megatron(width, heads, depth, 51_200, k).half()
    net.to_empty(device=device)
    masters = [torch.empty(p.shape, device=device) for p in net.parameters()]
    for master in masters:
        master.grad = torch.empty_like(master)
    trainer = torch.optim.Adam(masters, foreach=True)
    X, y = tokens(8, 1024)(device)

    def step():
        for parameter in net.parameters():
            parameter.grad = None
        scores = net(X).flatten(0, 1).float()
        (nn.functional.cross_entropy(scores, y) * 1024).backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad.copy_(parameter.grad)
        trainer.step()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            parameter.data.copy_(master)

    with equal_ranks(k):
        return seconds_of(step)


def pipeline(k, num_micro_batches):
    """Return samples per second of GPipe's pipeline, 48 equal layers on k GPUs."""
    devices = modelled(k, "v100-32gb")
    width = 2048
    stages = [
        nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(48 // k)))
        for device in devices
    ]
    size = 1024 * num_micro_batches
    X, y = torch.empty(size, width, device=devices[0]), torch.empty(size, width, device=devices[-1])
    schedule = gpipe(k, num_micro_batches)
    return size / seconds_of(lambda: pipeline_step(stages, X, y, nn.functional.mse_loss, schedule))


# -- hosts: what `virtual_gpus` takes for k of a GPU. Of 25 GB/s a link, NVLink 2 reaches 0.96 (Dell
# HPC), NCCL 0.92 of a network's rate.


def dgx1(network):
    """Return hosts with 8 V100s and a network of so many bytes/s.

    As many links of a GPU lead to the k - 1 others (nvidia-smi topo -m), and a ring uses them all.
    """
    links = {1: 6, 2: 2, 4: 4}

    def hosts(gpu, k):
        machine = Machine(gpu, gpus=8, network=Link(0.92 * network, 5e-6))
        return {"model": machine, "peer_link": Link(links.get(k, 6) * 25e9 * 0.96, 5e-6)}

    return hosts


NVSWITCH = Link(6 * 25e9 * 0.96, 5e-6)  # of a V100 in a DGX-2, which has six links


def big_basin(gpu, k):
    """Return hosts with 8 P100 and 50 Gbit Ethernet."""
    return {"model": replace(MACHINES["bigbasin"], gpu=gpu)}


THROUGH_THE_HOST = Link(4.5e9 / 2, 5e-6, name="through the host")  # 2 N bytes at 4.5 GB/s


def through_the_host(gpu, k):
    """Return a host of RTX 4090s, whose sums run at what the authors measured between two."""
    return {"model": gpu, "peer_link": THROUGH_THE_HOST}


def torchvision_net(name):
    return lambda: getattr(import_torchvision().models, name)()


class Bert(nn.Module):
    """BERT base with the loss of all tokens."""

    def __init__(self, width=768, vocabulary=30_528):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12)

    def forward(self, tokens):
        return self.layers(self.embedding(tokens)) @ self.embedding.weight.T


def adam(parameters):
    return torch.optim.Adam(parameters, foreach=True)


def images_of_64(device):
    return (
        torch.empty(256, 1, 64, 64, device=device),
        torch.zeros(256, dtype=torch.long, device=device),
    )


# -- the rows

SUITE = "PyTorch's DDP benchmark suite (pytorch/pytorch, benchmarks/distributed/ddp)"
DLPERF = "Oneflow-Inc/DLPerf, NVIDIA's PyTorch 20.03"


def rows():
    """Yield (name, GPU, program, {number of GPUs: published seconds}, source)."""
    yield "50 products of 4000 x 4000", "v100", products, {1: 0.4660, 2: 0.4659}, "d2l.ai 13.3"
    yield (
        "ResNet-18, nn.DataParallel",
        "v100",
        data_parallel_epoch,
        {1: 12.2, 2: 7.5},
        "d2l.ai 13.6",
    )
    for name, published in (
        ("resnet50", (0.100, 0.103, 0.103, 0.104, 0.104)),
        ("resnet101", (0.171, 0.176, 0.176, 0.179, 0.179)),
        ("resnext50_32x4d", (0.147, 0.153, 0.153, 0.157, 0.157)),
        ("resnext101_32x8d", (0.425, 0.438, 0.439, 0.447, 0.450)),
    ):
        program = ddp(torchvision_net(name), images(32), sgd, dgx1(4 * 12.5e9))
        took = dict(zip((1, 2, 4, 8, 16), published, strict=True))
        yield f"{name}, DDP", "v100-32gb", program, took, SUITE
    program = ddp(torchvision_net("resnet50"), images(128), sgd, dgx1(12.5e9))
    rates = {1: 367.29, 4: 1449.48, 8: 2887.65, 16: 5716.79, 32: 10917.09}
    took = {k: 128 * k / rate for k, rate in rates.items()}
    yield "resnet50, 128 images, DDP", "v100", program, took, DLPERF
    one_bucket = {"bucket_cap_mb": 1000}  # message_size=250000000 in NVIDIA's script
    program = ddp(Bert, tokens(32, 128), adam, dgx1(12.5e9), **one_bucket)
    rates = {1: 119.6, 4: 457.72, 8: 921.32, 16: 1499.4, 32: 2885.81}
    took = {k: 32 * k / rate for k, rate in rates.items()}
    yield "BERT base, one bucket, DDP", "v100", program, took, DLPERF
    took = {1: 1.288, 2: 1.242, 4: 1.357, 8: 1.508}
    yield (
        "Megatron-LM, tensor parallel",
        "v100-32gb",
        megatron_step,
        took,
        "nv-adlr.github.io/MegatronLMV1",
    )


def others():
    """Yield (name, published, predicted, source) of rows of another kind: seconds and ratios."""
    loading = (3.0 - lenet_epoch(1, 0)) / 235  # fitted to the row of one GPU
    yield "LeNet from scratch, 2 GPUs, s", 2.8, lenet_epoch(2, loading), "d2l.ai 13.5"
    program = ddp(lambda: resnet18(10), images_of_64, sgd, through_the_host)
    alone = program("rtx4090", 1)
    for k, published in ((2, 1.76), (4, 3.29)):
        gain = k * alone / program("rtx4090", k)
        yield f"ResNet-18, DDP, RTX 4090: {k} / 1", published, gain, "d2l-neu, multi-gpu-practice"
    own = {"forward_sync_buffers": False}  # each GPU has its own statistics, see their section 2.3
    program = ddp(torchvision_net("resnet50"), images(32), sgd, big_basin, **own)
    eight = program("p100", 8)
    for k, published in ((256, 0.232 / 0.256), (352, 0.232 / 0.264)):
        efficiency = eight / program("p100", k)
        yield f"ResNet-50, P100: 8 GPUs / {k}", published, efficiency, "Goyal et al. 2017"
    base = pipeline(2, 1)
    for k, published in ((2, 1.8), (4, 3.4), (8, 6.3)):
        gain = pipeline(k, 32) / base
        yield f"GPipe, Transformer: K = {k}, M = 32", published, gain, "Huang et al. 2019, table 2"


def scaled_to(published, gpu, program):
    """Return the GPU on which the program takes the published seconds on one, and its factor."""
    factor = 1.0
    for _ in range(3):  # launches and copies do not scale
        factor *= published / program(Scaled(gpu, factor), 1)
    return Scaled(gpu, factor), factor


def table():
    """Print the rows; return the errors of those with several GPUs."""
    print(f"{'program':38} GPUs  published  predicted   error   source")
    errors = []
    for name, copies, overlapped, published in (
        ("products alone", False, False, 0.4656),
        ("results copied to the CPU", True, False, 2.3125),
        ("both at a time", True, True, 1.6907),
    ):
        alone = products_and_copies("v100", copies, overlapped)
        off = f"{alone / published - 1:+6.1%}"
        print(f"{name:38} {1:4} {published:10.4g} {alone:10.4g}  {off}   d2l.ai 13.3")
    for name, gpu, program, published, source in rows():
        alone = program(gpu, 1)
        off = f"{alone / published[1] - 1:+6.1%}"
        print(f"{name:38} {1:4} {published[1]:10.4g} {alone:10.4g}  {off}   {source}", flush=True)
        fitted, factor = scaled_to(published[1], gpu, program)
        print(f"{'':43} kernels x {factor:.3f}:")
        for k in [k for k in published if k > 1]:
            predicted = program(fitted, k)
            errors.append(predicted / published[k] - 1)
            print(f"{'':38} {k:4} {published[k]:10.4g} {predicted:10.4g}  {errors[-1]:+6.1%}")
    for name, published, predicted, source in others():
        errors.append(predicted / published - 1)
        print(f"{name:43} {published:10.4g} {predicted:10.4g}  {errors[-1]:+6.1%}   {source}")
    return errors


# -- what a GPU at hand takes, if there is one


def kernels_and_steps(device):
    """Yield (name, function): kernels alone, and training steps of the chapters' networks."""
    for size, dtype in ((512, torch.float32), (4096, torch.float32), (4096, torch.bfloat16)):
        X = torch.ones(size, size, device=device, dtype=dtype)
        yield f"product of {size} x {size}, {dtype}", lambda X=X: X @ X
    X = torch.ones(2**26, device=device)
    yield "sum of two vectors of 256 MB", lambda: X + X
    images = torch.ones(64, 64, 56, 56, device=device)
    convolution = nn.Conv2d(64, 64, 3, padding=1, device=device)
    yield "convolution of 64 images of 56 x 56", lambda: convolution(images)
    for name, net, shape in (
        ("LeNet, 256 images", d2lpar.lenet(), (256, 1, 28, 28)),
        ("ResNet-18, 256 images", resnet18(10), (256, 1, 28, 28)),
        ("resnet50, 64 images", torchvision_net("resnet50")(), (64, 3, 224, 224)),
    ):
        net.to(device)
        X, y = torch.ones(shape, device=device), torch.zeros(shape[0], dtype=torch.long).to(device)
        trainer = sgd(net.parameters())

        def step(net=net, X=X, y=y, trainer=trainer):
            trainer.zero_grad()
            nn.functional.cross_entropy(net(X), y).backward()
            trainer.step()

        yield f"step of {name}", step


def gpu_at_hand():
    """Print modelled and measured times of kernels and steps on the GPU of this machine."""
    called = torch.cuda.get_device_name(0)
    model = next((name for name in GPUS if name.removeprefix("rtx") in called.lower()), None)
    if model is None:
        print(f"(q) {called}: no figures in hardware.py")
        return
    measured = [d2lpar.best_seconds(work, 5) for _, work in kernels_and_steps("cuda:0")]
    (device,) = modelled(1, model)
    for (name, work), took in zip(kernels_and_steps(device), measured, strict=True):
        predicted = d2lpar.best_seconds(work, 1)
        print(f"(q) {called}: {name:42} measured {took * 1e3:9.3f} ms, ", end="")
        print(f"modelled {predicted * 1e3:9.3f} ms, {predicted / took - 1:+6.1%}")


def cost_of_a_step():
    """Return what this machine takes for a step of ResNet-18 on eight modelled GPUs, seconds."""
    step = data_parallel_step(modelled(8, "v100"))
    step()
    return median(seconds(step) for _ in range(7))


def cost_of_ops(count):
    """Return what this machine takes for each of `count` ops on four modelled GPUs, seconds.

    What the programs before have left does not count: the garbage collector leaves it alone.
    """
    gc.freeze()
    inputs = [torch.empty(100, device=device) for device in modelled(4, "v100")]

    def work():
        for i in range(count):
            inputs[i % 4].add_(1)

    work()
    return median(seconds(work) for _ in range(5)) / count


def main():
    if torch.cuda.is_available():
        gpu_at_hand()
    errors = list(map(abs, table()))
    print(f"{len(errors)} predictions for several GPUs")
    cost = cost_of_a_step()
    few, many = cost_of_ops(5_000), cost_of_ops(50_000)
    print(f"a step of ResNet-18 on eight GPUs {cost:.3f} s, an op {many * 1e6:.1f} µs")
    kept = [
        ratio_row("(n) largest error", max(errors), 0.15, at_least=False),
        ratio_row("(n) median error", median(errors), 0.08, at_least=False),
        ratio_row("(o) step of ResNet-18 on eight GPUs / 0.3 s", cost / 0.3, 1, at_least=False),
        ratio_row("(o) an op among 50,000 / among 5,000", many / few, 1.2, at_least=False),
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
