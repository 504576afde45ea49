"""Record the picture at the top of the README: a training step on two virtual GPUs.

python tools/picture.py        on a machine that does nothing else
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import d2lpar

WIDTH, BATCH = 2048, 1024
PICTURE = Path(__file__).resolve().parents[1] / "notebooks" / "figures" / "timeline.png"


def main():
    torch.manual_seed(0)
    devices = d2lpar.virtual_gpus(2)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    net = nn.DataParallel(nn.Sequential(*layers).to(devices[0]), device_ids=devices)
    X = torch.rand(BATCH, WIDTH, device=devices[0])
    y = torch.randint(WIDTH, (BATCH,), device=devices[0])
    steps = []
    for _ in range(8):
        with d2lpar.Timeline() as timeline:
            F.cross_entropy(net(X), y).backward()
        net.zero_grad()
        steps.append(timeline)
    best = max(steps[1:], key=lambda timeline: timeline.overlap(*devices) / timeline.seconds)
    seconds = [best.busy(device) for device in devices]
    print(
        f"busy for {seconds[0]:.2f} and {seconds[1]:.2f} s of {best.seconds:.2f} s, "
        f"both at once for {best.overlap(*devices):.2f} s"
    )
    title = "One training step with nn.DataParallel on two virtual GPUs"
    best.plot(title, kinds=("kernel", "copy")).savefig(PICTURE)


if __name__ == "__main__":
    main()
