"""Parallel training on one GPU, on many, or on none: the helper package of the d2lpar notebooks.

The public names stand in the table below, each under the module that defines it, and are loaded
on first use. Any other name is looked up in ``d2l.torch``, the package of the book "Dive into
Deep Learning", so that a chapter of the book runs with ``import d2lpar as d2l``. A name of ours
that stands in d2l too has the signature that d2l gives it.
"""

import importlib

__version__ = "0.1.0"

_NAMES = {
    "devices": (
        "describe",
        "ensure_gpus",
        "num_gpus",
        "peak_bytes",
        "synchronize",
        "try_all_gpus",
        "try_gpu",
        "virtual_gpus",
    ),
    "timing": (
        "Benchmark",
        "Mark",
        "Timeline",
        "Timer",
        "best_seconds",
        "compare",
        "product_flops",
        "seconds_a_call",
    ),
    "graphs": ("OperatorGraph",),
    "compiling": ("captured_graph", "compile_backend", "count_calls", "kernel_text"),
    "plotting": ("Animator", "agreement", "bars", "curves", "progress", "schedule", "stacks"),
    "data": ("load_data_fashion_mnist", "split_batch"),
    "models": ("Residual", "alexnet", "lenet", "resnet18"),
    "training": ("Accumulator", "accuracy", "data_parallel_step", "evaluate_accuracy_gpu", "sgd"),
    "collectives": ("allgather", "allreduce", "allreduce_bytes"),
    "pipelines": (
        "Task",
        "bubble",
        "gpipe",
        "one_forward_one_backward",
        "pipeline_step",
        "predict_marks",
        "record_marks",
        "split_layers",
        "task_seconds",
    ),
    "costs": (
        "allreduce_seconds",
        "crossover_bytes",
        "server_seconds",
        "training_flops",
        "two_level_seconds",
    ),
    "launcher": ("launch",),
    "ranks": (
        "CollectiveBytes",
        "SavedBytes",
        "StepRecorder",
        "bucket_bytes",
        "gradient_arrivals",
        "held_bytes",
        "rank_part",
        "recorded_step",
        "rows_of_ranks",
        "step_seconds",
        "time_allreduce",
    ),
    "servers": ("parameter_servers", "start_ray"),
    "sharded": (
        "ColumnParallel",
        "Exchanges",
        "OnEach",
        "RowParallel",
        "tensor_parallel",
        "whole",
    ),
    "splits": ("by_data", "by_layers", "inside_layers", "step_cost"),
}
_MODULES = (
    *_NAMES,
    "agent",
    "clicks",
    "garments",
    "kineto",
    "spans",
    "virtual",
    "worker",
)
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_HOME)


def __getattr__(name):
    """Load a public name, a module of ours or, for any other name, what d2l.torch has under it."""
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
