"""Which of four changes lowers the accuracy of d2l's second training in section 13.6?

    python benchmarks/bench_batches.py            # ten minutes of two cores

Chapter 06's walk from d2l's first line to its second, with five seeds: the network of an eighth of
the width, epochs of 1,024 images of the stand-in for Fashion-MNIST, tested on 1,024. For each
training it prints the accuracy at the end and the mean over its epochs: mean, lowest and highest of
the seeds. The last training has batches of 64 for as many steps as ten epochs of batches of 32.
"""

import copy
from itertools import islice
from multiprocessing import get_context
from statistics import mean

import torch
from torch import nn

import d2lpar

NUM_TRAIN = NUM_TEST = 1024
SEEDS = range(5)
WALK = {  # devices, batch, rate, epochs
    "first line": (1, 32, 0.1, 10),
    "goes on": (1, 32, 0.1, 10),
    "+ 2 devices": (2, 32, 0.1, 10),
    "+ batch 64": (2, 64, 0.1, 10),
    "+ rate 0.2: second line": (2, 64, 0.2, 10),
    "batch 64, 20 epochs": (2, 64, 0.1, 20),
}


def init_weights(module):
    if type(module) in [nn.Linear, nn.Conv2d]:
        nn.init.normal_(module.weight, std=0.01)


def train(net, num_gpus, batch_size, lr, num_epochs):
    """Train as chapter 06 does; return the test accuracy after each epoch."""
    train_iter, test_iter = d2lpar.load_data_fashion_mnist(batch_size, 14)
    devices = d2lpar.try_all_gpus()[:num_gpus]
    net.apply(init_weights)
    parallel = nn.DataParallel(net, device_ids=devices)
    trainer = torch.optim.SGD(net.parameters(), lr)
    accuracies = []
    for _ in range(num_epochs):
        net.train()
        for X, y in islice(train_iter, NUM_TRAIN // batch_size):
            trainer.zero_grad()
            X, y = X.to(devices[0]), y.to(devices[0])
            nn.functional.cross_entropy(parallel(X), y).backward()
            trainer.step()
        test_part = islice(test_iter, NUM_TEST // batch_size)
        accuracies.append(d2lpar.evaluate_accuracy_gpu(net, test_part))
    return accuracies


def walk(seed):
    """Return {training: its accuracies} for one seed."""
    d2lpar.ensure_gpus(2)
    torch.manual_seed(seed)
    net = d2lpar.resnet18(10, width=8).to(d2lpar.try_gpu(0))
    accuracies = {}
    for name, run in WALK.items():
        torch.manual_seed(seed)
        accuracies[name] = train(net if not accuracies else copy.deepcopy(net), *run)
    return accuracies


def main():
    with get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        walks = pool.map(walk, SEEDS, chunksize=1)
    print(f"{'training':24} {'end':>18}  {'mean of epochs':>18}")
    for name in WALK:
        ends = [each[name][-1] for each in walks]
        means = [mean(each[name]) for each in walks]
        spreads = (f"{mean(v):.2f} ({min(v):.2f}-{max(v):.2f})" for v in (ends, means))
        print(f"{name:24}", *spreads)
        print("   ", *(f"{end:.2f}/{m:.2f}" for end, m in zip(ends, means, strict=True)))


if __name__ == "__main__":
    main()
