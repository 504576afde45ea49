"""What the host takes to issue an operator to modelled GPUs."""

import functools
import math
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from vgpu.private.autograd import autograd_node, forward_number, in_backward, sequence_number
from vgpu.runtime import scheduler
from vgpu.tensors.tensor import VirtualTensor


@dataclass(frozen=True)
class Host:
    """The seconds that the host of modelled GPUs takes to run a program.

    `nn.RNN`, `nn.LSTM` and `nn.GRU` are one operator of cuDNN on CUDA, and one of autograd, see
    `_cudnn_rnn` in aten/src/ATen/native/cudnn/RNN.cpp: what they consist of here takes the host no
    time.

    Args:
        operator: for an operator that Python code issues.
        module: for the call of an `nn.Module` without parts, in addition to its operators.
        autograd: for an operator that autograd issues, in C++, in a backward pass.
        source: where the figures come from.

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
                raise ValueError(f"{name} of a Host is seconds, not negative or infinite: {value}")

    def start(self):
        """Begin to count calls of modules."""
        global _hook, _hook_after
        if self.module:
            # One step each once there is a handle, see interrupts.py: stores only.
            _hook = register_module_forward_pre_hook(self._enter)
            _hook_after = register_module_forward_hook(_leave, always_call=True)

    def stop(self):
        """Stop counting them."""
        for hook in (_hook, _hook_after):
            if hook is not None:
                hook.remove()

    def _enter(self, module, inputs):
        # Code that torch.compile has made of modules does not call them, and this breaks no graph.
        if not torch.compiler.is_compiling() and not any(True for _ in module.children()):
            scheduler.clock.enter_module(self.module)
            if _is_of_cudnn(module):
                _recurrent.enter(sequence_number())

    def seconds(self):
        """Return what the operator takes that the calling thread is about to issue."""
        return _recurrent.seconds(self.operator, self.autograd)

    def scaled(self, factor, source):
        """Return a host that takes `factor` times as long."""
        figures = (factor * each for each in (self.operator, self.module, self.autograd))
        return Host(*figures, source)

    def describe(self):
        """Return its figures in words."""
        if "/" not in str(self):
            return f"{self} for an operator"
        return f"{self} for an operator/a module/an operator of autograd"

    def __str__(self):
        micros = [each * 1e6 for each in (self.operator, self.module, self.autograd)]
        if not self.module and self.operator == self.autograd:
            return f"host {micros[0]:.3g} µs"
        return "host " + "/".join(f"{each:.3g}" for each in micros) + " µs"


_hook = _hook_after = None  # the handles of the hooks that see calls of modules


def _is_of_cudnn(module):
    return isinstance(module, torch.nn.RNNBase) and torch.backends.cudnn.enabled


def _leave(module, inputs, outputs):
    if _is_of_cudnn(module):
        _recurrent.leave(sequence_number())


class _Recurrent(threading.local):
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


_CALLS_KEPT = 10_000  # for a backward pass to come
_recurrent = _Recurrent()


class MeasuredHost:
    """A host that takes the CPU time which the calling thread really takes between operators.

    What virtual GPUs do themselves does not count for operators, where tensors are made, and while
    the thread waits for a device. Recurrent layers are one operator of cuDNN, as for a `Host`. In
    the place of an operator stands `launch`, the seconds of a launch in C++. Streams, events,
    collectives and the start of a backward pass count as the program's Python.
    """

    source = "measured here, while the program runs"
    module = 0.0  # is part of what is measured
    launch = 5e-6  # cudaLaunchKernel and the dispatcher of torch, as in C++ programs

    def start(self):
        """Measure from now on, and leave out the time that virtual GPUs take."""
        self._thread = threading.local()
        self._thread.left = time.thread_time()
        for owner, name, function, kind in _entries():
            setattr(owner, name, kind(self._left_out(function)))
        for layer, forward in _forwards().items():
            layer.forward = _as_one_operator(forward)

    def stop(self):
        """Put back what `start` has changed."""
        for owner, name, function, kind in _entries():
            setattr(owner, name, kind(function))
        for layer, forward in _forwards().items():
            layer.forward = forward

    def _left_out(self, function):
        own = self._thread

        @functools.wraps(function)
        def timed(*args, **kwargs):
            depth = own.__dict__.setdefault("depth", 0)
            if depth == 0:
                now = time.thread_time()
                own.gap = own.__dict__.get("gap", 0.0) + now - own.__dict__.get("left", now)
            own.depth = depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                own.depth = depth
                if depth == 0:
                    own.left = time.thread_time()

        return timed

    def seconds(self):
        """Return what the operator takes that the calling thread is about to issue."""
        gap, self._thread.gap = self._thread.__dict__.get("gap", 0.0), 0.0
        return _recurrent.seconds(gap + self.launch, gap + self.launch)

    def describe(self):
        """Return in words what it does."""
        return str(self)

    def __reduce__(self):
        return MeasuredHost, ()  # a rank measures its own threads

    def __str__(self):
        return "host measured"


@functools.cache
def _forwards():
    """Return the functions `forward` of the recurrent layers."""
    return {layer: layer.forward for layer in (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)}


def _as_one_operator(forward):
    @functools.wraps(forward)
    def one_operator(module, *args, **kwargs):
        if not torch.backends.cudnn.enabled:
            return forward(module, *args, **kwargs)
        _recurrent.enter(sequence_number())
        try:
            return forward(module, *args, **kwargs)
        finally:
            _recurrent.leave(sequence_number())

    return one_operator


@functools.cache
def _entries():
    """Return where a program enters virtual GPUs: owner, name and function, and what it is made."""
    from vgpu.modelled import simulation  # which import what imports this module
    from vgpu.operators import issuing
    from vgpu.runtime import backend, device

    functions = (
        (backend, "issue_factory"),
        (device.Device, "synchronize"),
        (simulation.Simulation, "ask_and_wait"),
    )
    return (
        (VirtualTensor, "__torch_dispatch__", issuing.dispatch, classmethod),
        *((owner, name, getattr(owner, name), lambda it: it) for owner, name in functions),
    )


# Training code of modules in eager PyTorch; fitted by benchmarks/bench_model.py, which see.
EAGER = Host(8e-6, 50e-6, 25e-6, "fitted to published eager runs, see docs/modelled_gpus.md")
_NAMED = {"eager": lambda: EAGER, "measured": MeasuredHost}


def as_host(host):
    """Return a `Host` given as such, by its name, or by the seconds of any operator.

    Raises:
        ValueError: a name is neither "eager" nor "measured", or the seconds are negative.
        TypeError: `host` is none of these.
    """
    if isinstance(host, (Host, MeasuredHost)):
        return host
    if isinstance(host, str):
        if host not in _NAMED:
            raise ValueError(f'host is "eager", "measured", seconds or a Host: got {host!r}')
        return _NAMED[host]()
    if isinstance(host, (int, float)) and not isinstance(host, bool):
        return Host(float(host), 0.0, float(host))
    raise TypeError(f'host is "eager", "measured", seconds or a Host: got {host!r}')
