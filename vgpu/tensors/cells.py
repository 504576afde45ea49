"""Layouts of tensors, and cells, which hold their values once computed."""

from math import prod

import torch

from vgpu.private.tensors import set_conj, set_neg

MAX_LAYOUTS = 100_000
CPU = torch.device("cpu")
META = torch.device("meta")


class TensorLayout:
    """Device, dtype and layout of a tensor; interned, so that `is` compares.

    Attributes:
        device: a `Device`.
        dtype, size, stride, offset: as in a tensor; stride and offset in elements.
        conj, neg: whether the values are stored conjugated or negated.
        num_bytes: bytes from the start of its memory to the end of the last element.
    """

    __slots__ = ("device", "dtype", "size", "stride", "offset", "conj", "neg", "num_bytes")
    _known = {}

    @classmethod
    def of(cls, device, tensor):
        """Return the TensorLayout of `tensor`, a CPU or meta tensor, moved to `device`."""
        if tensor.layout is not torch.strided:
            refuse_sparse(tensor.layout)
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
    def contiguous(cls, device, dtype, size):
        return cls.of(device, torch.empty(size, dtype=dtype, device=META))

    @classmethod
    def _get(cls, *key):
        layout = cls._known.get(key)
        if layout is None:
            layout = cls()
            for name, value in zip(cls.__slots__, key, strict=False):
                setattr(layout, name, value)
            elements = 0
            if 0 not in layout.size:
                lengths = zip(layout.size, layout.stride, strict=True)
                elements = 1 + layout.offset + sum((n - 1) * step for n, step in lengths)
            layout.num_bytes = elements * layout.dtype.itemsize
            if len(cls._known) >= MAX_LAYOUTS:
                cls._known.clear()
            layout = cls._known.setdefault(key, layout)
        return layout

    def empty(self, device, storage=None):
        """Return an empty tensor of this layout on `device`, CPU or meta, in `storage` if given."""
        if storage is None and not self.offset:
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        else:
            storage = storage or torch.UntypedStorage(self.num_bytes, device=device)
            tensor = torch.empty(0, dtype=self.dtype, device=device)
            tensor.set_(storage, self.offset, self.size, self.stride)
        return with_bits(tensor, self)


def refuse_sparse(layout):
    """Raise NotImplementedError for a sparse layout, whose memory is not a single storage."""
    raise NotImplementedError(
        f"layout of a tensor on a virtual GPU must be torch.strided: got {layout}; keep it on the "
        "CPU, or call to_dense() there; nn.Embedding has dense gradients without sparse=True"
    )


def with_bits(tensor, layout):
    if layout.conj:
        set_conj(tensor, True)
    if layout.neg:
        set_neg(tensor, True)
    return tensor


class Cell:
    """The values of a tensor, once they are computed.

    Ops reference cells; tensors reference cells and blocks. So, as on CUDA, memory is free once the
    last tensor is deleted, before the last op has run.

    Attributes:
        data: a CPU tensor, None before its kernel has run, or a `Missing`.
        parent: the cell that a view refers to.
        view: function(data of `parent`) that returns the data of a view; None if the layout is
            sufficient.
        writer: the last issued op that writes it, or None.
    """

    __slots__ = ("layout", "data", "parent", "view", "writer")

    def __init__(self, layout, data=None, parent=None, view=None):
        self.layout = layout
        self.data = data
        self.parent = parent
        self.view = view
        self.writer = None

    def root(self):
        """Return the cell of which this one is a view, or itself."""
        cell = self
        while cell.parent is not None:
            cell = cell.parent
        return cell


def strided(cell, layout):
    """Return the cell of a view of `cell` with `layout`."""
    is_strided = cell.parent is not None and cell.view is None
    return Cell(layout, None, cell.parent if is_strided else cell)


class Missing:
    """Placeholder for missing values.

    Attributes:
        error: the reason.
        data: the CPU tensor of the values, whose memory was freed (`storages.py`) or is kept for
            later values; or None.
    """

    __slots__ = ("error", "data")

    def __init__(self, error, data=None):
        self.error = error
        self.data = data


class Unavailable(Exception):
    """An input of an op has no values."""

    def __init__(self, missing):
        self.missing = missing
        error = missing.error
        if missing is NO_VALUES or missing.data is not None:
            super().__init__(f"reads a tensor without values: {error}")
        else:
            super().__init__(f"reads a tensor whose kernel failed: {type(error).__name__}: {error}")


def set_missing(out, missing):
    """Store a `Missing` in the cells of `out`: a cell, a list of cells, or None."""
    for cell in (out,) if type(out) is Cell else out or ():
        if cell is not None:
            cell.data = missing


def cells_in(values):
    for value in values:
        if type(value) is Cell:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from cells_in(value)


def writers_of(op):
    """Return the last writer of each tensor that an op reads or writes, an op or None."""
    return [cell.root().writer for cell in cells_in([*op.args, *(op.kwargs or {}).values()])]


# Operators that overwrite their first argument without reading it.
ONLY_WRITTEN = {"copy_", "zero_", "fill_", "uniform_", "normal_", "random_", "bernoulli_"}
NO_VALUES = Missing(RuntimeError("it was created without values, on virtual_gpus(values=False)"))


def small_bytes(dtype):
    """Return the maximum size in bytes of tensors with values on devices without values.

    DDP compares several integers for each parameter; bytes may be pickled objects for ranks.
    """
    if dtype == torch.uint8:
        return 2**26
    return 2**16 if dtype.is_floating_point or dtype.is_complex else 2**20


def may_have_values(layout):
    """Return whether a tensor has values if its inputs have; without values, only small ones do."""
    return layout.device.has_values or layout.num_bytes <= small_bytes(layout.dtype)


def lacks_values(data):
    """Return whether `data` of a cell is the placeholder for values that were not computed."""
    return type(data) is Missing and data.error is NO_VALUES.error


def is_known(cell):
    """Return whether the values of a tensor are computed."""
    return isinstance(cell.root().data, torch.Tensor) and type(cell.data) is not Missing


def is_whole(cell):
    """Return whether a tensor covers all of its memory."""
    layout = cell.layout
    return prod(layout.size) * layout.dtype.itemsize == cell.root().layout.num_bytes


def drop_values(cell):
    """Mark a tensor, and all that share its memory, as without values.

    A small tensor keeps its CPU memory, to which its views refer, for later values.
    """
    root = cell.root()
    memory = root.data.data if type(root.data) is Missing else root.data
    keeps = memory is not None and may_have_values(root.layout)
    root.data = Missing(NO_VALUES.error, memory) if keeps else NO_VALUES


def revive(cell):
    """Allocate a tensor without values that is about to be overwritten, filled with nan."""
    if type(cell) is Cell and lacks_values(cell.root().data):
        root = cell.root()
        memory = root.data.data
        root.data = root.layout.empty(CPU) if memory is None else memory
        if root.layout.dtype.is_floating_point or root.layout.dtype.is_complex:
            root.data.fill_(float("nan"))


def fetch(cell):
    """Return the CPU tensor with the values of `cell`, for a running op.

    Raises RuntimeError if they are not computed yet, Unavailable if a kernel failed for example.
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
    elif type(data) is Missing:
        raise Unavailable(data)
    elif cell.parent is not None and type(cell.root().data) is Missing:
        raise Unavailable(cell.root().data)
    return data


def fetch_nested(value):
    """Return `value` with each cell in it, also in nested lists, replaced by its values."""
    if type(value) is Cell:
        return fetch(value)
    if type(value) is list:
        return [fetch_nested(item) for item in value]
    return value
