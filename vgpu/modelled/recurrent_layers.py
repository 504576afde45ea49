"""The operators of a recurrent layer, which count as one for the host.

`nn.RNN`, `nn.LSTM` and `nn.GRU` are one operator of cuDNN on CUDA, and one of autograd; here they
consist of many.
"""

import threading
from bisect import bisect_right

import torch

from vgpu.private.autograd import autograd_node, forward_number, in_backward

_CALLS_KEPT = 10_000  # for a backward pass to come


def is_of_cudnn(module):
    """Return whether cuDNN would run a module on CUDA, as one operator."""
    return isinstance(module, torch.nn.RNNBase) and torch.backends.cudnn.enabled


class RecurrentCalls(threading.local):
    """The calls of recurrent modules in a thread, by the numbers of their operators in autograd."""

    def __init__(self):
        self.issued = None  # in a call, whether an operator of it was issued
        self.firsts, self.ends = [], []  # the numbers of each call's operators
        self.latest = None  # the call whose backward runs

    def enter(self, number):
        if len(self.firsts) == _CALLS_KEPT:
            del self.firsts[: _CALLS_KEPT // 2], self.ends[: _CALLS_KEPT // 2]
        self.firsts.append(number)
        self.ends.append(number)
        self.issued = False

    def leave(self, number):
        self.ends[-1] = number
        self.issued = None

    def seconds(self, forward, backward):
        """Return what an operator takes: one of forward, or one that autograd issues."""
        if in_backward() and not torch.is_grad_enabled():
            return self.backward_seconds(backward)
        return self.forward_seconds(forward)

    def forward_seconds(self, seconds):
        """Return `seconds` for the first operator of a call, and for those of no call."""
        if self.issued is None:
            return seconds
        self.issued, before = True, self.issued
        return 0.0 if before else seconds

    def backward_seconds(self, seconds):
        """Return `seconds` for the first operator of a call's backward, and for those of none."""
        node = autograd_node() if self.firsts else None
        number = None if node is None else forward_number(node)
        if number is None:
            return seconds
        i = bisect_right(self.firsts, number) - 1
        if i < 0 or number >= self.ends[i]:
            return seconds
        self.latest, before = self.firsts[i], self.latest
        return 0.0 if before == self.firsts[i] else seconds


recurrent_calls = RecurrentCalls()  # of the calling thread
