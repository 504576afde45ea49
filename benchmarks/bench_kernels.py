"""Modelled kernels against those that NeuSight's authors measured on four kinds of GPU, float32.

    python benchmarks/bench_kernels.py

`measured/neusight/kernels.csv` holds twice up to 60 kernels of each operator and GPU of those that
take more than 0.2 ms, drawn by chance (github.com/sitar-lab/NeuSight, scripts/asplos/data/dataset,
MIT licence); conv2d is 3 x 3, with steps of 1. They were timed by events, one at a time on an idle
GPU, so that what the host takes to launch is in the time: the column "of the host" is that of the
shortest kernels of the same operator, and is taken away here. Half of all were set aside by chance
before any was compared; with the others figures of the model were changed, see `datasheets.py`,
`gpu.py` and `kernels.py`.

A ratio above 1 is a kernel that the model makes too slow.
"""

import csv
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from published import modelled, neusight, seconds_of, vision
from report import median

MEASURED = Path(__file__).parent / "measured" / "neusight" / "kernels.csv"
GPUS = (
    vision.P100_PCIE,
    neusight.V100_PCIE_32GB,
    neusight.T4,
    neusight.A100_PCIE_40GB,
    neusight.A100_PCIE_80GB,
)


def launch(operator, sizes, device):
    """Return a function that launches an operator on tensors of these sizes."""

    def empty(*size):
        return torch.empty(size, device=device)

    if operator == "bmm":
        batch, m, k, n = sizes
        a, b = empty(batch, m, k), empty(batch, k, n)
        return lambda: torch.bmm(a, b)
    if operator == "linear":
        batch, m, k, n = sizes
        x, weight, bias = empty(batch, m, k), empty(n, k), empty(n)
        return lambda: F.linear(x, weight, bias)
    if operator == "conv2d":
        images, channels, outputs, kernel, side, stride, padding = sizes
        x, weight = empty(images, channels, side, side), empty(outputs, channels, kernel, kernel)
        return lambda: F.conv2d(x, weight, stride=stride, padding=padding)
    x, y = empty(*sizes), empty(*sizes)
    if operator == "layer_norm":
        weight, bias = empty(sizes[1]), empty(sizes[1])
        return lambda: F.layer_norm(x, sizes[1:], weight, bias)
    return {"mul": lambda: x * y, "gelu": lambda: F.gelu(x), "softmax": lambda: x.softmax(1)}[
        operator
    ]


@torch.no_grad()
def ratios():
    """Return the modelled seconds over the measured ones: lists by set, operator and GPU."""
    with open(MEASURED, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for gpu in GPUS:
        machine = replace(vision.alone(gpu), host=0.0)
        (device,) = modelled(1, machine, room=4)
        for row in rows:
            if row["GPU"] != gpu.name:
                continue
            sizes = [int(size) for size in row["sizes"].split("x")]
            took = float(row["milliseconds"]) - float(row["of the host"])
            with torch.backends.cudnn.flags(allow_tf32=False):
                seconds = seconds_of(launch(row["operator"], sizes, device))
            key = row["set"], row["operator"], gpu.name
            found.setdefault(key, []).append(1e3 * seconds / took)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = ratios()
    names = [gpu.name for gpu in GPUS]
    for part in ("seen", "unseen"):
        print(f"{part:12}", *(f"{name:>20}" for name in names))
        for operator in dict.fromkeys(key[1] for key in found):
            cells = []
            for name in names:
                values = sorted(found.get((part, operator, name), ()))
                if values:
                    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
                    cells.append(f"{median(values):.2f} ({low:.2f} - {high:.2f})")
                else:
                    cells.append("")
            print(f"{operator:12}", *(f"{cell:>20}" for cell in cells))
        errors = [abs(value - 1) for key, some in found.items() if key[0] == part for value in some]
        print(f"{part}: {len(errors)} kernels, median error {median(errors):.1%}")
