"""Steps of several modelled H100s: what they send, and when."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d2lpar.chapters.tensor_parallelism import record_pipeline_step, record_step
from vgpu import PRESETS

WIDTH = 8192  # wide enough for rings: small sums take a tree, which sends more


def net_on(gpu):
    with torch.device(gpu):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(4)))


def test_one_device_sends_nothing_and_eight_sum_all_gradients():
    assert not record_step(nn.Sequential, net_on, (64, WIDTH), 1).select(kind="collective")
    step = record_step(DistributedDataParallel, net_on, (64, WIDTH), 8)
    gradients = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    sent = sum(span.num_bytes for span in step.select(kind="collective"))
    assert sent == pytest.approx(2 * 7 / 8 * gradients, rel=1e-3)


def test_a_slower_link_makes_the_same_collectives_longer():
    links = None, PRESETS["pcie5-measured"]
    steps = [record_step(DistributedDataParallel, net_on, (64, WIDTH), 8, link) for link in links]
    fast, slow = (step.select(kind="collective") for step in steps)
    assert [span.num_bytes for span in fast] == [span.num_bytes for span in slow]
    assert steps[0].seconds < steps[1].seconds


def test_a_pipeline_sends_activations_and_their_gradients_over_each_cut():
    b, k, m = 4096, 4, 8
    step = record_pipeline_step(net_on, (b, WIDTH), k, m)
    messages = step.select(kind="copy", engine="p2p")
    assert len(messages) == 2 * (k - 1) * m
    assert sum(span.num_bytes for span in messages) == 2 * (k - 1) * 2 * b * WIDTH
    assert step.overlap(*step.devices[:2]) > 0
