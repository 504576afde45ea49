"""A virtual GPU: its engines, streams, memory, links and random numbers."""

import contextlib
import threading
import weakref
from collections import deque

import torch

from .engine import Engine, Stream, wait

MIB = 2**20


class _ThreadLocal(threading.local):
    device = 0  # index of the current device
    streams = None  # index of a device -> its current stream, where that is not the default


_tls = _ThreadLocal()


class Device:
    """One virtual GPU: a slice of the CPU behind a queue."""

    def __init__(self, index, threads, memory, link, peer_link):
        self.index = index
        self.torch_device = torch.device("vgpu", index)
        self.threads = threads
        self.memory = memory
        self.fraction = 1.0  # of the memory: what may be in use
        self.link = link
        self.peer_link = peer_link
        self.compute = Engine("compute", self, threads)
        self.h2d = Engine("h2d", self)
        self.d2h = Engine("d2h", self)
        self.p2p = Engine("p2p", self)
        self.streams = [Stream(self, 0)]
        self.default_stream = self.streams[0]
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.last_random = None
        self._errors = deque()
        self._allocated = self._peak = 0
        self._blocks = set()
        self._freed = deque()
        self._in_use = []
        self._memory_lock = threading.RLock()

    def check_memory(self, memory):
        """Raise ValueError when more is in use than `memory`, a new limit in bytes."""
        if memory < self.allocated:
            raise ValueError(
                f"{self.torch_device} holds {self.allocated} bytes; its memory cannot be {memory}"
            )

    def configure(self, threads, memory, link, peer_link):
        """Change the figures of this device once it is idle."""
        self.synchronize()
        self.memory, self.fraction = memory, 1.0
        self.link, self.peer_link = link, peer_link
        if threads != self.threads:
            self.threads = threads
            self.compute.set_threads(threads)

    @property
    def engines(self):
        return (self.compute, self.h2d, self.d2h, self.p2p)

    def new_stream(self):
        """Return a new stream of this device."""
        stream = Stream(self, len(self.streams))
        self.streams.append(stream)
        return stream

    def current_stream(self):
        """Return the stream to which the calling thread issues work on this device."""
        streams = _tls.streams
        if streams is None:
            return self.default_stream
        return streams.get(self.index, self.default_stream)

    def set_stream(self, stream):
        """Issue the calling thread's work on this device to `stream` from now on."""
        if _tls.streams is None:
            _tls.streams = {}
        _tls.streams[self.index] = stream

    @property
    def idle(self):
        return all(stream.last is None or stream.last.done for stream in self.streams)

    def synchronize(self):
        """Wait for all streams; raise the error of an op that failed meanwhile.

        Raises torch.AcceleratorError, with the op's name and what it raised as its cause.
        """
        for stream in tuple(self.streams):
            wait(stream.last, self.torch_device)
        self.raise_error()

    # -- errors of ops that ran after their issue had returned

    def failed(self, op):
        """Keep the error of `op` for the next synchronize."""
        self._errors.append(op)

    def forget(self, op):
        """Do not raise the error of `op` later: the host that waited for it raises it now."""
        with contextlib.suppress(ValueError):
            self._errors.remove(op)

    def raise_error(self):
        """Raise the first error that was not raised yet, if there is one, and forget the rest."""
        if self._errors:
            op = self._errors.popleft()
            self._errors.clear()
            error = op.error
            raise torch.AcceleratorError(
                f"vgpu error: {op.name} on {self.torch_device} failed after it was issued, so this "
                f"is reported at a later synchronize: {type(error).__name__}: {error}"
            ) from error

    # -- memory, accounted by storage when work is issued, as CUDA's allocator does

    def allocate(self, num_bytes):
        """Return a Block of `num_bytes`; raises torch.OutOfMemoryError when it does not fit."""
        block = Block()
        block.num_bytes = num_bytes
        block.freed = freed = _Freed(block, self._freed.append)
        freed.num_bytes = num_bytes
        freed.streams = ()
        with self._memory_lock:
            if self._freed or self._in_use:
                self._collect()
            allocated = self._allocated + num_bytes
            if allocated > self.memory * self.fraction:
                block.freed = freed = None
                limit = ""
                if self.fraction < 1:
                    limit = (
                        f" {self.memory * self.fraction / MIB:.2f} MiB of it is allowed to be used."
                    )
                raise torch.OutOfMemoryError(
                    f"VGPU out of memory. Tried to allocate {num_bytes / MIB:.2f} MiB. "
                    f"{self.torch_device} has a total capacity of {self.memory / MIB:.2f} MiB of "
                    f"which {(self.memory - self._allocated) / MIB:.2f} MiB is free.{limit}"
                )
            self._allocated = allocated
            if allocated > self._peak:
                self._peak = allocated
            self._blocks.add(freed)
        return block

    @property
    def allocated(self):
        """Bytes of all storages in use, and of freed ones that a stream in use still holds."""
        with self._memory_lock:
            self._collect()
            return self._allocated

    def _collect(self):
        """Take back the memory of blocks that ended; the caller holds the memory's lock."""
        freed = self._freed
        while freed:
            block = freed.popleft()
            if block.streams:
                block.pending = [s.last for s in block.streams if s.last is not None]
                self._in_use.append(block)
            else:
                self._blocks.discard(block)
                self._allocated -= block.num_bytes
        if self._in_use:
            for block in tuple(self._in_use):
                if all(op.done for op in block.pending):
                    self._in_use.remove(block)
                    self._blocks.discard(block)
                    self._allocated -= block.num_bytes

    @property
    def peak(self):
        return self._peak

    def reset_peak(self):
        self._peak = self.allocated

    def seed(self, seed):
        """Draw later random numbers from a generator seeded with `seed`."""
        self.generator = torch.Generator().manual_seed(seed)


class Block:
    """The memory of one storage, given back when no tensor uses it any more."""

    __slots__ = ("num_bytes", "freed", "__weakref__")

    def record_stream(self, stream):
        """Give the memory back only when `stream` has got as far as it is then."""
        self.freed.streams = (*self.freed.streams, stream)


class _Freed(weakref.ref):
    """Tells of the end of a Block, by a callback in C: an interrupt that came in the Python code
    of a `__del__` would be lost."""

    __slots__ = ("num_bytes", "streams", "pending")


# -- the devices of this process

devices = []  # every device ever made; the first `count` of them are in use
count = 0


def find(where):
    """Return the Device of a torch.device, an index or None (the current one).

    Raises RuntimeError for a device that does not exist, as CUDA does.
    """
    if where is None:
        return current()
    index = where if isinstance(where, int) else torch.device(where).index
    if index is None:
        return current()
    if not 0 <= index < count:
        raise RuntimeError(
            f"vgpu error: invalid device ordinal: vgpu:{index} of {count} virtual GPUs"
        )
    return devices[index]


def current():
    """Return the calling thread's current device."""
    index = _tls.device
    if not index < count:
        raise RuntimeError(f"vgpu error: no device vgpu:{index}; there are {count} virtual GPUs")
    return devices[index]


def set_current(index):
    """Make the device with this index the calling thread's current one."""
    _tls.device = find(index).index
