"""Reference solutions for exercise notebook 09."""

import itertools

import torch
from torch.nn import functional as F

from d2lpar.chapters.pipeline_parallelism import (
    bubble_fraction,
    gpipe,
    one_forward_one_backward,
    pipeline_step,
    predict_schedule,
    split_into_stages,
)
from d2lpar.exercises.marks import reference
from d2lpar.timelines.timeline import Timeline
from vgpu import virtual_gpus


@reference
def least_micro_batches(k, limit):
    """Return the smallest number of micro-batches for a bubble, by brute force."""
    for m in itertools.count(1):
        if bubble_fraction(predict_schedule(gpipe(k, m), [1.0] * k, [2.0] * k)) <= limit:
            return m


@reference
def bytes_of_messages(net, cuts, m):
    """Return the bytes of each message between devices in a step with 64 images."""
    devices = virtual_gpus(len(cuts) + 1, model="v100", values=False)
    stages = split_into_stages(net, cuts, devices)
    X = torch.zeros(64, 1, 28, 28, device=devices[0])
    y = torch.zeros(64, dtype=torch.int64, device=devices[-1])
    schedule = one_forward_one_backward(len(stages), m)
    with Timeline() as timeline:
        pipeline_step(stages, X, y, F.cross_entropy, schedule)
    return [span.num_bytes for span in timeline.select(engine="p2p")]


@reference
def pace_and_best(cuts, seconds, num_bytes, bandwidth):
    """Return the pace of a pipeline, and the smallest pace with as many cuts."""

    def pace(cuts):
        stages = itertools.pairwise([0, *cuts, len(seconds)])
        links = [num_bytes[i - 1] / bandwidth for i in cuts]
        return max([sum(seconds[i:j]) for i, j in stages] + links)

    choices = itertools.combinations(range(1, len(seconds)), len(cuts))
    return pace(cuts), min(map(pace, choices))
