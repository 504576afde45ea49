"""Accounting of a device's memory, by storage."""

import threading
import weakref
from collections import deque

import torch

from vgpu.runtime import scheduler
from vgpu.runtime.interrupts import one_step
from vgpu.runtime.scheduler import under_way, wait
from vgpu.tensors.caching import GRANULARITY, MIB, SMALL_SEGMENT, CachingAllocator

MAX_PENDING = 10_000  # allocations and frees not yet passed to the model of CUDA's allocator
_SHIFT = 48  # bits of an integer for a block's size, below its address


class Block:
    """The memory of one storage, freed with the last tensor that uses it.

    `reference` is its record, which outlives it.
    """

    __slots__ = ("reference", "__weakref__")

    @property
    def num_bytes(self):
        return self.reference.num_bytes

    @property
    def address(self):
        return self.reference.address or 0


class _Reference(weakref.ref):
    """A weak reference to a Block, whose callback, in C, reports that the block is freed.

    An interrupt in the Python code of a `__del__` would be lost. `streams` may still use the block
    when it is freed; `pending` are their ops that hold it after that, None before. `taken` are
    `num_bytes` rounded up to GRANULARITY.
    """

    __slots__ = ("num_bytes", "taken", "address", "streams", "pending")


class Memory:
    """The memory of one device, accounted by storage when work is issued, like CUDA's allocator.

    Every change is one step that an interrupt cannot tear, see interrupts.py. The figures are exact
    after `collect`.

    Attributes:
        limit, fraction, allowed: its size in bytes, the fraction that may be in use, and that
            fraction in bytes.
        allocated: bytes that all storages in use take, each rounded up to GRANULARITY.
        held: bytes that are freed, but still used by a stream (`record_stream`).
        peak, held_peak: the highest `allocated`, and `allocated` + `held`, since `reset_peak`.
        recorded: number of blocks, in use or held, with a `record_stream`.
        num_allocations, total_allocated: number of all blocks so far, and their bytes.
        num_retries, num_ooms: allocations that waited for held memory, and that failed.
        history: the `History` of it; or None.
    """

    history = None

    def __init__(self, device, limit):
        self.device = device
        self.set_limit(limit)
        self.allocated = self.held = self.peak = self.held_peak = self.recorded = 0
        self.num_allocations = self.total_allocated = self.num_retries = self.num_ooms = 0
        self._highest = 0
        self._cached = self._emptied = 0  # the most in use since, and before, `empty_cache`
        self._next_address = (device.index + 1) << 48
        # Address -> reference: one that is collected together with its block does not call back.
        self._live = {}
        self._freed = deque()  # references to freed blocks that are not accounted yet
        self.add_freed = self._freed.append
        self._held = {}  # address -> reference that waits for its `pending`
        self._lock = threading.RLock()
        self._events, self._caching = deque(maxlen=0), None  # see `follow`

    def follow(self, caching):
        """Start or stop the model of CUDA's caching allocator."""
        self.collect()
        self.history = None  # its addresses would differ
        # Events for the model, as integers, since a stored reference would call back: address and
        # bytes of a new block, or the negative address of a freed one.
        live = self._live.values() if caching else ()
        blocks = ((each.address << _SHIFT) + each.num_bytes for each in live)
        self._events = deque(blocks, None if caching else 0)
        self._caching = CachingAllocator(self.limit) if caching else None

    def set_limit(self, limit, fraction=1.0):
        self.limit = limit
        self.fraction = fraction
        self.allowed = int(limit * fraction)

    def allocate(self, num_bytes):
        """Return a Block of `num_bytes`; if necessary, wait for streams that hold freed memory.

        Raises torch.OutOfMemoryError for more than `allowed` bytes in use, of which none are held.
        """
        block = Block()
        block.reference = reference = _Reference(block, self.add_freed)
        reference.num_bytes = num_bytes
        reference.taken = taken = -(-num_bytes // GRANULARITY) * GRANULARITY
        reference.streams = ()
        reference.address = None
        is_exact = len(self._freed) > 64 or self.history is not None
        if is_exact:
            self.collect()
        while True:
            # One step from here, see interrupts.py; no other thread comes in between, either. It is
            # no function of its own: each new tensor would pay for the call.
            allocated = self.allocated + taken
            reserved = allocated + self.held
            if reserved <= self.allowed and (is_exact or reserved <= self.peak):
                address = self._next_address
                self._live[address] = reference
                reference.address = address
                self._next_address = address + num_bytes + GRANULARITY - num_bytes % GRANULARITY
                self.allocated = allocated
                self.num_allocations += 1
                self.total_allocated += taken
                if allocated > self.peak:
                    self.peak = allocated
                if reserved > self.held_peak:
                    self.held_peak = reserved
                if reserved > self._cached:
                    self._cached = reserved
                self._events.append((address << _SHIFT) + num_bytes)
                if self.history is not None:
                    self.history.allocated(address, num_bytes)
                return block
            if is_exact:
                self._wait_for_memory(num_bytes)
            self.collect()
            is_exact = True

    def resize(self, block, num_bytes):
        """Free a block's memory while tensors use the block, and allocate new memory for it first.

        Raises torch.OutOfMemoryError if there is not enough memory.
        """
        if num_bytes:
            new, fresh = _Reference(block, self.add_freed), self.allocate(num_bytes)
            new.num_bytes, new.streams, new.address = num_bytes, (), fresh.address
            new.taken = fresh.reference.taken
        freed, empty = _Reference(block), _Reference(block)
        old = block.reference
        freed.num_bytes, freed.taken, freed.address = old.num_bytes, old.taken, old.address
        freed.streams, freed.pending = old.streams, None
        empty.num_bytes, empty.taken, empty.streams, empty.address = 0, 0, (), None
        if freed.address is not None:
            del old  # so that the step drops the last reference, without a callback
            self._empty(block, empty, freed)
        if num_bytes:
            self._refill(block, new, fresh)

    @one_step
    def _empty(self, block, empty, freed):
        self._live[freed.address] = freed
        block.reference = empty
        self.add_freed(freed)

    @one_step
    def _refill(self, block, new, fresh):
        self._live[new.address] = new
        block.reference = new
        fresh.reference = None

    def _wait_for_memory(self, num_bytes):
        """Wait for the ops that hold a freed block; raise OutOfMemoryError if there are none."""
        with self._lock:
            pending = next(iter(self._held.values())).pending if self._held else None
        if pending is None:
            self.num_ooms += 1
            if self.history is not None:
                self.history.failed(num_bytes, self.limit - self.allocated - self.held)
            raise self._out_of_memory(num_bytes)
        self.num_retries += 1
        for op in pending:
            wait(op, self.device)

    def record_stream(self, block, stream):
        """Hold `block`, once freed, until `stream` has finished the work issued before the free."""
        reference = block.reference
        if reference.address is None:  # its memory is freed already
            return
        with self._lock:
            self._set_streams(reference, {*reference.streams, stream})

    @one_step
    def _set_streams(self, reference, streams):
        if not reference.streams:
            reference.pending = None
            self.recorded += 1
        reference.streams = streams

    def note_freed(self):
        """Account for freed blocks: their memory is free, or held by streams."""
        freed = self._freed
        popleft = freed.popleft
        with self._lock:
            while True:  # `while freed` ends at a place where an interrupt would leave the lock
                if not freed:
                    break
                reference = freed[0]
                if reference.streams:
                    if reference.pending is None:
                        reference.pending = [op for each in reference.streams for op in each.tail()]
                    if not freed or freed[0] is not reference:
                        continue  # accounted by a destructor that ran meanwhile
                # One step to `popleft`; each freed tensor goes through it. Where an allocation was
                # interrupted, its reference has no address: it was never accounted.
                if reference.address is not None:
                    self.allocated -= reference.taken
                    if reference.streams:
                        self._held[reference.address] = reference
                        self.held += reference.taken
                    else:
                        del self._live[reference.address]
                popleft()
                if reference.address is not None and not reference.streams:
                    self._events.append(-reference.address)
                if self.history is not None and reference.address is not None:
                    self.history.freed(reference.address, completed=not reference.streams)

    def collect(self):
        """Account for freed blocks, and free those that no stream holds any more."""
        self.note_freed()
        if len(self._events) > MAX_PENDING:
            self._caching_now()
        if self._held:
            scheduler.clock.catch_up()
            with self._lock:
                self._release()  # a function of its own: it ends in a jump, see interrupts.py

    def _release(self):
        for reference in tuple(self._held.values()):
            if not any(map(under_way, reference.pending)) and reference.address in self._held:
                self._events.append(-reference.address)
                self._forget(reference)
                if self.history is not None:
                    self.history.freed(reference.address, requested=False)

    @one_step
    def _forget(self, reference):
        del self._held[reference.address]
        del self._live[reference.address]
        self.held -= reference.taken
        self.recorded -= 1

    def _out_of_memory(self, num_bytes):
        limit = ""
        if self.fraction < 1:
            limit = f" {self.allowed / MIB:.2f} MiB of it is allowed to be used."
        free = self.limit - self.allocated - self.held
        return torch.OutOfMemoryError(
            f"{scheduler.error_name.upper()} out of memory. "
            f"Tried to allocate {num_bytes / MIB:.2f} MiB. "
            f"{self.device} has a total capacity of {self.limit / MIB:.2f} MiB of "
            f"which {free / MIB:.2f} MiB is free.{limit}"
        )

    @property
    def requested(self):
        """Bytes of all storages in use or held, not rounded up."""
        return sum(num_bytes for _, num_bytes in self.blocks())

    @property
    def reserved(self):
        """Bytes that CUDA's allocator would reserve; without the model of it, see `_segments`."""
        if not self._caching:
            return self._segments(self._cached)
        return min(self._caching_now().reserved, self.limit)

    @property
    def reserved_peak(self):
        """The highest `reserved` since `reset_peak`."""
        if not self._caching:
            return self._segments(max(self._cached, self._emptied))
        return max(min(self._caching_now().peak, self.limit), self.held_peak)

    def _segments(self, num_bytes):
        """Return the bytes of the segments that `num_bytes` fill, at most those of the device."""
        return min(-(-num_bytes // SMALL_SEGMENT) * SMALL_SEGMENT, self.limit)

    def _caching_now(self, then=None):
        """Return the model of CUDA's allocator after all events and a call of its method `then`.

        This runs in the simulator's thread, which no interrupt reaches.
        """
        scheduler.clock.call_and_wait(self._apply_events, then)
        return self._caching

    def _apply_events(self, then):
        caching, events = self._caching, self._events
        while events:
            event = events.popleft()
            if event > 0:
                caching.allocate(event >> _SHIFT, event & (1 << _SHIFT) - 1)
            else:
                caching.free(-event)
        if then is not None:
            getattr(caching, then)()

    def empty_cache(self):
        """Reserve no more than what is in use, or the segments of it."""
        self.collect()
        self._emptied = max(self._cached, self._emptied)
        self._cached = self.allocated + self.held
        if self._caching:
            self._caching_now("empty_cache")

    # -- for `History`

    def blocks(self):
        return [(each.address, each.num_bytes) for each in tuple(self._live.values())]

    def held_keys(self):
        return set(self._held)

    @property
    def num_blocks(self):
        return len(self._live) - len(self._held)

    @property
    def highest(self):
        """The highest `allocated` since the device was created."""
        return max(self._highest, self.peak)

    def reset_peak(self):
        """Reset the peaks to current usage."""
        self.collect()
        self._highest = self.highest
        self.peak, self._emptied = self.allocated, 0
        self.held_peak = self.allocated + self.held
        if self._caching:
            self._caching_now("reset_peak")
