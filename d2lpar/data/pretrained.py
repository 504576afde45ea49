"""The body of a ResNet-18 that was trained on ImageNet, if its weights are available.

They are looked for in torch hub's folder, then downloaded to it (45 MB).
"""

import hashlib
import os
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

from d2lpar import _d2l
from d2lpar.data.sources import STALL_SECONDS, cache, require_connection, socket_timeout

URL = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
SHA256 = "f37072fd"  # the first digits of the file's SHA-256; they are in its name, too
BEGINS = (b"PK", b"\x80\x02")  # what torch.save writes: a zip archive, or a pickle in older files
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's colours, from torchvision


def imagenet_body(side=32):
    """Return ResNet-18 without its head, with torchvision's weights for ImageNet, if available.

    It prints a line that says whether they are. With D2LPAR_DATA=synthetic they are not looked for.

    Args:
        side: the side that images are scaled to, in pixels; the weights were trained with 224.

    Returns:
        A network with the children stem, stage1 to stage4, and pool, which maps images (N, 3, H, W)
        in [0, 1] to features (N, 512); or None if there are no weights.
    """
    try:
        if os.environ.get("D2LPAR_DATA") == "synthetic":
            raise ValueError("D2LPAR_DATA=synthetic")
        weights = _weights()
        net = _d2l.import_torchvision().models.resnet18()
        net.load_state_dict(weights)
    except Exception as error:
        reason = (getattr(error, "strerror", None) or str(error)).split("\n")[0]
        print(f"ResNet-18's weights for ImageNet are not here and cannot be had ({reason}).")
        return None
    print("ResNet-18's weights for ImageNet are here: the body need not be trained.")
    stem = _Standardize(side), net.conv1, net.bn1, net.relu, net.maxpool
    stages = {f"stage{i}": getattr(net, f"layer{i}") for i in (1, 2, 3, 4)}
    pool = nn.Sequential(net.avgpool, nn.Flatten())
    return nn.Sequential(OrderedDict(stem=nn.Sequential(*stem), **stages, pool=pool))


class _Standardize(nn.Module):
    """Scale images (N, 3, H, W) to a side, and standardize their colours as for ImageNet."""

    def __init__(self, side):
        super().__init__()
        self.side = side
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, X):
        if X.shape[-1] != self.side:
            X = nn.functional.interpolate(X, (self.side, self.side), mode="bilinear")
        return (X - self.mean) / self.std


def _weights():
    """Return the state dict, from torch hub's folder or downloaded to it.

    The first line of an exception says why that is not possible.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", Path(URL).name)
    if not path.is_file():
        cache().mkdir(parents=True, exist_ok=True)
        require_connection(URL, cache() / "resnet18.offline", BEGINS)
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket_timeout(STALL_SECONDS):
            torch.hub.download_url_to_file(URL, str(path), SHA256, progress=False)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if not found.startswith(SHA256):
        raise ValueError(f"{path.name} is wrong or cut short (SHA-256 {found[:8]}, not {SHA256})")
    return torch.load(path, map_location="cpu", weights_only=True)
