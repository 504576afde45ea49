"""Host time of operators and modules on modelled GPUs."""

import math
import threading
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vgpu.private.autograd import (
    autograd_node,
    backward_number,
    forward_number,
    in_backward,
    sequence_number,
)
from vgpu.runtime import scheduler


@dataclass(frozen=True)
class Host:
    """Host time of a program on modelled GPUs, in seconds.

    `nn.RNN`, `nn.LSTM` and `nn.GRU` are one operator of cuDNN on CUDA, and one of autograd, see
    `_cudnn_rnn` in aten/src/ATen/native/cudnn/RNN.cpp: further operators of these modules take no
    host time.

    Args:
        operator: for each operator issued by Python code.
        module: for each call of an `nn.Module` without submodules, besides its operators.
        autograd: for each operator issued by autograd, in C++, in a backward pass.
        source: the source of the figures.

    Raises:
        ValueError: a figure is negative or infinite.
    """

    operator: float
    module: float
    autograd: float
    source: str = "the caller"

    def __post_init__(self):
        for name in ("operator", "module", "autograd"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} of a Host must be finite and non-negative, in seconds: got {value}"
                )

    def start(self):
        global _hook, _hook_after
        if self.module:
            # One step each once there is a handle, see interrupts.py: a return and a store.
            _hook = register_module_forward_pre_hook(self._enter)
            _hook_after = register_module_forward_hook(_leave, always_call=True)

    def stop(self):
        for hook in (_hook, _hook_after):
            if hook is not None:
                hook.remove()

    def _enter(self, module, inputs):
        # Compiled code does not call modules; the check avoids a graph break in torch.compile.
        if not torch.compiler.is_compiling() and not any(True for _ in module.children()):
            scheduler.clock.enter_module(self.module)
            if is_of_cudnn(module):
                recurrent_calls.enter(sequence_number())

    def seconds(self):
        """Return the host time of the next operator of the calling thread."""
        return recurrent_calls.seconds(self.operator, self.autograd)

    def scaled(self, factor, source):
        """Return a host with all times multiplied by `factor`."""
        figures = (factor * each for each in (self.operator, self.module, self.autograd))
        return Host(*figures, source)

    def __str__(self):
        micros = [each * 1e6 for each in (self.operator, self.module, self.autograd)]
        if not self.module and self.operator == self.autograd:
            return f"host {micros[0]:.3g} µs"
        return "host " + "/".join(f"{each:.3g}" for each in micros) + " µs"


_hook = _hook_after = None  # handles of the hooks on module calls


def _leave(module, inputs, outputs):
    if is_of_cudnn(module):
        recurrent_calls.leave(sequence_number())


# Training code of modules in eager PyTorch; fitted by benchmarks/bench_model.py.
EAGER = Host(8e-6, 50e-6, 25e-6, "fitted to published eager runs, see docs/modelled_gpus.md")


def as_host(host):
    """Return a `Host`, given as such, as "eager", or as seconds of each operator.

    Raises ValueError for another name or negative seconds, TypeError for another type.
    """
    if isinstance(host, Host):
        return host
    if host == "eager":
        return EAGER
    if isinstance(host, (int, float)) and not isinstance(host, bool):
        return Host(float(host), 0.0, float(host))
    error = ValueError if isinstance(host, str) else TypeError
    raise error(f'host must be "eager", seconds or a Host: got {host!r}')


# -- recurrent layers, whose many operators count as one

_CALLS_KEPT = 10_000  # for later backward passes


def is_of_cudnn(module):
    return isinstance(module, torch.nn.RNNBase) and torch.backends.cudnn.enabled


class RecurrentCalls(threading.local):
    """The calls of recurrent modules in a thread, by autograd's numbers of their operators."""

    def __init__(self):
        self.issued = None  # whether the current call has issued an operator; None outside calls
        self.firsts, self.ends = [], []  # range of operator numbers of each call
        self.latest = None  # number of the pass, and first one of the call whose backward runs

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
        now = backward_number(), self.firsts[i]
        self.latest, before = now, self.latest
        return 0.0 if before == now else backward


recurrent_calls = RecurrentCalls()  # of the calling thread
