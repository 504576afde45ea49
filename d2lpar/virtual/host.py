"""What the host takes to issue an operator to modelled GPUs."""

import functools
import math
import threading
import time
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from . import scheduler
from .private.autograd import in_backward
from .tensor import VirtualTensor


@dataclass(frozen=True)
class Host:
    """The seconds that the host of modelled GPUs takes to run a program.

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
        if self.module:
            _hooks[self] = register_module_forward_pre_hook(self._enter)

    def stop(self):
        """Stop counting them."""
        if self in _hooks:
            _hooks.pop(self).remove()

    def _enter(self, module, inputs):
        if not module._modules:
            scheduler.clock.enter_module(self.module)

    def seconds(self):
        """Return what the operator takes that the calling thread is about to issue."""
        return self.autograd if in_backward() and not torch.is_grad_enabled() else self.operator

    def scaled(self, factor, source):
        """Return a host that takes `factor` times as long."""
        figures = (factor * each for each in (self.operator, self.module, self.autograd))
        return Host(*figures, source)

    def __str__(self):
        micros = [each * 1e6 for each in (self.operator, self.module, self.autograd)]
        if not self.module and self.operator == self.autograd:
            return f"host {micros[0]:.3g} µs"
        return "host " + "/".join(f"{each:.3g}" for each in micros) + " µs"


_hooks = {}  # Host -> the handle of its hook


class MeasuredHost:
    """A host that takes the CPU time which the calling thread really takes between operators.

    What virtual GPUs do themselves for an operator does not count. In its place stands `launch`,
    the seconds of a launch in C++.
    """

    source = "measured here, while the program runs"
    module = 0.0  # is part of what is measured
    launch = 5e-6  # cudaLaunchKernel and the dispatcher of torch, as in C++ programs

    def __init__(self):
        self._thread = threading.local()

    def start(self):
        """Begin to leave out the time that virtual GPUs take in each operator."""
        from .issuing import dispatch  # which imports what imports this module

        VirtualTensor.__torch_dispatch__ = classmethod(self._timed(dispatch))

    def stop(self):
        """Put back what `start` has changed."""
        from .issuing import dispatch

        VirtualTensor.__torch_dispatch__ = classmethod(dispatch)

    def _timed(self, dispatch):
        own = self._thread

        @functools.wraps(dispatch)
        def timed(*args, **kwargs):
            depth = own.__dict__.setdefault("depth", 0)
            if depth == 0:
                now = time.thread_time()
                own.gap = own.__dict__.get("gap", 0.0) + now - own.__dict__.get("left", now)
            own.depth = depth + 1
            try:
                return dispatch(*args, **kwargs)
            finally:
                own.depth = depth
                if depth == 0:
                    own.left = time.thread_time()

        return timed

    def seconds(self):
        """Return what the operator takes that the calling thread is about to issue."""
        gap, self._thread.gap = self._thread.__dict__.get("gap", 0.0), 0.0
        return gap + self.launch

    def __str__(self):
        return "host measured"


# Training code of modules in eager PyTorch; fitted by benchmarks/bench_model.py, which see.
EAGER = Host(8e-6, 50e-6, 25e-6, "fitted to published eager runs, see docs/modelled_gpus.md")
HOSTS = {"eager": EAGER}


def as_host(host):
    """Return a `Host` given as such, by its name, or by the seconds of any operator.

    Raises:
        ValueError: a name is neither "eager" nor "measured", or the seconds are negative.
        TypeError: `host` is none of these.
    """
    if isinstance(host, (Host, MeasuredHost)):
        return host
    if host == "measured":
        return MeasuredHost()
    if isinstance(host, str):
        if host not in HOSTS:
            raise ValueError(f'host is "eager", "measured", seconds or a Host: got {host!r}')
        return HOSTS[host]
    if isinstance(host, (int, float)) and not isinstance(host, bool):
        return Host(float(host), 0.0, float(host))
    raise TypeError(f'host is "eager", "measured", seconds or a Host: got {host!r}')
