"""Modelled GPUs against published measurements, and what a modelled step costs this machine.

    python benchmarks/bench_model.py            # everything: half an hour of two cores
    python benchmarks/bench_model.py "pipeline" # the rows of a class, or of a family

(n) Rows of `published/`: of each what was measured, what is predicted, and what the null model says
    (communication and host are for nothing). Rows that were drawn by chance before the model was
    changed say how true it is: those of `published/unseen.txt` are two thirds of the programs of
    `later.toml` (sorted names, random.Random(30).sample) and of `neusight.py` (all but those of
    random.Random("NeuSight, 2026-11-26").sample), those of `seen_once.txt` were set aside until the
    model was evaluated the first time. At most one figure is fitted, a
    factor on the times of kernels to what the same source gives for one GPU. The table goes to
    `published/results.csv`.
(o) A training step of ResNet-18 under nn.DataParallel on eight modelled GPUs without values takes
    at most 0.3 s of two cores, and the time grows linearly with the number of ops.
"""

import csv
import gc
import multiprocessing
import sys
import warnings
from pathlib import Path
from statistics import median

import torch
from published import (
    CLASSES,
    language,
    later,
    modelled,
    neusight,
    predicted,
    vision,
    without_communication,
)
from report import nine_of_ten, ratio_row, seconds
from torch import nn

from d2lpar.models import resnet18
from vgpu.modelled.hardware import as_machine

HERE = Path(__file__).parent / "published"
ROWS = language.ROWS + vision.ROWS + later.ROWS + neusight.ROWS
# Families of rows that were set aside: now, and until the model had met them once
KEPT = {
    family: kept
    for kept in ("seen once", "unseen")
    for family in (HERE / f"{kept.replace(' ', '_')}.txt").read_text().splitlines()
}


# -- published rows


def of_row(number):
    """Return the number of a row, its prediction and that of the null model."""
    warnings.simplefilter("ignore")  # of operators counted by their bytes, once for each process
    row = ROWS[number]
    return number, predicted(row), without_communication(row)


def of_rows(wanted):
    """Predict rows in two processes, a new one for each; write the table and return its lines."""
    numbers = [
        number
        for number, row in enumerate(ROWS)
        if not wanted or row.kind in wanted or row.family in wanted
    ]
    lines = []
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for number, model, null in pool.imap(of_row, numbers):
            row = ROWS[number]
            kept = KEPT.get(row.family, "seen")
            figures = (f"{value:.4g}" for value in (row.published, model, null))
            machine = row.machine.gpu.name
            lines.append((row.kind, kept, row.family, machine, row.gpus, *figures, row.source))
            print(*lines[-1][:-1], f"{model / row.published - 1:+.1%}", sep=" | ", flush=True)
    if not wanted:
        with open(HERE / "results.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            names = "class,set,program,GPU,GPUs,published,predicted,null model,source"
            writer.writerow(names.split(","))
            writer.writerows(lines)
    return lines


def summary(errors):
    """Return median, 90th percentile and worst of errors, and how many are within 15 %, as text."""
    sizes = sorted(map(abs, errors))
    worst = max(errors, key=abs)
    within = sum(size <= 0.15 for size in sizes) / len(sizes)
    return (
        f"{len(sizes):4} rows: median {median(sizes):6.1%}, "
        f"nine of ten within {nine_of_ten(errors):6.1%}, "
        f"worst {worst:+7.1%}, within 15 %: {within:4.0%}"
    )


def report(lines):
    """Print what the rows of each class and set come to; return the errors of unseen rows."""
    unseen = []
    for kept in ("seen", "seen once", "unseen"):
        every = []
        for kind in (*CLASSES, ""):
            chosen = [line for line in lines if line[1] == kept and kind in ("", line[0])]
            if kind and chosen:
                every += chosen
            if not chosen:
                continue
            for name, place in (("model", 6), ("null", 7)):
                errors = [float(line[place]) / float(line[5]) - 1 for line in chosen]
                print(f"{kept:10}{kind or 'all':32}{name:6} {summary(errors)}")
                if name == "model" and kept == "unseen" and not kind:
                    unseen = errors
    return unseen


def data_parallel_step(devices):
    """Return a step of ResNet-18 under nn.DataParallel, 256 images a GPU."""
    net = nn.DataParallel(resnet18(10).to(devices[0]), device_ids=devices)
    trainer = torch.optim.SGD(net.parameters(), lr=0.1)
    size = 256 * len(devices)
    X, y = torch.empty(size, 1, 28, 28), torch.zeros(size, dtype=torch.long)

    def step():
        trainer.zero_grad()
        nn.functional.cross_entropy(net(X.to(devices[0])), y.to(devices[0])).backward()
        trainer.step()

    return step


def cost_of_a_step():
    """Return what this machine takes for a step of ResNet-18 on eight modelled GPUs, seconds."""
    step = data_parallel_step(modelled(8, as_machine("v100")))
    step()
    return median(seconds(step) for _ in range(7))


def cost_of_ops(count):
    """Return what this machine takes for each of `count` ops on four modelled GPUs, seconds.

    What the programs before have left does not count: the garbage collector leaves it alone.
    """
    gc.freeze()
    inputs = [torch.empty(100, device=device) for device in modelled(4, as_machine("v100"))]

    def work():
        for i in range(count):
            inputs[i % 4].add_(1)

    work()
    return median(seconds(work) for _ in range(5)) / count


def main():
    wanted = sys.argv[1:]
    unseen = report(of_rows(wanted))
    if wanted:
        return 0
    sizes = sorted(map(abs, unseen))
    cost = cost_of_a_step()
    few, many = cost_of_ops(5_000), cost_of_ops(50_000)
    print(f"a step of ResNet-18 on eight GPUs {cost:.3f} s, an op {many * 1e6:.1f} µs")
    kept = [
        ratio_row("(n) median error, unseen rows", median(sizes), 0.06, at_least=False),
        ratio_row("(n) nine of ten, unseen", nine_of_ten(unseen), 0.15, False, reached=0.21),
        ratio_row("(o) step of ResNet-18 on eight GPUs / 0.3 s", cost / 0.3, 1, at_least=False),
        ratio_row("(o) an op among 50,000 / among 5,000", many / few, 1.2, at_least=False),
    ]
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
