"""Import torchvision beside a CPU build of torch."""

import importlib
import sys
import threading

import torch

_lock = threading.Lock()


def import_torchvision():
    """Import and return torchvision, even with a CPU build of torch.

    The compiled operators of PyPI's torchvision, a CUDA build, do not load with a CPU build of
    torch: the import fails with "operator torchvision::nms does not exist". With placeholders for
    two operators it succeeds, and data sets, transforms and models work.
    """
    with _lock:  # concurrent retries would delete each other's modules
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::nms does not exist" not in str(error):
                raise
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                torch.library.define(
                    f"torchvision::{operator}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )
        for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        return importlib.import_module("torchvision")
