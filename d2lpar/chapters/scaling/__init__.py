"""Chapter 11: cost and gain of more devices.

costs      FLOPs of a training step, seconds of an allreduce
workloads  BERT, a small convolutional network
plots      figures
"""

from d2lpar.chapters.scaling.costs import (
    allreduce_seconds,
    training_flops,
    two_level_seconds,
)
from d2lpar.chapters.scaling.plots import plot_points, plot_runs
from d2lpar.chapters.scaling.workloads import Bert, convnet

__all__ = [
    "Bert",
    "allreduce_seconds",
    "convnet",
    "plot_points",
    "plot_runs",
    "training_flops",
    "two_level_seconds",
]
