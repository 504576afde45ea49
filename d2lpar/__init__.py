"""Parallel training on one GPU, on many, or on none: the helper package of the d2lpar notebooks.

The public names are in the table below, each under the module that defines it, and are loaded on
first use. Any other name is looked up in ``d2l.torch``, the package of the book "Dive into Deep
Learning", so that a chapter of the book runs with ``import d2lpar as d2l``. A name that is in both
has the signature that d2l gives it.
"""

import importlib
import os

__version__ = "0.1.0"

_NAMES = {  # what all chapters use comes first
    "timing": (
        "Benchmark",
        "Timer",
        "seconds_in_turn",
        "compare",
        "product_flops",
    ),
    "devices": (
        "try_all_gpus",
        "try_gpu",
        "ensure_gpus",
        "virtual_gpus",
        "num_gpus",
        "synchronize",
        "describe",
    ),
    "models": ("resnet18", "Residual", "lenet"),
    "animator": ("Animator",),
    "plotting.progress": ("progress",),
    "training": (
        "Accumulator",
        "accuracy",
        "evaluate_accuracy_gpu",
        "sgd",
        "train_batch_ch13",
        "train_ch13",
    ),
    "data.batches": ("split_batch",),
    "data.fashion_mnist": ("load_data_fashion_mnist",),
    "data.cifar10": ("load_cifar10",),
    "parallel.collectives": ("allreduce",),
    "plotting.charts": ("plot_bars", "plot_curves", "plot_stacks"),
    "timelines.timeline": ("Mark", "Timeline"),
    "timelines.gantt": ("plot_schedule",),
    "memory": ("SavedBytes", "peak_bytes"),
    "processes.launcher": ("launch",),
    "virtual": ("Span", "calibrate", "clock", "host_takes"),
}
_WINGS = "data graphs parallel plotting processes programs servers timelines virtual".split()
_MODULES = (*_WINGS, "animator", "devices", "memory", "models", "timing", "training")
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name):
    """Load a public name, a module of this package or, for any other name, what d2l.torch has."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        value = importlib.import_module(f"{__name__}._d2l").lookup(name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__, *_MODULES})


if os.environ.get("D2LPAR_CUDA"):  # under `d2lpar run`, where `import torch` loads a part of d2lpar
    importlib.import_module("torch")
