"""The memory of a device: layouts of tensors, their values, and exact accounting by storage."""

import threading
import weakref
from collections import deque

import torch

from . import scheduler
from .private import set_conj, set_neg
from .scheduler import catch_up, under_way, wait

MIB = 2**20
GRANULARITY = 512  # bytes between the addresses of two blocks, as of CUDA's allocator
MAX_LAYOUTS = 100_000
CPU = torch.device("cpu")


class Layout:
    """Device, dtype and layout of a tensor; one object for each combination, so `is` compares.

    Attributes:
        device: a `Device`.
        dtype, size, stride, offset: as of a tensor; stride and offset in elements.
        conj, neg: whether the values are stored conjugated or negated.
        num_bytes: bytes from the beginning of its memory to the end of the last element.
    """

    __slots__ = ("device", "dtype", "size", "stride", "offset", "conj", "neg", "num_bytes")
    _known = {}

    @classmethod
    def of(cls, device, tensor):
        """Return the Layout that `tensor`, a CPU or meta tensor, would have on `device`."""
        return cls._get(
            device,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @classmethod
    def contiguous(cls, device, dtype, size, offset=0):
        """Return the Layout of a contiguous tensor that begins at element `offset`."""
        strides = [1]
        for length in reversed(size[1:]):
            strides.append(strides[-1] * max(length, 1))
        stride = tuple(strides[::-1])[: len(size)]
        return cls._get(device, dtype, tuple(size), stride, offset, False, False)

    @classmethod
    def _get(cls, *key):
        layout = cls._known.get(key)
        if layout is None:
            layout = cls()
            (
                layout.device,
                layout.dtype,
                layout.size,
                layout.stride,
                layout.offset,
                layout.conj,
                layout.neg,
            ) = key
            elements = 0
            if 0 not in layout.size:
                lengths = zip(layout.size, layout.stride, strict=True)
                elements = 1 + layout.offset + sum((n - 1) * step for n, step in lengths)
            layout.num_bytes = elements * layout.dtype.itemsize
            if len(cls._known) >= MAX_LAYOUTS:
                cls._known.clear()
            layout = cls._known.setdefault(key, layout)
        return layout

    def empty(self, device):
        """Return an empty tensor of this layout on `device`, a torch device: CPU or meta."""
        if self.offset:
            elements = self.num_bytes // self.dtype.itemsize
            base = torch.empty(elements, dtype=self.dtype, device=device)
            tensor = base.as_strided(self.size, self.stride, self.offset)
        else:
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        return with_bits(tensor, self)


def with_bits(tensor, layout):
    """Mark `tensor` as conjugated or negated where `layout` says so; return it."""
    if layout.conj:
        set_conj(tensor, True)
    if layout.neg:
        set_neg(tensor, True)
    return tensor


class Cell:
    """The values of a tensor, once they are computed.

    Ops hold cells; tensors hold cells and blocks. So, as on CUDA, memory is free when the last
    tensor is gone, and not only when the last op has run.

    Attributes:
        layout: a `Layout`.
        data: a CPU tensor, None before its kernel has run, or a `Failure`.
        parent: of a view, the cell that it was made from; otherwise None.
        view: of a view, the function of the data of `parent` that gives its own; None where the
            layout alone tells it.
        writer: the op that was issued last to write it, or None.
    """

    __slots__ = ("layout", "data", "parent", "view", "writer")

    def __init__(self, layout, data=None, parent=None, view=None):
        self.layout = layout
        self.data = data
        self.parent = parent
        self.view = view
        self.writer = None

    def root(self):
        """Return the cell that this one is a view of, or itself."""
        cell = self
        while cell.parent is not None:
            cell = cell.parent
        return cell


def strided(cell, layout):
    """Return the cell of a view of `cell` with the layout `layout`."""
    is_strided = cell.parent is not None and cell.view is None
    return Cell(layout, None, cell.parent if is_strided else cell)


class Failure:
    """Stands for the values of a tensor whose kernel failed, or that has none.

    Attributes:
        error: why there are no values.
        data: the CPU tensor of memory that was given back, see `storages.py`; or None.
    """

    __slots__ = ("error", "data")

    def __init__(self, error, data=None):
        self.error = error
        self.data = data


class Unavailable(Exception):
    """A tensor that an op wants to read has no values: its kernel failed."""

    def __init__(self, failure):
        self.failure = failure
        error = failure.error
        if failure is NO_VALUES or failure.data is not None:
            super().__init__(f"reads a tensor without values: {error}")
        else:
            super().__init__(f"reads a tensor whose kernel failed: {type(error).__name__}: {error}")


def fail(out, failure):
    """Let the cells in `out`, which is a cell, a list of cells or None, hold `failure`."""
    for cell in (out,) if type(out) is Cell else out or ():
        if cell is not None:
            cell.data = failure


def cells_in(values):
    """Yield the cells among `values`, also in lists of lists."""
    for value in values:
        if type(value) is Cell:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from cells_in(value)


def writers_of(op):
    """Return for each tensor that an op reads or writes the op that wrote it last, or None."""
    return [cell.root().writer for cell in cells_in([*op.args, *(op.kwargs or {}).values()])]


# Operators that write their first argument without reading it.
ONLY_WRITTEN = {"copy_", "zero_", "fill_", "uniform_", "normal_", "random_", "bernoulli_"}
NO_VALUES = Failure(
    RuntimeError("it was made while virtual GPUs computed no values: virtual_gpus(values=False)")
)


def revive(cell):
    """Give a tensor that was made without values some, not-a-number, since it is overwritten now.

    Args:
        cell: a `Cell`, or something else, with which nothing is done.
    """
    if type(cell) is Cell and cell.root().data is NO_VALUES:
        root = cell.root()
        root.data = root.layout.empty(CPU)
        if root.layout.dtype.is_floating_point:
            root.data.fill_(float("nan"))
        if cell.data is NO_VALUES:
            cell.data = None


def fetch(cell):
    """Return the CPU tensor with the values of `cell`, for an op that runs now.

    Raises:
        RuntimeError: the values are not computed yet.
        Unavailable: the kernel that should have computed them failed.
    """
    data = cell.data
    if data is None:
        if cell.parent is None:
            raise RuntimeError(
                "a tensor was read before the stream that computes it got so far: let the reading "
                "stream wait (wait_stream, wait_event). CUDA would go on with whatever lies in "
                "that memory"
            )
        data = fetch(cell.parent)
        if cell.view is None:
            layout = cell.layout
            data = torch.as_strided(data, layout.size, layout.stride, layout.offset)
        else:
            data = cell.view(data)
        cell.data = data
    elif type(data) is Failure:
        raise Unavailable(data)
    elif cell.parent is not None and type(cell.root().data) is Failure:
        raise Unavailable(cell.root().data)
    return data


def fetch_nested(value):
    """Return `value` with each cell in it, also in lists of lists, replaced by its values."""
    if type(value) is Cell:
        return fetch(value)
    if type(value) is list:
        return [fetch_nested(item) for item in value]
    return value


class Block:
    """The memory of one storage, given back when no tensor uses it any more.

    Attributes:
        num_bytes: its size.
        address: that of its first byte, in a range of addresses of the device's own.
        reference: the record of it that is left when it is gone.
    """

    __slots__ = ("reference", "__weakref__")

    @property
    def num_bytes(self):
        return self.reference.num_bytes

    @property
    def address(self):
        return self.reference.address or 0


class _Reference(weakref.ref):
    """A reference to a Block that tells of its end.

    It does so by a callback in C: an interrupt that came in the Python code of a `__del__` would
    be lost.

    Attributes:
        num_bytes, address: those of the block.
        streams: the streams that may still use it when it is freed.
        pending: the ops of these streams that hold it after it is freed; None before.
    """

    __slots__ = ("num_bytes", "address", "streams", "pending")


class Memory:
    """The memory of one device, accounted by storage when work is issued, as CUDA's allocator does.

    Every change is one step that an interrupt cannot tear, see scheduler.py. The figures are right
    after `collect`.

    Attributes:
        device: the torch.device, for messages.
        limit: its bytes.
        fraction: what part of them may be in use, 0 to 1.
        allowed: the bytes that are this part.
        allocated: bytes of all storages in use.
        held: bytes that were freed and that a stream still uses (`record_stream`).
        peak: the highest `allocated` since `reset_peak`.
        reserved_peak: the highest sum of `allocated` and `held` since `reset_peak`.
        recorded: number of blocks in use or held that `record_stream` was called for.
        num_allocations, total_allocated: number of blocks, and their bytes, since the device was
            made.
        num_retries: how often an allocation had to wait for memory that was held.
        num_ooms: how often an allocation failed.
    """

    def __init__(self, device, limit):
        self.device = device
        self.set_limit(limit)
        self.allocated = self.held = self.peak = self.reserved_peak = self.recorded = 0
        self.num_allocations = self.total_allocated = self.num_retries = self.num_ooms = 0
        self._next_address = (device.index + 1) << 40
        # By address. A reference that is collected together with its block does not call back.
        self._live = {}
        self._freed = deque()  # references whose block is gone and that are not accounted yet
        self._note_freed = self._freed.append
        self._held = {}  # by address: references that wait for their `pending`
        self._lock = threading.RLock()

    def set_limit(self, limit, fraction=1.0):
        """Let at most `fraction` of `limit` bytes be in use from now on."""
        self.limit = limit
        self.fraction = fraction
        self.allowed = int(limit * fraction)

    def allocate(self, num_bytes):
        """Return a Block of `num_bytes`; wait for streams that hold freed memory if need be.

        Raises:
            torch.OutOfMemoryError: more than `allowed` bytes would be in use, and none are held.
        """
        block = Block()
        block.reference = reference = _Reference(block, self._note_freed)
        reference.num_bytes = num_bytes
        reference.streams = ()
        reference.address = None
        is_exact = len(self._freed) > 64
        if is_exact:
            self.collect()
        while True:
            # One step from here, see scheduler.py; no other thread comes in between, either.
            allocated = self.allocated + num_bytes
            reserved = allocated + self.held
            if reserved <= self.allowed and (is_exact or reserved <= self.peak):
                address = self._next_address
                self._live[address] = reference
                reference.address = address
                self._next_address = address + num_bytes + GRANULARITY - num_bytes % GRANULARITY
                self.allocated = allocated
                self.num_allocations += 1
                self.total_allocated += num_bytes
                if allocated > self.peak:
                    self.peak = allocated
                if reserved > self.reserved_peak:
                    self.reserved_peak = reserved
                return block
            if is_exact:
                self._wait_for_memory(num_bytes)
            self.collect()
            is_exact = True

    def resize(self, block, num_bytes):
        """Give the memory of a block back now, though tensors use the block, and new memory to it.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; the block has none then.
        """
        freed, empty = _Reference(block), _Reference(block)
        old = block.reference
        freed.num_bytes, freed.streams, freed.address = old.num_bytes, old.streams, old.address
        freed.pending = getattr(old, "pending", None)
        empty.num_bytes, empty.streams, empty.address = 0, (), None
        if freed.address is not None:
            # One step, see scheduler.py. The old reference, which would call back, is gone then.
            self._live[freed.address] = freed
            block.reference = empty
            del old
            self._note_freed(freed)
        if num_bytes:
            new, fresh = _Reference(block, self._note_freed), self.allocate(num_bytes)
            new.num_bytes, new.streams, new.address = num_bytes, (), fresh.address
            # One step.
            self._live[new.address] = new
            block.reference = new
            fresh.reference = None

    def _wait_for_memory(self, num_bytes):
        """Wait for the ops that hold a freed block; raise OutOfMemoryError if there are none."""
        with self._lock:
            pending = next(iter(self._held.values())).pending if self._held else None
        if pending is None:
            self.num_ooms += 1
            raise self._out_of_memory(num_bytes)
        self.num_retries += 1
        for op in pending:
            wait(op, self.device)

    def record_stream(self, block, stream):
        """Hold `block` after it is freed until `stream` has done what it was given before that."""
        reference = block.reference
        if reference.address is None:  # its memory was given back
            return
        with self._lock:
            streams = {*reference.streams, stream}
            # One step, see scheduler.py: stores only.
            if not reference.streams:
                reference.pending = None
                self.recorded += 1
            reference.streams = streams

    def note_freed(self):
        """Take back the memory of blocks that are gone; streams may hold it until they are done."""
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
                        continue  # a destructor that ran meanwhile has come here first
                # One step to `popleft`. An interrupted allocation leaves a reference without an
                # address: it was never accounted.
                if reference.address is not None:
                    self.allocated -= reference.num_bytes
                    if reference.streams:
                        self._held[reference.address] = reference
                        self.held += reference.num_bytes
                    else:
                        del self._live[reference.address]
                popleft()

    def collect(self):
        """Take back the memory of blocks that are gone and that no stream holds any more."""
        self.note_freed()
        if not self._held:
            return
        catch_up()
        with self._lock:
            for reference in tuple(self._held.values()):
                if not any(map(under_way, reference.pending)) and reference.address in self._held:
                    del self._held[reference.address]
                    del self._live[reference.address]
                    self.held -= reference.num_bytes
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
    def num_blocks(self):
        """The number of blocks in use or held by streams."""
        return len(self._live)

    def reset_peak(self):
        """Let the peaks start again from what is in use now."""
        self.collect()
        self.peak = self.allocated
        self.reserved_peak = self.allocated + self.held
