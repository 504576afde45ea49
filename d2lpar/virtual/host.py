"""What the host takes to issue an operator to modelled GPUs."""

import functools
import math
import threading
import time
from dataclasses import dataclass

import torch

from .private.autograd import in_backward
from .tensor import VirtualTensor


@dataclass(frozen=True)
class Host:
    """The seconds that the host of modelled GPUs takes to issue an operator.

    Args:
        python: for an operator that Python code issues: modules, functions, optimizers, and what
            checkpointing computes again.
        autograd: for one that autograd issues, in C++, in a backward pass.
        source: where the figures come from.

    Raises:
        ValueError: a figure is negative or infinite.
    """

    python: float
    autograd: float
    source: str = "the caller"

    def __post_init__(self):
        for name in ("python", "autograd"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} of a Host is seconds, not negative or infinite: {value}")

    def start(self):
        """Do nothing; a `MeasuredHost` begins to watch."""

    stop = start

    def seconds(self):
        """Return what the operator takes that the calling thread is about to issue."""
        return self.autograd if in_backward() and not torch.is_grad_enabled() else self.python

    def __str__(self):
        if self.python == self.autograd:
            return f"host {self.python * 1e6:.3g} µs"
        return f"host {self.python * 1e6:.3g} and {self.autograd * 1e6:.3g} µs"


class MeasuredHost:
    """A host that takes the CPU time which the calling thread really takes between operators.

    What virtual GPUs do themselves for an operator does not count. In its place stands `launch`,
    the seconds of a launch in C++.
    """

    source = "measured here, while the program runs"
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
EAGER = Host(45e-6, 15e-6, "fitted to published eager runs, see docs/modelled_gpus.md")
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
        return Host(float(host), float(host))
    raise TypeError(f'host is "eager", "measured", seconds or a Host: got {host!r}')
