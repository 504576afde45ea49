"""One modelled device that stands for many equal ranks."""

import gc

import pytest
import torch
from torch import nn

import d2lpar
from d2lpar.parallel.equal_ranks import MIB, Buckets, EqualRanks
from d2lpar.virtual import clock
from d2lpar.virtual.hardware import GPU, Machine
from d2lpar.virtual.links import Link


class NoTime(GPU):
    """A GPU whose kernels take no time."""

    def kernel_seconds(self, kernel):
        return 0.0


@pytest.fixture
def device():
    gpu = NoTime("none", 2**34, 1.0, {"float32": 1.0}, 1, Link(1e9))
    (device,) = d2lpar.virtual_gpus(1, model=Machine(gpu, launch_seconds=0.0))
    return device


def seconds_of(work):
    d2lpar.synchronize()
    start = clock()
    work()
    d2lpar.synchronize()
    return clock() - start


def test_a_sum_keeps_the_links_busy_and_the_kernels_go_on(device):
    ranks = EqualRanks(device, 4, lambda num_bytes: num_bytes / 100)
    with d2lpar.Timeline() as timeline:
        torch.vgpu._sleep(1)
        first = ranks.allreduce(200)  # from 1 to 3
        ranks.allreduce(300)  # from 3 to 6
        torch.vgpu._sleep(3)  # from 1 to 4
        first.wait()
        torch.vgpu._sleep(1)  # from 4 to 5
    sums = timeline.select(name="allreduce")
    assert [(span.start, span.end, span.num_bytes) for span in sums] == [(1, 3, 200), (3, 6, 300)]
    assert [span.end for span in timeline.select(kind="kernel")] == [1, 4, 5]


def test_one_rank_sums_nothing(device):
    ranks = EqualRanks(device, 1, lambda num_bytes: 1 / 0)
    assert seconds_of(lambda: ranks.allreduce(100).wait()) == 0


def test_buckets_are_summed_during_backward_last_layers_first(device):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5))).to(device)  # 1 MiB
    sums, begun = [], []
    net[0].weight.register_post_accumulate_grad_hook(lambda parameter: begun.append(len(sums)))
    ranks = EqualRanks(device, 2, lambda num_bytes: sums.append(num_bytes) or 1.0)
    buckets = Buckets(net, ranks, bucket_mib=2)
    net(torch.ones(1, 512, device=device)).sum().backward()
    assert begun == [2]  # before the gradient of the first layer is there
    buckets.finish()
    assert sums == [MIB, 2 * MIB, 2 * MIB]  # the first bucket is smaller


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_those_of_a_mean_over_equal_ranks(device, steps):
    """The sum over ranks is not computed: k equal gradients, each divided by k, stand for it."""
    net = nn.Linear(3, 2).to(device)
    buckets = Buckets(net, EqualRanks(device, 2, lambda num_bytes: 1.0))
    X = torch.ones(4, 3, device=device)
    for _ in range(steps):
        net.zero_grad()
        net(X).sum().backward()
        before = seconds_of(buckets.finish)
    assert before == 0  # the sum had ended when the time was first read
    assert net.weight.grad.cpu().eq(2.0).all()  # 4 / k


def test_finish_waits_for_the_sums(device):
    net = nn.Linear(3, 2).to(device)
    buckets = Buckets(net, EqualRanks(device, 2, lambda num_bytes: 1.0))

    def step():
        net(torch.ones(4, 3, device=device)).sum().backward()
        buckets.finish()
        torch.vgpu._sleep(1)

    assert seconds_of(step) == 2


def test_a_module_that_is_dropped_is_freed(device):
    net = nn.Linear(300, 300).to(device)
    buckets = Buckets(net, EqualRanks(device, 2, lambda num_bytes: 1.0))
    net(torch.ones(4, 300, device=device)).sum().backward()
    buckets.finish()
    del net, buckets
    gc.collect()
    assert torch.vgpu.memory_allocated(device) == 0


def test_buckets_hold_one_dtype_and_its_bytes(device):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half()).to(device)
    sums = []
    ranks = EqualRanks(device, 2, lambda num_bytes: sums.append(num_bytes) or 1.0)
    buckets = Buckets(net, ranks)
    for layer, dtype in zip(net, (torch.float32, torch.float16), strict=True):
        layer(torch.ones(1, 8, device=device, dtype=dtype)).sum().backward()
    buckets.finish()
    assert sorted(sums) == [2 * 72, 4 * 72]


def test_a_parameter_without_a_gradient_is_named(device):
    net = nn.Linear(3, 2).to(device)
    buckets = Buckets(net, EqualRanks(device, 2, lambda num_bytes: 1.0))
    net.weight.sum().backward()
    with pytest.raises(RuntimeError, match="1 gradients came for 2 parameters"):
        buckets.finish()


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_the_number_of_ranks_is_checked(device, k):
    with pytest.raises(ValueError, match=f"got {k}"):
        EqualRanks(device, k, lambda num_bytes: 1.0)
