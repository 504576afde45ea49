"""A pair of linear layers split inside its layers over two virtual GPUs, against one.

(m) A training step of an MLP, 256 inputs, 16384 hidden units, 256 outputs, batch 512, with plain
    SGD: split in a column and a row over two virtual GPUs it is at least 1.5 times as fast as
    unsplit on one, where two plain threads have two cores, else that part of it. The link between
    them is a V100's PCIe 3.0 x16, slowed as much as the device is; the formula of chapter 10,
    S = 2 / (1 + 4/3 F / (B h)), gives 1.85 there.
"""

import sys
from statistics import median

import torch
from report import cores_of_two_threads, ratio_row, seconds
from torch.nn import functional as F

import d2lpar
from d2lpar.chapters.tensor_parallelism import copied, summed

ROUNDS, BATCH, SIZE, WIDTH = 5, 512, 256, 16384
V100_FLOPS = 15.7e12


def step_on(devices):
    """Return a function that takes a training step of the MLP split over devices."""
    k = len(devices)
    X, y = torch.randn(BATCH, SIZE), torch.randint(SIZE, (BATCH,))
    U, V = torch.randn(WIDTH, SIZE) / SIZE**0.5, torch.randn(SIZE, WIDTH) / WIDTH**0.5
    X, y = ([tensor.to(device) for device in devices] for tensor in (X, y))
    Us, Vs = (
        [part.to(device).requires_grad_() for part, device in zip(parts, devices, strict=True)]
        for parts in (U.chunk(k), V.chunk(k, dim=1))
    )

    def step():
        H = [F.relu(F.linear(*each)) for each in zip(copied(X), Us, strict=True)]
        outputs = summed([F.linear(*each) for each in zip(H, Vs, strict=True)])
        losses = [F.cross_entropy(*each) for each in zip(outputs, y, strict=True)]
        torch.autograd.backward(losses)
        d2lpar.sgd([*Us, *Vs], lr=0.01, batch_size=1)

    return step


def main():
    torch.set_num_threads(1)
    devices = d2lpar.virtual_gpus(2)
    slower = V100_FLOPS / d2lpar.product_flops(devices[0])
    link = d2lpar.PRESETS["pcie3"].scaled(slower)
    devices = d2lpar.virtual_gpus(2, peer_link=link)
    torch.manual_seed(0)
    one, two = (step_on(devices[:k]) for k in (1, 2))
    for step in (one, two):
        seconds(step)
    gains = []
    for _ in range(ROUNDS):
        times = seconds(one), seconds(two)
        cores = cores_of_two_threads()
        gains.append(times[0] / times[1] * 2 / cores)
        print("    seconds a step: one {:.4f}, two {:.4f}; cores {:.2f}".format(*times, cores))
    name = f"(m) MLP of width {WIDTH}: one / two, on two whole cores"
    return int(not ratio_row(name, median(gains), 1.5))


if __name__ == "__main__":
    sys.exit(main())
