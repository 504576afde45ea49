"""Storages that free and reallocate their memory while tensors still use them.

`fully_shard` frees a parameter by `tensor.untyped_storage().resize_(0)` after its layer, and calls
`resize_` with the old size before it gathers the parameter again. Views saved for backward see the
gathered values.
"""

import ctypes
import mmap

import torch

from vgpu.runtime.scheduler import Op, under_way
from vgpu.runtime.threads import issue_op
from vgpu.tensors.cells import Failure, lacks_values

FREED = "its memory was freed by untyped_storage().resize_(0)"


def resize_(storage, num_bytes):
    """Free the memory of a storage (0 bytes), or allocate new memory; return the storage.

    Kernels issued before still see the values. Kernels that read a tensor without memory fail.

    Raises:
        NotImplementedError: `num_bytes` is neither 0 nor the storage's original size.
        torch.OutOfMemoryError: there is not enough memory.
    """
    cell, block = storage._cell, storage._block
    device, whole = cell.layout.device, cell.layout.num_bytes
    if num_bytes not in (0, whole):
        raise NotImplementedError(
            f"size of a storage on a virtual GPU must be 0, or the {whole} bytes of its tensor: "
            f"got {num_bytes}"
        )
    if num_bytes == block.num_bytes:
        return storage
    used_by = block.reference.streams
    device.memory.resize(block, num_bytes)
    if not device.compute.clock.is_modelled:  # modelled GPUs only account for it
        work = _restore_values if num_bytes else _free
        op = Op("resize_", "setting", device.compute, work, (cell,))
        before = [op for stream in used_by for op in stream.tail()]
        if cell.writer is not None and under_way(cell.writer):
            before.append(cell.writer)
        device.current_stream().wait_for(before)
        issue_op(op, device)
        cell.writer = op
    return storage


def _free(op):
    (cell,) = op.args
    if isinstance(cell.data, torch.Tensor):
        _drop_pages(cell.data.untyped_storage())
        cell.data = Failure(RuntimeError(FREED), cell.data)


def _restore_values(op):
    (cell,) = op.args
    is_freed = type(cell.data) is Failure and not lacks_values(cell.data)
    if is_freed and cell.data.data is not None:
        cell.data = cell.data.data


def _drop_pages(storage):
    """Return the whole pages of a CPU storage to the system; they then read as zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start, page = storage.data_ptr(), mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + storage.nbytes()) // page * page
        if first < end:
            address, size = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
            ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)
