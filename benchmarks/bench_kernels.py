"""Modelled kernels against those that others measured, one at a time on an idle GPU.

    python benchmarks/bench_kernels.py

- NeuSight, `measured/neusight/kernels.csv`: operators of PyTorch in float32 on four kinds of GPU,
  twice up to 60 of each that take more than 0.2 ms, drawn by chance (github.com/sitar-lab/NeuSight,
  scripts/asplos/data/dataset, MIT licence); conv2d is 3 x 3, with steps of 1. Events timed them,
  so that what the host takes to launch is in the time: the column "of the host" is that of the
  shortest kernels of the same operator, and is taken away here.
- DeepBench, `measured/deepbench/kernels.csv`: products and convolutions of networks of 2017,
  called from C++ one after the other (github.com/baidu-research/DeepBench, results/train, Apache
  licence), with cuDNN 7.6 on V100 and T4 and cuDNN 6 on P100 and GTX 1080 Ti. Sizes of `mm` are M,
  N and K of BLAS and whether each matrix is transposed; those of a convolution are N, C, H, W, its
  output channels, and the height and width of kernel, padding and stride.

Half of each, by chance, was set aside before any was compared. With the other halves, figures of
the model were changed, see `datasheets.py`, `modelled_gpu.py` and `kernels.py`.

A ratio above 1 is a kernel that the model makes too slow.
"""

import csv
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from published import modelled, neusight, seconds_of
from published.hardware import GPUS

from vgpu import Machine

MEASURED = Path(__file__).parent / "measured"
SOURCES = {
    "neusight": neusight.GPUS_MEASURED[:-1],
    "deepbench": [GPUS[name] for name in ("v100", "t4", "P100 PCIe", "GTX 1080 Ti")],
}


def launch(operator, sizes, dtype, device):
    """Return a function that launches an operator on tensors of these sizes."""
    sizes = sizes.split("x")
    numbers = [int(size) for size in sizes if size.isdecimal()]

    def empty(*size):
        return torch.empty(size, device=device, dtype=dtype)

    if operator == "mm":  # of BLAS, whose columns are the rows of torch
        m, n, k = numbers
        of_a, of_b = sizes[3:]
        a = empty(k, m) if of_a == "N" else empty(m, k).t()
        b = empty(n, k) if of_b == "N" else empty(k, n).t()
        return lambda: torch.mm(b, a)
    if operator == "bmm":
        batch, m, k, n = numbers
        a, b = empty(batch, m, k), empty(batch, k, n)
        return lambda: torch.bmm(a, b)
    if operator == "linear":
        batch, m, k, n = numbers
        x, weight, bias = empty(batch, m, k), empty(n, k), empty(n)
        return lambda: F.linear(x, weight, bias)
    if operator == "conv2d":
        images, channels, outputs, kernel, side, stride, padding = numbers
        window = (each for each in (kernel, padding, stride) for _ in range(2))
        numbers = [images, channels, side, side, outputs, *window]
    if operator in ("conv2d", "convolution", "gradient of images", "gradient of weights"):
        images, channels, height, width, outputs, *window = numbers
        kernel, padding, stride = window[:2], window[2:4], window[4:]
        x, weight = empty(images, channels, height, width), empty(outputs, channels, *kernel)
        convolve = partial(F.conv2d, x, weight, stride=stride, padding=padding)
        if not operator.startswith("gradient"):
            return convolve
        of_images = operator == "gradient of images"
        rest = None, stride, padding, (1, 1), False, (0, 0), 1, (of_images, not of_images, False)
        return partial(torch.ops.aten.convolution_backward, convolve(), x, weight, *rest)
    x, y = empty(*numbers), empty(*numbers)
    if operator == "layer_norm":
        weight, bias = empty(numbers[1]), empty(numbers[1])
        return lambda: F.layer_norm(x, numbers[1:], weight, bias)
    return {"mul": lambda: x * y, "gelu": lambda: F.gelu(x), "softmax": lambda: x.softmax(1)}[
        operator
    ]


@torch.no_grad()
def ratios(source):
    """Return the modelled seconds over the measured ones: lists by set, operator and GPU.

    Args:
        source: "neusight" or "deepbench".
    """
    with open(MEASURED / source / "kernels.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for gpu in SOURCES[source]:
        machine = Machine(gpu, gpus=1, host=0.0)
        (device,) = modelled(1, machine, room=4)
        for row in rows:
            if row["GPU"] != gpu.name:
                continue
            took = float(row["milliseconds"]) - float(row.get("of the host", 0))
            dtype = row.get("dtype", "float32")
            with torch.backends.cudnn.flags(allow_tf32=False):
                work = launch(row["operator"], row["sizes"], getattr(torch, dtype), device)
                seconds = seconds_of(work)
            key = row["set"], f"{row['operator']} {dtype}", gpu.name
            found.setdefault(key, []).append(1e3 * seconds / took)
    return found


def show(source):
    """Print the median and the middle eight tenths of each operator, GPU and set."""
    found = ratios(source)
    names = [gpu.name for gpu in SOURCES[source]]
    for part in ("seen", "unseen"):
        print(f"{source + ', ' + part:28}", *(f"{name:>20}" for name in names))
        for operator in dict.fromkeys(key[1] for key in found):
            cells = []
            for name in names:
                values = sorted(found.get((part, operator, name), ()))
                if values:
                    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
                    cells.append(f"{median(values):.2f} ({low:.2f} - {high:.2f})")
                else:
                    cells.append("")
            print(f"{operator:28}", *(f"{cell:>20}" for cell in cells))
        errors = [abs(value - 1) for key, some in found.items() if key[0] == part for value in some]
        print(f"{part}: {len(errors)} kernels, median error {median(errors):.1%}\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for source in SOURCES:
        show(source)
