"""Reference solutions for exercise notebook 06."""

import gc
import heapq
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline


@reference
def remembered(devices, X, num_passes=2):
    """Return running mean and variance of a BatchNorm layer after passes of X on the devices."""
    norm = nn.BatchNorm1d(1).to(devices[0])
    for _ in range(num_passes):
        nn.DataParallel(norm, devices)(X)
    return norm.running_mean.item(), norm.running_var.item()


@reference
def bytes_of_0(make_net, devices):
    """Return the bytes that device 0 sends and receives in a step, and those allocated after it."""
    gc.collect()  # otherwise garbage of earlier cells may be freed meanwhile
    before = _requested(devices[0])
    net = make_net().to(devices[0])
    y = torch.arange(64, device=devices[0]) % 10
    before += y.nbytes
    with Timeline() as timeline:
        F.cross_entropy(nn.DataParallel(net, devices)(torch.ones(64, 100)), y).backward()
    links = timeline.bytes_by_link().items()
    sent = sum(n for (a, b), n in links if a == devices[0] and b in devices)
    received = sum(n for (a, b), n in links if b == devices[0] and a in devices)
    return sent, received, _requested(devices[0]) - before


def _requested(device):
    """Return the bytes of all tensors on a device, as they are: none is rounded up to 512."""
    return torch.get_device_module(device).memory_stats(device)["requested_bytes.all.current"]


def _step_seconds(T_1, k, copy_seconds):
    return T_1 / k + 2 * (k - 1) * copy_seconds


@reference
def epoch_seconds(batch, k=16, copy_seconds=2.84e-3):
    """Return the seconds of an epoch of 60,000 images."""
    num_steps = len(range(0, 60_000, batch))
    return num_steps * _step_seconds(52e-3 * batch / 256, k, copy_seconds)


@reference
def quickest(T_1, copy_seconds):
    """Return the number of devices, below 200, with the fastest step, by brute force."""
    return min(range(1, 200), key=lambda k: _step_seconds(T_1, k, copy_seconds))


@reference
def earliest_end(b, seconds, fixed):
    """Return the b-th smallest time at which any device can end an example."""
    times = [[f + t * (n + 1) for n in range(b)] for t, f in zip(seconds, fixed, strict=True)]
    return next(itertools.islice(heapq.merge(*times), b - 1, None))
