"""Host time of recurrent layers, whose many operators count as one.

`nn.RNN`, `nn.LSTM` and `nn.GRU` are one operator of cuDNN on CUDA, and one of autograd.
"""

import threading
from bisect import bisect_right

import torch

from vgpu.private.autograd import autograd_node, forward_number, in_backward

_CALLS_KEPT = 10_000  # for later backward passes


def is_of_cudnn(module):
    """Return whether a module is one operator of cuDNN on CUDA."""
    return isinstance(module, torch.nn.RNNBase) and torch.backends.cudnn.enabled


class RecurrentCalls(threading.local):
    """The calls of recurrent modules in a thread, by autograd's numbers of their operators."""

    def __init__(self):
        self.issued = None  # whether the current call has issued an operator; None outside calls
        self.firsts, self.ends = [], []  # range of operator numbers of each call
        self.latest = None  # first number of the call whose backward runs

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
        """Return the host time of the next operator, in forward or issued by autograd.

        Of the operators of a call, and of those of its backward, only the first takes time.
        """
        if not in_backward() or torch.is_grad_enabled():
            before = self.issued
            if before is not None:
                self.issued = True
            return 0.0 if before else forward
        node = autograd_node() if self.firsts else None
        number = None if node is None else forward_number(node)
        if number is None:
            return backward
        i = bisect_right(self.firsts, number) - 1
        if i < 0 or number >= self.ends[i]:
            return backward
        self.latest, before = self.firsts[i], self.latest
        return 0.0 if before == self.firsts[i] else backward


recurrent_calls = RecurrentCalls()  # of the calling thread
