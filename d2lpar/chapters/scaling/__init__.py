"""Chapter 12: cost and gain of more devices.

costs      seconds of an allreduce
workloads  BERT, a small convolutional network
plots      a figure
"""

from d2lpar.chapters.scaling.costs import allreduce_seconds, two_level_seconds
from d2lpar.chapters.scaling.plots import plot_runs
from d2lpar.chapters.scaling.workloads import Bert, convnet

__all__ = [
    "Bert",
    "allreduce_seconds",
    "convnet",
    "plot_runs",
    "two_level_seconds",
]
