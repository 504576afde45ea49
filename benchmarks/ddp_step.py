"""A training step of DDP on one thread, the same under every launcher.

torchrun --standalone --nproc-per-node 2 benchmarks/ddp_step.py BATCH_SIZE NUM_STEPS
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def step_seconds(batch_size, num_steps, size=28):
    """Return the median of the seconds of a step of ResNet-18, in an existing process group.

    Args:
        batch_size: examples in all ranks together.
        num_steps: how many steps are timed, after one to warm up.
        size: height and width of the images.
    """
    from d2lpar.models import resnet18

    torch.manual_seed(0)
    net = DistributedDataParallel(resnet18(10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    b = batch_size // dist.get_world_size()
    X, y = torch.rand(b, 1, size, size), torch.randint(10, (b,))
    seconds = []
    for _ in range(num_steps + 1):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds = step_seconds(*map(int, sys.argv[1:]))
    if dist.get_rank() == 0:
        print(seconds)
    dist.barrier()
    dist.destroy_process_group()
