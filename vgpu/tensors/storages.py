"""Storages that give their memory back, and take it again, while tensors still use them.

`fully_shard` frees a parameter by `tensor.untyped_storage().resize_(0)` after its layer and calls
`resize_` with the old size before it gathers the parameter again. Views that backward keeps see the
gathered values.
"""

import ctypes
import mmap

import torch

from vgpu.runtime.scheduler import Op, under_way
from vgpu.runtime.threads import issue_op
from vgpu.tensors.cells import Failure, lacks_values

GIVEN_BACK = "its memory was given back by untyped_storage().resize_(0)"


def resize_(storage, num_bytes):
    """Give the memory of a storage back now (0 bytes), or take new memory for it, without values.

    Kernels issued before still have the values. A tensor without memory has none: a kernel that
    reads it fails. Returns the storage.

    Raises:
        NotImplementedError: `num_bytes` is neither 0 nor the size that the storage had.
        torch.OutOfMemoryError: there is no memory for it.
    """
    cell, block = storage._cell, storage._block
    device, whole = cell.layout.device, cell.layout.num_bytes
    if num_bytes not in (0, whole):
        raise NotImplementedError(
            f"a storage on a virtual GPU is resized to 0 bytes, and back to the {whole} that its "
            f"tensor has: got {num_bytes}"
        )
    if num_bytes == block.num_bytes:
        return storage
    used_by = block.reference.streams
    device.memory.resize(block, num_bytes)
    if not device.compute.clock.is_modelled:  # modelled GPUs only account for it
        op = Op("resize_", "setting", device.compute, _take if num_bytes else _give_back, (cell,))
        before = [op for stream in used_by for op in stream.tail()]
        if cell.writer is not None and under_way(cell.writer):
            before.append(cell.writer)
        device.current_stream().wait_for(before)
        issue_op(op, device)
        cell.writer = op
    return storage


def _give_back(op):
    (cell,) = op.args
    if isinstance(cell.data, torch.Tensor):
        _drop_pages(cell.data.untyped_storage())
        cell.data = Failure(RuntimeError(GIVEN_BACK), cell.data)


def _take(op):
    (cell,) = op.args
    given_back = type(cell.data) is Failure and not lacks_values(cell.data)
    if given_back and cell.data.data is not None:
        cell.data = cell.data.data


def _drop_pages(storage):
    """Give the whole pages of a storage of the CPU back to the system; later they hold zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start, page = storage.data_ptr(), mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + storage.nbytes()) // page * page
        if first < end:
            address, size = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
            ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)
