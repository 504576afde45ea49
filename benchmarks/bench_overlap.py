"""(e) Copying on a side stream, from pinned memory, while the default stream computes.

The overlap fraction is the time in which a copy and a kernel run together, over the shorter of
the two totals. It is at least 0.95.
"""

import sys
from statistics import median

import torch
from report import ratio_row

import d2lpar
from vgpu import Link

ROUNDS, COUNT, SIZE = 7, 40, 1000


def fraction(device):
    x = torch.rand(SIZE, SIZE, device=device)
    host = torch.empty(SIZE, SIZE).pin_memory()
    target = torch.empty(SIZE, SIZE, device=device)
    side = torch.vgpu.Stream(device)
    with d2lpar.Timeline() as timeline:
        for _ in range(COUNT):
            x.mm(x)
        with torch.vgpu.stream(side):
            for _ in range(COUNT // 2):
                target.copy_(host, non_blocking=True)
    kernels = timeline.select(device, kind="kernel")
    copies = timeline.select(device, kind="copy")
    shorter = min(timeline.overlap(kernels, kernels), timeline.overlap(copies, copies))
    return timeline.overlap(kernels, copies) / shorter


def main():
    num_bytes = SIZE * SIZE * 4
    (device,) = d2lpar.virtual_gpus(1, link=Link(num_bytes / 0.015, name="4 MB in 15 ms"))
    fractions = [fraction(device) for _ in range(ROUNDS)]
    return int(not ratio_row("(e) overlap fraction of copies and kernels", median(fractions), 0.95))


if __name__ == "__main__":
    sys.exit(main())
