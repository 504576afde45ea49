"""What the programs here train: a small network on data drawn on the spot, and what they print."""

import atexit
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_ROWS, NUM_INPUTS, NUM_CLASSES, LR = 64, 16, 4, 0.01


def dataset():
    """Return rows of numbers, each with its class; 16 batches of 4."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(NUM_ROWS, NUM_INPUTS, generator=draw)
    return TensorDataset(X, X[:, :NUM_CLASSES].argmax(dim=1))


def network():
    """Return the network, with the same parameters in each process."""
    torch.manual_seed(0)
    layers = nn.Linear(NUM_INPUTS, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, NUM_CLASSES)
    return nn.Sequential(*layers)


def report(losses):
    """Print the losses of the steps in the first process.

    On a CPU the process then ends without Python's own end, in which threads of gloo that
    still hold a tensor may abort (github.com/pytorch/pytorch/pull/179291).
    """
    if not torch.cuda.is_available():
        atexit.register(os._exit, 0)
    if os.environ.get("RANK", "0") == "0":
        print("losses", *(f"{float(loss):.6f}" for loss in losses), flush=True)
