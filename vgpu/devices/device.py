"""A virtual GPU: its engines, streams, memory, links, random numbers and errors."""

import contextlib
import threading
import weakref
from collections import deque

import torch

from vgpu.runtime import scheduler
from vgpu.runtime.engines import Engine
from vgpu.runtime.interrupts import one_step
from vgpu.runtime.scheduler import Resource, wait_for_ops
from vgpu.runtime.streams import StreamQueue
from vgpu.runtime.threads import thread
from vgpu.tensors.device_memory import Memory
from vgpu.tensors.generators import Generator


class Device:
    """One virtual GPU: CPU threads behind queues of ops; see `virtual_gpus` for the arguments.

    Attributes:
        torch_device: `torch.device("vgpu", index)`, or with the device type set by `rename`.
        own_torch_device: the same device with the type "vgpu", as in torch's C++ code.
        compute, h2d, d2h, p2p: its engines for kernels, and for copies from the CPU, to the CPU and
            to another device; `engines` has all four.
        own_engines: its engines on the wall clock, which are threads.
        collective_engines: further engines, added by process groups.
        sending, receiving: the `Resource`s of its link to other processes.
        model: its `Model` while it is modelled; None on the wall clock.
        has_values: whether its kernels compute values.
    """

    def __init__(self, torch_device, threads, memory, link, peer_link):
        self.index = index = torch_device.index
        self.torch_device = torch_device
        self.own_torch_device = torch.device("vgpu", index)
        self.threads = threads
        self.link = link
        self.peer_link = peer_link
        self.memory = Memory(self.torch_device, memory)
        copying = (Engine(name, self) for name in ("h2d", "d2h", "p2p"))
        self.own_engines = (Engine("compute", self, threads), *copying)
        self.collective_engines = ()
        self.sending, self.receiving = Resource(), Resource()
        self.default_stream = StreamQueue(self, 0)
        self.generator = Generator(self, torch.initial_seed())
        self._streams = (weakref.ref(self.default_stream),)
        self._num_streams = 1
        self._making = threading.RLock()
        self._errors = deque()
        self.run_by(None)

    def check_memory(self, memory):
        """Raise ValueError if more bytes are in use than the new limit `memory`."""
        self.memory.collect()
        in_use = self.memory.allocated + self.memory.held
        if memory < in_use:
            raise ValueError(
                f"memory of {self.torch_device} must be at least the {in_use} bytes in use: "
                f"got {memory}"
            )

    def configure(self, threads, memory, link, peer_link):
        self.memory.set_limit(memory)
        self.link, self.peer_link = link, peer_link
        if threads != self.threads:
            self.own_engines[0].set_threads(threads)
            self.threads = threads

    def run_by(self, model, has_values=True):
        """Run later ops on a model's engines or, for None, on threads; the device must be idle.

        Earlier ops are forgotten, because their times belong to another clock.
        """
        for stream in self.streams:
            stream.last = stream.waits = None
        self.memory.follow(model is not None)
        self._choose_engines(model, has_values)

    @one_step
    def _choose_engines(self, model, has_values):
        self.model, self.has_values = model, has_values
        self.engines = self.own_engines if model is None else model.engines
        self.compute, self.h2d, self.d2h, self.p2p = self.engines

    def add_engine(self, engine):
        with self._making:
            self.collective_engines = (*self.collective_engines, engine)
        return engine

    def remove_engine(self, engine):
        """End an engine added by `add_engine`, and its thread; it must be idle."""
        engine.end()
        engine.join()
        with self._making:
            self.collective_engines = tuple(e for e in self.collective_engines if e is not engine)

    def link_to(self, other):
        """Return the `Link` to another `Device`, None for no limit."""
        scheduler.check_same_clock(self, other)
        return self.peer_link if self.model is None else self.model.link_to(other)

    def new_stream(self, priority=0):
        with self._making:
            stream = StreamQueue(self, self._num_streams, priority)
            self._num_streams += 1
            self._streams = (*map(weakref.ref, self.streams), weakref.ref(stream))
            return stream

    @property
    def streams(self):
        """The streams that are still referenced, or have pending work."""
        return [stream for ref in self._streams if (stream := ref()) is not None]

    def current_stream(self):
        current = thread.current
        return self.default_stream if current is None else current.stream(self)

    def synchronize(self):
        for stream in self.streams:
            wait_for_ops(stream.tail(), self.torch_device)
        self.raise_error()

    # -- errors of ops, raised asynchronously

    def failed(self, op):
        """Store the failed `op`, whose error the next `synchronize` raises."""
        self._errors.append(op)

    def forget(self, op):
        """Drop the error of `op`, which the waiting host raises itself."""
        with contextlib.suppress(ValueError):
            self._errors.remove(op)

    def raise_error(self):
        """Raise the first error that is not yet reported, if any, and drop the others.

        It is a torch.AcceleratorError that names the op; its cause is the op's exception.
        """
        if self._errors:
            op = self._errors.popleft()
            self._errors.clear()
            error = op.error
            raise torch.AcceleratorError(
                f"{scheduler.error_name} error: {op.name} on {self.torch_device} failed after it "
                "was issued, so this is reported at a later synchronize: "
                f"{type(error).__name__}: {error}"
            ) from error
