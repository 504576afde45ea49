"""Record the picture at the top of the README: a training step on two virtual GPUs.

python tools/picture.py        on a machine that does nothing else
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import d2lpar

PICTURE = Path(__file__).resolve().parents[1] / "notebooks" / "figures" / "timeline.png"


def main():
    torch.manual_seed(0)
    devices = d2lpar.virtual_gpus(2)
    net = nn.DataParallel(d2lpar.resnet18(10).to(devices[0]), device_ids=devices)
    X = torch.rand(128, 1, 28, 28, device=devices[0])
    y = torch.randint(10, (128,), device=devices[0])
    steps = []
    for _ in range(4):
        with d2lpar.Timeline() as timeline:
            with timeline.mark("forward"):
                loss = F.cross_entropy(net(X), y)
            with timeline.mark("backward"):
                loss.backward()
        net.zero_grad()
        steps.append(timeline)
    best = min(steps[1:], key=lambda timeline: timeline.seconds)
    seconds = [best.busy(device) for device in devices]
    print(f"busy for {seconds[0]:.2f} and {seconds[1]:.2f} s of {best.seconds:.2f} s")
    best.plot("nn.DataParallel on two virtual GPUs: one step of ResNet-18").savefig(PICTURE)


if __name__ == "__main__":
    main()
