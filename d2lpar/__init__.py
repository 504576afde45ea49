"""Parallel training on one GPU, on many, or on none: the helper package of the d2lpar notebooks.

The public names are in the table below, each under the module that defines it, and are loaded on
first use. Any other name is looked up in ``d2l.torch``, the package of the book "Dive into Deep
Learning", so that a chapter of the book runs with ``import d2lpar as d2l``. A name that is in both
has the signature that d2l gives it.
"""

from importlib import import_module as _import
from importlib.util import find_spec as _find_spec

__version__ = "0.1.0"

_NAMES = {  # what all chapters use comes first
    "timing": ("Benchmark", "Timer", "seconds_in_turn", "compare", "product_flops"),
    "devices": ("try_all_gpus", "try_gpu", "ensure_gpus", "num_gpus"),
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
    "collectives": ("allreduce",),
    "plotting.charts": ("plot_bars", "plot_curves"),
    "plotting.figures": ("new_figure",),
    "timelines.timeline": ("Mark", "Timeline"),
    "timelines.schedule": ("plot_schedule",),
    "memory_use": ("SavedBytes", "peak_bytes"),
}
_OF_VGPU = (  # what chapters take from the engine
    "virtual_gpus",
    "synchronize",
    "clock",
    "host_takes",
    "Link",
    "PRESETS",
    "Machine",
    "launch",
    "equal_ranks",
    "CollectiveBytes",
)
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_HOME |= dict.fromkeys(_OF_VGPU, "vgpu")

__all__ = list(_HOME)


def __getattr__(name):
    """Load a public name or a module of this package; look any other name up in d2l.torch."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOME:
        value = getattr(_import(_HOME[name]), name)
    elif _find_spec(f"{__name__}.{name}"):
        return _import(f"{__name__}.{name}")
    else:
        value = _import(f"{__name__}._d2l").lookup(name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
