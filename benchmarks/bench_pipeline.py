"""(l) A pipeline of two virtual GPUs with 8 micro-batches against one that takes the batch whole.

With m micro-batches two equal stages are 2 m / (m + 1) times as fast as one. These are not quite
equal: the first layer's input needs no gradient, so the first stage has a product less. By the
schedule the speed-up is 1.72 instead of 1.78. At least 0.9 of it is reached, for both schedules,
where two plain threads have two cores, else that part of it: the median of rounds, in each of which
all take turns.
"""

import sys
from functools import partial
from statistics import median

import torch
from report import cores_of_two_threads, ratio_row, seconds
from torch import nn
from torch.nn import functional as F

import d2lpar
from d2lpar.chapters import pipeline_parallelism as pipelines

ROUNDS, WIDTH, BATCH_SIZE, NUM_MICRO_BATCHES = 7, 512, 4096, 8


def main():
    devices, m = d2lpar.virtual_gpus(2), NUM_MICRO_BATCHES
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(8)]
    net = nn.Sequential(*layers)
    X, y = torch.randn(BATCH_SIZE, WIDTH), torch.randint(WIDTH, (BATCH_SIZE,))
    X, y_one, y_two = X.to(devices[0]), y.to(devices[0]), y.to(devices[1])
    one = pipelines.split_into_stages(net, [], devices[:1])
    two = pipelines.split_into_stages(net, [4], devices)
    step = pipelines.pipeline_step
    schedules = {"GPipe": pipelines.gpipe(2, m)}
    schedules["1F1B"] = pipelines.one_forward_one_backward(2, m)
    runs = {"one": partial(step, one, X, y_one, F.cross_entropy, pipelines.gpipe(1, 1))}
    for name, schedule in schedules.items():
        runs[name] = partial(step, two, X, y_two, F.cross_entropy, schedule)
    for work in runs.values():
        seconds(work)  # to warm up
    times = {name: [] for name in [*runs, "cores"]}
    for _ in range(ROUNDS):
        for name, work in runs.items():
            times[name].append(seconds(work))
        times["cores"].append(cores_of_two_threads())
    print(f"    two plain threads have {median(times['cores']):.2f} cores")
    kept, forward, backward = [], [4, 4], [7, 8]  # matrix products of each stage's four layers
    for name, schedule in schedules.items():
        marks = pipelines.predict_schedule(schedule, forward, backward)
        predicted = m * sum(forward + backward) / max(mark.end for stage in marks for mark in stage)
        rounds = zip(times["one"], times[name], times["cores"], strict=True)
        share = median(one / two * 2 / cores for one, two, cores in rounds) / predicted
        kept.append(
            ratio_row(f"(l) {name} on two / one, of the predicted {predicted:.3f}", share, 0.9)
        )
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
