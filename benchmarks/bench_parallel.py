"""Two virtual GPUs against one, and against two processes: matrix products and ResNet-18.

(a) 50 products of 1000 x 1000: the parallel efficiency of two virtual GPUs is at least 0.95 of
    what two independent single-threaded processes reach on this machine.
(b) ResNet-18, batch 64: `nn.DataParallel` on two virtual GPUs trains at least 1.75 times as fast
    as one, or 0.95 of what half the batch in each of two processes that exchange nothing gains on
    this machine where that is less; and at least 0.95 as fast as DDP over gloo with two
    single-threaded processes.
(d) One virtual GPU costs at most 3 % over plain CPU tensors with as many threads.
"""

import socket
import sys
from statistics import median

import torch
from processes import seconds_of_products, seconds_of_training
from report import ratio_row, seconds

import d2lpar
from d2lpar.models import resnet18

ROUNDS, COUNT, SIZE, BATCH, STEPS = 5, 50, 1000, 64, 3


def products(devices):
    inputs = [torch.rand(SIZE, SIZE, device=device) for device in devices]

    def work():
        for x in inputs:
            for _ in range(COUNT):
                x.mm(x)

    work()
    return work


def training(net, device):
    X = torch.rand(BATCH, 1, 28, 28, device=device)
    y = torch.zeros(BATCH, dtype=torch.long, device=device)
    trainer = torch.optim.SGD(net.parameters(), lr=0.01)

    def work():
        for _ in range(STEPS):
            trainer.zero_grad()
            torch.nn.functional.cross_entropy(net(X), y).backward()
            trainer.step()

    work()
    return work


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    torch.set_num_threads(1)
    devices = d2lpar.virtual_gpus(2)
    one, both = products(devices[:1]), products(devices)
    ours, peers = [], []
    for _ in range(ROUNDS):
        ours.append(2 * seconds(one) / seconds(both) / 2)
        peers.append(seconds_of_products(1, COUNT, SIZE) / seconds_of_products(2, COUNT, SIZE))
    print(
        f"(a) efficiency of two virtual GPUs {median(ours):.3f}, of processes {median(peers):.3f}"
    )
    kept = [
        ratio_row(
            "(a) efficiency of virtual GPUs / of processes",
            median(own / peer for own, peer in zip(ours, peers, strict=True)),
            0.95,
        )
    ]

    cpu = training(resnet18(10), "cpu")
    single = training(resnet18(10).to(devices[0]), devices[0])
    net = torch.nn.DataParallel(resnet18(10).to(devices[0]), device_ids=devices)
    parallel = training(net, devices[0])
    overhead, gain, limit, against = [], [], [], []
    for _ in range(ROUNDS):
        times = [seconds(work) / STEPS for work in (cpu, single, parallel)]
        ddp = seconds_of_training(2, BATCH, STEPS, free_port())
        apart = [seconds_of_training(processes, BATCH, STEPS) for processes in (1, 2)]
        overhead.append(times[1] / times[0])
        gain.append(times[1] / times[2])
        limit.append(apart[0] / apart[1])
        against.append(ddp / times[2])
        print(
            "    seconds a step: CPU {:.3f}, one {:.3f}, two {:.3f}, DDP {:.3f}, "
            "a process {:.3f}, two {:.3f}".format(*times, ddp, *apart)
        )
    print(f"    two processes that exchange nothing gain {median(limit):.3f}")
    least = min(1.75, 0.95 * median(limit))
    kept.append(ratio_row("(b) ResNet-18: one virtual GPU / two", median(gain), least))
    kept.append(ratio_row("(b) ResNet-18: DDP's step / two virtual GPUs'", median(against), 0.95))
    kept.append(
        ratio_row(
            "(d) ResNet-18: one virtual GPU / plain CPU", median(overhead), 1.03, at_least=False
        )
    )
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
