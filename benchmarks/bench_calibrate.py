"""(p) Kernels timed once on one virtual GPU predict the measured steps of two.

For programs of the chapters 04 to 06, 08 and 09: `calibrate` runs the work of both devices on
one, one operator at a time; a simulation of two such devices then predicts the step that two
virtual GPUs take by the wall clock. The median of the errors is at most 10 % on an idle machine.
"""

import sys
from statistics import median

import torch
from report import ratio_row
from torch import nn

import d2lpar
import vgpu
from d2lpar.chapters.distributed_data_parallel import data_parallel_step
from d2lpar.chapters.pipeline_parallelism import gpipe, pipeline_step, split_layers
from d2lpar.chapters.tensor_parallelism.sharded_layers import tensor_parallel
from d2lpar.models import resnet18
from d2lpar.timing import best_seconds

LINK = 2e9  # bytes/s
ROUNDS = 5


def overlapped_copies(devices):
    """Chapter 04: batches are copied on a side stream while the one before is multiplied."""
    device = devices[0]
    batches = [torch.ones(1500, 1500).pin_memory() for _ in range(8)]
    weight, side = torch.ones(1500, 1500, device=device), torch.vgpu.Stream(device)

    def step():
        for batch in batches:
            with side:
                X = batch.to(device, non_blocking=True)
                arrival = side.record_event()
            arrival.wait(torch.vgpu.current_stream(device))
            X.record_stream(torch.vgpu.current_stream(device))
            X @ weight

    return step


def mlp(width=1024, depth=6):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def pipelined(devices):
    """Chapter 08: GPipe, two stages, eight micro-batches."""
    stages = split_layers(mlp(), [3], devices)
    X = torch.ones(2048, 1024, device=devices[0])
    y = torch.ones(2048, 1024, device=devices[1])
    return lambda: pipeline_step(stages, X, y, nn.functional.mse_loss, gpipe(2, 8))


def tensor_split(devices):
    """Chapter 09: layers split by columns and rows."""
    net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    net = tensor_parallel(net, devices)
    X = [torch.ones(1024, 1024, device=device) for device in devices]
    return lambda: net(X)[0].sum().backward()


def from_scratch(devices):
    """Chapter 05: replicas, gradients summed by hand."""
    net, X, y = mlp(depth=4), torch.ones(1024, 1024), torch.zeros(1024, dtype=torch.long)
    return lambda: data_parallel_step(net, X, y, devices, 0.1)


def data_parallel(devices):
    """Chapter 06: ResNet-18 under nn.DataParallel, or half of its work on one device."""
    k = len(set(devices))
    net = resnet18(10).to(devices[0])
    net = nn.DataParallel(net, device_ids=devices) if k > 1 else net
    X, y = torch.ones(32 * k, 1, 28, 28), torch.zeros(32 * k, dtype=torch.long)
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step():
        trainer.zero_grad()
        nn.functional.cross_entropy(net(X.to(devices[0])), y.to(devices[0])).backward()
        trainer.step()

    return step


PROGRAMS = (overlapped_copies, pipelined, tensor_split, from_scratch, data_parallel)


def main():
    torch.set_num_threads(1)
    errors = []
    for program in PROGRAMS:
        ratios = []
        for _ in range(ROUNDS):
            devices = d2lpar.virtual_gpus(2, link=LINK)
            times = vgpu.calibrate(program([devices[0]] * 2), devices[0])
            measured = best_seconds(program(devices), 3)
            d2lpar.virtual_gpus(2, model=times, values=False)
            predicted = best_seconds(program(devices), 1)
            ratios.append(predicted / measured)
        errors.append(abs(median(ratios) - 1))
        estimated = len(times.estimated)
        print(
            f"    {program.__name__:18} predicted {predicted:.3f} s, measured {measured:.3f} s, "
            f"ratio {median(ratios):.3f}; {len(times.seconds)} kernels, {estimated} estimated",
            flush=True,
        )
    kept = ratio_row("(p) calibrated on one, two: median error", median(errors), 0.1, False)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
