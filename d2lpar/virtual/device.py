"""A virtual GPU: its engines, streams, memory, links, random numbers and errors."""

import contextlib
import sys
import threading
import weakref
from bisect import bisect_right
from collections import deque
from operator import itemgetter

import torch

from . import scheduler
from .engines import Engine
from .generators import forget_draws, new_generator
from .memory import Memory
from .private import sequence_number
from .scheduler import Stream, in_fork, wait_all

SWITCH_INTERVAL = 1e-4  # seconds


class Direction:
    """A direction of a device's link to other processes.

    Attributes:
        free_at: when what it carries will have arrived, seconds of the wall clock.
    """

    free_at = 0.0


class Device:
    """One virtual GPU: a slice of the CPU behind a queue.

    Attributes:
        index: its number.
        torch_device: `torch.device("vgpu", index)`, or of the type that programs say (`rename`).
        own_torch_device: the same of the type by which torch's C++ code knows it, "vgpu".
        threads: CPU threads of its kernels.
        memory: its `Memory`; the argument of this name is the limit in bytes.
        link, peer_link: a `Link` or None, see `virtual_gpus`.
        generator: its random numbers.
        compute, h2d, d2h, p2p: its engines, for kernels, and for copies from the CPU, to the CPU
            and to another device.
        engines: a tuple of these.
        own_engines: the threads that these are by the wall clock.
        collective_engines: further engines, which process groups have added.
        sending, receiving: the `Direction`s of its link to other processes.
        model: its `Model` while it is modelled; None by the wall clock.
        has_values: whether its kernels compute anything.
        default_stream: the stream that is current unless another was chosen.
    """

    def __init__(self, index, threads, memory, link, peer_link):
        self.index = index
        self.torch_device = torch.device(device_type, index)
        self.own_torch_device = torch.device("vgpu", index)
        self.threads = threads
        self.link = link
        self.peer_link = peer_link
        self.memory = Memory(self.torch_device, memory)
        self.own_engines = (
            Engine("compute", self, threads),
            Engine("h2d", self),
            Engine("d2h", self),
            Engine("p2p", self),
        )
        self.collective_engines = ()
        self.sending, self.receiving = Direction(), Direction()
        self.default_stream = Stream(self, 0)
        self.generator = new_generator(self)
        self._streams = (weakref.ref(self.default_stream),)
        self._num_streams = 1
        self._making = threading.RLock()
        self._errors = deque()
        self.run_by(None)

    def check_memory(self, memory):
        """Raise ValueError where more bytes are in use than `memory`, a new limit."""
        self.memory.collect()
        in_use = self.memory.allocated + self.memory.held
        if memory < in_use:
            raise ValueError(
                f"{self.torch_device} holds {in_use} bytes; its memory cannot be {memory}"
            )

    def configure(self, threads, memory, link, peer_link):
        """Change the figures of this device, which must be idle; see `virtual_gpus`."""
        self.memory.set_limit(memory)
        self.link, self.peer_link = link, peer_link
        if threads != self.threads:
            self.own_engines[0].set_threads(threads)
            self.threads = threads

    def run_by(self, model, has_values=True):
        """Let engines of a model run later ops, or, for None, threads; the device must be idle.

        What was done before is forgotten: it has times of another clock.
        """
        forget_draws(self)
        for stream in self.streams:
            stream.last = stream.waits = None
        # One step, see scheduler.py: stores only.
        self.model, self.has_values = model, has_values
        self.engines = self.own_engines if model is None else model.engines
        self.compute, self.h2d, self.d2h, self.p2p = self.engines

    def add_engine(self, engine):
        """Add an engine of a process group, and return it."""
        with self._making:
            self.collective_engines = (*self.collective_engines, engine)
        return engine

    def remove_engine(self, engine):
        """End an engine that `add_engine` has added, whose ops have ended, and its thread."""
        engine.end()
        engine.join()
        with self._making:
            self.collective_engines = tuple(e for e in self.collective_engines if e is not engine)

    def link_to(self, other):
        """Return the link to another `Device`, a `Link`, or None for no limit.

        Raises:
            RuntimeError: one of the two is modelled, and the other is not.
        """
        scheduler.check_clocks(self, other)
        if self.model is not None and self.model.host != other.model.host:
            return self.model.machine.network
        links = self.peer_link, other.peer_link
        if self.model is not None and None not in links:
            return min(links, key=lambda link: link.bandwidth)
        return self.peer_link

    def new_stream(self):
        """Return a new stream of this device."""
        with self._making:
            stream = Stream(self, self._num_streams)
            self._num_streams += 1
            known = [ref for ref in self._streams if ref() is not None]
            self._streams = (*known, weakref.ref(stream))
            return stream

    @property
    def streams(self):
        """The streams that somebody holds, or that still have work, a list."""
        return [stream for ref in self._streams if (stream := ref()) is not None]

    def current_stream(self):
        """Return the stream to which the calling thread issues work on this device."""
        current = thread.current
        return self.default_stream if current is None else current.stream(self)

    def synchronize(self):
        """Wait for all streams.

        Raises:
            torch.AcceleratorError: an op has failed. It names the op; its cause is what the op
                raised.
        """
        for stream in self.streams:
            wait_all(stream.tail(), self.torch_device)
        self.raise_error()

    # -- errors of ops that ran after their issue had returned

    def failed(self, op):
        """Keep the error of `op` until the next `synchronize`."""
        self._errors.append(op)

    def forget(self, op):
        """Drop the error of `op`, because the host that waited for it raises it now."""
        with contextlib.suppress(ValueError):
            self._errors.remove(op)

    def raise_error(self):
        """Raise the first error that was not raised yet, if there is one, and drop the rest.

        Raises:
            torch.AcceleratorError: there is one; its cause is what the op raised.
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


# -- the current device and streams of a thread


class _Thread(threading.local):
    """What a thread has chosen.

    Attributes:
        device: index of the current device.
        current: a `CurrentStreams`, or None as long as only default streams were current.
        entered: for each `with stream` or `with device` under way, the device and the stream (or
            None) that were current before it.
    """

    device = 0
    current = None
    entered = ()


thread = _Thread()


class CurrentStreams:
    """The streams that a thread issues its work to, and since when it does.

    Autograd numbers the operators of a thread. From the numbers at which the current stream of a
    device changed, backward finds the stream that the forward of an operator was issued to.
    """

    MAX_CHANGES = 100_000

    def __init__(self):
        self.unjoined = None  # a `BackwardStreams` whose streams ours do not wait for yet
        self._current = {}  # index of a device -> stream
        self._changes = {}  # index of a device -> list of (number, stream)

    def stream(self, device):
        """Return the current stream of `device`."""
        if self.unjoined is not None:
            self._join()
        return self._current.get(device.index, device.default_stream)

    def after(self, stream, op):
        """Return the ops that `op` waits for besides those of its stream, `stream`."""
        return ()

    def _join(self):
        """Let these streams wait for those of a backward pass that has ended.

        This is done when a stream is next asked for. At the end of the pass an interrupt could
        prevent it.
        """
        streams, used = self.unjoined, tuple(self.unjoined.used)
        for stream in used:
            current = self._current.get(stream.device.index, stream.device.default_stream)
            current.wait_for(stream.tail())
        if self.unjoined is streams:
            self.unjoined = None

    def set(self, stream):
        """Let `stream` be the current one of its device."""
        index, change = stream.device.index, (sequence_number(), stream)
        changes = self._changes.setdefault(index, [])
        if changes and changes[-1][0] == change[0]:  # autograd made no operator since
            changes[-1] = change
        else:
            changes.append(change)
            if len(changes) > self.MAX_CHANGES:
                self._changes[index] = changes[self.MAX_CHANGES // 2 :]
        self._current[index] = stream

    def at(self, device, number):
        """Return the stream of `device` that was current when autograd made operator `number`."""
        changes = self._changes.get(device.index, ())
        place = bisect_right(changes, number, key=itemgetter(0))
        return changes[place - 1][1] if place else device.default_stream


def leave():
    """End the innermost `with` block of the calling thread: restore what was current before it."""
    entered = thread.entered
    try:
        _leave_innermost()
    finally:
        if thread.entered is entered:  # an interrupt came first
            _leave_innermost()


def leave_all():
    """End all `with` blocks of the calling thread: restore what was current before them.

    An interrupt that comes just as a block begins to end leaves it entered.
    """
    while thread.entered:
        _leave_innermost()


def _leave_innermost():
    if thread.entered:
        rest, (index, stream) = thread.entered[:-1], thread.entered[-1]
        if stream is not None:
            set_stream(stream)
        thread.device = index
        thread.entered = rest


def set_stream(stream):
    """Issue later work of the calling thread on the device of `stream` to `stream`."""
    if thread.current is None:
        thread.current = CurrentStreams()
    thread.current.set(stream)


# -- the devices of this process

devices = []  # every device ever made; the first `count` of them are in use
count = 0
device_type = "vgpu"  # what programs call them


def rename(name):
    """Let programs call the devices `name`, "cuda" for example, besides "vgpu".

    Tensors, streams, spans and errors then say it. This is for the start of a process.

    Raises:
        RuntimeError: there are devices already.
    """
    global device_type
    if devices:
        raise RuntimeError(f"{len(devices)} virtual GPUs are {device_type} devices already")
    device_type = name
    scheduler.error_name = "CUDA" if name == "cuda" else name


def is_virtual(where):
    """Return whether a `torch.device` is of the type of virtual GPUs."""
    return where.type == device_type or where.type == "vgpu"


def wait_for_all():
    """Wait for all streams of all devices; errors are left for the next synchronize."""
    for device in () if in_fork() else devices:
        for stream in device.streams:
            wait_all(stream.tail(), device.torch_device)


def keep_time_by_the_wall_clock():
    """Let threads run the later ops of all devices, and the wall clock tell the time.

    A change to a model that was interrupted leaves devices with a model and no simulation.
    """
    modelled = [device for device in devices if device.model is not None]
    if modelled or scheduler.simulation is not None:
        wait_for_all()
        for device in modelled:
            device.run_by(None)
        if scheduler.simulation is not None and scheduler.simulation.meetings is not None:
            scheduler.simulation.meetings.leave()
        scheduler.simulation = None
        let_engines_have_their_turn()


def let_engines_have_their_turn():
    """Let an engine that waits for Python's lock beside a busy main thread get it soon."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL))


def find(where):
    """Return the `Device` that is meant.

    Args:
        where: a `torch.device`, its name, its index, or None for the current device.

    Raises:
        RuntimeError: there is no such device, as on CUDA.
        ValueError: it is a device of another type.
    """
    if where is None:
        return current()
    index = where
    if not isinstance(where, int):
        where = torch.device(where)
        if not is_virtual(where):
            raise ValueError(f"Expected a {device_type} device, but got: {where}")
        index = where.index
        if index is None:
            return current()
    if not 0 <= index < count:
        raise RuntimeError(
            f"{scheduler.error_name} error: invalid device ordinal: {device_type}:{index} of "
            f"{count} virtual GPUs"
        )
    return devices[index]


def current():
    """Return the calling thread's current `Device`.

    Raises:
        RuntimeError: it is not in use any more.
    """
    index = thread.device
    if not index < count:
        raise RuntimeError(
            f"{scheduler.error_name} error: no device {device_type}:{index}; there are {count} "
            "virtual GPUs"
        )
    return devices[index]


chosen = False  # whether a thread has made a device its current one


def set_current(index):
    """Make the device with this index the calling thread's current one."""
    global chosen
    thread.device = find(index).index
    chosen = True
