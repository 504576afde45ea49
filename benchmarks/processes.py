"""Peers of virtual GPUs: independent processes with one thread each."""

import os
import time

import torch


def _products(rank, barrier, results, count, size):
    torch.set_num_threads(1)
    x = torch.rand(size, size)
    x.mm(x)
    barrier.wait()
    start = time.perf_counter()
    for _ in range(count):
        x.mm(x)
    results[rank] = time.perf_counter() - start


def seconds_of_products(processes, count, size):
    """Return the seconds that `count` products of size x size take in each process, the longest."""
    return _spawn(_products, processes, count, size)


def _train(rank, barrier, results, batch_size, steps, port):
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from d2lpar.models import resnet18

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = resnet18(10)
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=barrier.parties)
        net = DistributedDataParallel(net)
    trainer = torch.optim.SGD(net.parameters(), lr=0.01)
    X, y = torch.rand(batch_size, 1, 28, 28), torch.zeros(batch_size, dtype=torch.long)
    for step in range(steps + 1):
        if step == 1:
            barrier.wait()
            start = time.perf_counter()
        trainer.zero_grad()
        torch.nn.functional.cross_entropy(net(X), y).backward()
        trainer.step()
    results[rank] = (time.perf_counter() - start) / steps
    barrier.wait()
    if port is not None:
        del net, trainer
        dist.destroy_process_group()


def seconds_of_training(processes, batch_size, steps, port=None):
    """Return the seconds of a step of ResNet-18 at a total batch of `batch_size`, the longest.

    The processes train with DDP over gloo at `port`; without a port each trains for itself.
    """
    return _spawn(_train, processes, batch_size // processes, steps, port)


def _spawn(function, processes, *args):
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Array("d", processes)
    workers = [
        context.Process(target=function, args=(rank, barrier, results, *args))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise RuntimeError(f"a peer process ended with exit code {worker.exitcode}")
    return max(results)
