"""(r) A DDP step of ResNet-18 on two virtual GPUs in processes over the same on CPU tensors, gloo.
(s) The bytes that each rank sends in a collective, against its formula: exactly.
(t) A sum of 16 MB over a set link against the formula.
(u) DDP in processes on modelled RTX 4090s, against what d2l-neu published for two and four.
"""

from collections import Counter
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from published.vision import OPTIMIZERS
from report import ratio_row
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import d2lpar
from vgpu import Link, clock, start_recording, stop_recording

ROUNDS, BATCH_SIZE, NUM_STEPS = 9, 64, 4
WARM_UP = 3  # steps: DDP builds its buckets anew after the first, and then plans are made for them
MEASURED = Link(0.25e9, 1e-3)  # slow enough for gloo, on a machine with two busy cores


def rank_and_device(**figures):
    """Return rank, number of ranks, virtual GPU and a group with the backend vccl."""
    rank, k = dist.get_rank(), dist.get_world_size()
    device = d2lpar.virtual_gpus(k, **figures)[rank]
    torch.vgpu.set_device(device)
    return rank, k, device, dist.new_group(backend="vccl")


def seconds_of_steps(make_net, optimizer_of, X, y, group, num_steps):
    """Return what each of `num_steps` steps of DDP takes by the clock in force, after WARM_UP."""
    torch.manual_seed(0)
    net = DistributedDataParallel(make_net().to(X.device), process_group=group)
    optimizer = optimizer_of(net.parameters())
    seconds = []
    for _ in range(num_steps + WARM_UP):
        d2lpar.synchronize()
        dist.barrier(group)
        start = clock()
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        d2lpar.synchronize()
        seconds.append(clock() - start)
    return seconds[WARM_UP:]


def step_on(kind):
    """Return the median seconds of a step on CPU tensors ("cpu") or on a virtual GPU ("vgpu")."""
    device, group = torch.device("cpu"), dist.new_group(backend="gloo")
    if kind == "vgpu":
        _, _, device, group = rank_and_device()
    else:
        torch.set_num_threads(1)
    b = BATCH_SIZE // dist.get_world_size()
    X = torch.rand(b, 1, 28, 28).to(device)
    y = torch.randint(10, (b,)).to(device)
    net, optimizer = partial(d2lpar.resnet18, 10), partial(torch.optim.SGD, lr=0.01)
    return median(seconds_of_steps(net, optimizer, X, y, group, NUM_STEPS))


def sent_bytes():
    """Return for each collective the bytes in a recording, and those of the formula."""
    _, k, device, group = rank_and_device(peer_link=Link(1e12))
    n = 1000 * k
    x = torch.ones(n, device=device)
    parts = [torch.empty(n // k, device=device) for _ in range(k)]
    programs = {
        "all_reduce": (lambda: dist.all_reduce(x, group=group), 2 * (k - 1) * 4 * n // k),
        "broadcast": (lambda: dist.broadcast(x, 0, group=group), 4 * n),
        "reduce": (lambda: dist.reduce(x, 0, group=group), 4 * n),
        "all_gather": (
            lambda: dist.all_gather(parts, x[: n // k], group=group),
            (k - 1) * 4 * n // k,
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(parts[0], list(x.split(n // k)), group=group),
            (k - 1) * 4 * n // k,
        ),
        "all_to_all": (
            lambda: dist.all_to_all(parts, list(x.split(n // k)), group=group),
            (k - 1) * 4 * n // k,
        ),
    }
    rows = {}
    for name, (program, formula) in programs.items():
        spans = start_recording()
        program()
        d2lpar.synchronize()
        stop_recording(spans)
        rows[name] = sum(span.num_bytes for span in spans if span.kind == "collective"), formula
    return rows


def seconds_of_sum(num_bytes):
    """Return the median seconds of a sum over the set link."""
    _, _, device, group = rank_and_device(peer_link=MEASURED)
    x = torch.ones(num_bytes // 4, device=device)
    spans = start_recording()
    for _ in range(2 * ROUNDS):
        dist.barrier(group)
        dist.all_reduce(x, group=group)
        d2lpar.synchronize()
    stop_recording(spans)
    return median(span.seconds for span in spans if span.name == "all_reduce")


def modelled_step():
    """Return the seconds of a step on modelled RTX 4090s, one for each rank."""
    figures = {"model": "rtx4090", "values": False}
    _, _, device, group = rank_and_device(**figures)
    X = torch.empty(256, 1, 64, 64, device=device)
    y = torch.zeros(256, dtype=torch.long, device=device)
    sgd = partial(OPTIMIZERS["sgd"], foreach=False)
    return seconds_of_steps(partial(d2lpar.resnet18, 10), sgd, X, y, group, 2)[-1]


def main():
    d2lpar.launch(int, nproc=2)  # starts the server of processes
    on_cpus, on_gpus, ratios = [], [], []
    for _ in range(ROUNDS):
        on_cpus.append(max(d2lpar.launch(step_on, "cpu", nproc=2)))
        on_gpus.append(max(d2lpar.launch(step_on, "vgpu", nproc=2)))
        ratios.append(on_gpus[-1] / on_cpus[-1])
    print(f"DDP, ResNet-18, batch {BATCH_SIZE}, two processes, median of {ROUNDS}:")
    print(f"  CPU tensors, gloo {median(on_cpus):.3f} s, virtual GPUs {median(on_gpus):.3f} s")
    kept = ratio_row("(r) DDP step on virtual GPUs / on CPU tensors", median(ratios), 1.05, False)

    wrong = Counter()
    for k in (2, 3):
        for rows in d2lpar.launch(sent_bytes, nproc=k):
            for name, (recorded, formula) in rows.items():
                wrong[name, k] += recorded != formula
    print(f"collectives whose bytes differ from the formula: {[*(+wrong)] or 'none'}")
    kept &= ratio_row(
        "(s) ranks whose bytes differ from the formula", sum(wrong.values()), 0, False
    )

    num_bytes = 16 * 10**6
    formula = num_bytes / MEASURED.bandwidth + 2 * MEASURED.latency
    took = max(d2lpar.launch(seconds_of_sum, num_bytes, nproc=2))
    print(f"a sum of 16 MB over {MEASURED}: {took:.4f} s, by the formula {formula:.4f} s")
    kept &= ratio_row("(t) sum over a link / formula", took / formula, 1.05, False)

    alone = max(d2lpar.launch(modelled_step, nproc=1))
    for k, published in ((2, 1.76), (4, 3.29)):
        gain = k * alone / max(d2lpar.launch(modelled_step, nproc=k))
        print(f"modelled RTX 4090s, DDP: {k} over one {gain:.2f}, published {published} (d2l-neu)")
        name = f"(u) error of the modelled gain of {k} RTX 4090s"
        kept &= ratio_row(name, abs(gain / published - 1), 0.15, False)
    return 0 if kept else 2


if __name__ == "__main__":
    raise SystemExit(main())
