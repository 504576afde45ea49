"""Storages on virtual GPUs, and all that goes by them: set_, copies, pickles, saving and loading.

Views refer to the cell of a storage's values, and follow when it is resized. `fully_shard` frees a
parameter by `tensor.untyped_storage().resize_(0)` after its layer, and calls `resize_` with the old
size before it gathers the parameter again.
"""

import ctypes
import mmap
import re
import weakref

import torch

from vgpu.private.patching import replace
from vgpu.runtime import registry
from vgpu.runtime.scheduler import Op, under_way
from vgpu.runtime.threads import issue_op
from vgpu.tensors.cells import META, Missing, TensorLayout, lacks_values, strided
from vgpu.tensors.tensor import become, copy_to_device, view_as, wrap

FREED = "its memory was freed by untyped_storage().resize_(0)"


class DeviceStorage(torch.UntypedStorage):
    """The storage of a tensor on a virtual GPU: one address and size for all views."""

    @property
    def device(self):
        return self._cell.layout.device.torch_device

    def data_ptr(self):
        return self._block.address

    _cdata = property(data_ptr)

    def nbytes(self):
        return self._block.num_bytes

    size = __len__ = nbytes

    def __eq__(self, other):
        return isinstance(other, DeviceStorage) and self._block is other._block

    def __hash__(self):
        return hash(self._block)

    def weak_key(self):
        """Return a key that is equal for all views and does not keep the storage alive."""
        return weakref.ref(self._block)

    def flat(self, dtype=None):
        """Return all of the storage as a tensor of one dimension, by default of its own dtype."""
        layout = self._cell.layout
        size = dtype.itemsize if dtype else 1
        count = self.nbytes() // size * size // layout.dtype.itemsize
        whole = TensorLayout.contiguous(layout.device, layout.dtype, (count,))
        tensor = wrap(strided(self._cell, whole), self._block)
        return tensor if dtype in (None, layout.dtype) else tensor.view(dtype)

    def __getitem__(self, index):
        if isinstance(index, slice):
            raise NotImplementedError("a storage on a virtual GPU has no slices: slice a tensor")
        return self.flat(torch.uint8)[index].item()

    def __setitem__(self, index, value):
        self.flat(torch.uint8)[index] = value

    def fill_(self, value):
        self.flat(torch.uint8).fill_(value)
        return self

    def clone(self):
        return self.flat().clone().untyped_storage()

    def _write_file(self, *args):
        self.cpu()._write_file(*args)

    def _set_from_file(self, *args):
        return self.copy_(self.cpu()._set_from_file(*args))

    def resize_(self, num_bytes):
        """Change the size, to 0 to free the memory; return the storage.

        Kernels issued before still see the values. Kernels that read a tensor without memory fail.
        Raises torch.OutOfMemoryError, without a change.
        """
        cell, block = self._cell, self._block
        device = cell.layout.device
        if num_bytes == block.num_bytes:
            return self
        grows = num_bytes > cell.layout.num_bytes  # then the values move, for all streams
        if grows and not device.has_values:
            raise NotImplementedError("storages without values cannot grow: use Tensor.resize_")
        used_by = device.streams if grows else block.reference.streams
        device.memory.resize(block, num_bytes)
        if grows or not device.compute.clock.is_modelled:  # modelled GPUs only account for it
            op = Op("resize_", "setting", device.compute, _resize, (cell, num_bytes))
            before = [op for stream in used_by for op in stream.tail()]
            if cell.writer is not None and under_way(cell.writer):
                before.append(cell.writer)
            device.current_stream().wait_for(before)
            issue_op(op, device)
            cell.writer = op
        return self


# What torch prints, and writes to a file as the type.
DeviceStorage.__name__ = DeviceStorage.__qualname__ = "UntypedStorage"
DeviceStorage.__module__ = "torch.storage"


def untyped_storage(tensor):
    storage = torch.Tensor.untyped_storage(tensor)
    storage.__class__ = DeviceStorage
    storage._block, storage._cell = tensor._block, tensor._cell.root()
    return storage


def patch_storages():
    """Let torch create storages on virtual GPUs, copy from and to them, and save them."""
    make, copy_ = torch.UntypedStorage.__new__, torch.UntypedStorage.copy_
    is_storage = torch.is_storage

    def __new__(cls, *args, device=None, **kwargs):
        if device is not None and registry.is_virtual(torch.device(device)):
            return restore(make(cls, *args, device="cpu", **kwargs), str(device))
        return make(cls, *args, device=device, **kwargs)

    def _copy_(self, source, non_blocking=False):
        if type(self) is DeviceStorage or type(source) is DeviceStorage:
            _bytes(self).copy_(_bytes(source), non_blocking)
            return self
        return copy_(self, source, non_blocking)

    replace(torch.UntypedStorage, __new__=__new__, copy_=_copy_)
    replace(torch, is_storage=lambda obj: type(obj) is DeviceStorage or is_storage(obj))


def _bytes(storage):
    if type(storage) is DeviceStorage:
        return storage.flat(torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def restore(storage, location):
    """Return a copy of a CPU storage, such as torch.load reads, on the virtual GPU `location`.

    Returns None for another location; raises RuntimeError if this process has no such device.
    """
    if re.fullmatch(rf"(vgpu|{registry.device_type})(:[0-9]+)?", location):
        return copy_to_device(_bytes(storage), registry.find(location)).untyped_storage()


def refuse_sharing(tensor):
    """Raise RuntimeError: processes cannot share a tensor on a virtual GPU.

    On CUDA `torch.multiprocessing` shares it; a copy here would hide writes of the other process.
    """
    raise RuntimeError(
        f"a tensor on {tensor.device} cannot be shared with another process, which has its own "
        "virtual GPUs: send tensor.cpu(), or use torch.distributed"
    )


def set_storage(func, args, kwargs):
    """Implement `tensor.set_(storage[, offset, size, stride])`; a storage that is too small grows.

    Raises RuntimeError if the storage is on another device.
    """
    tensor, storage, *layout = args
    check_device(tensor, storage)
    meta = torch.empty(0, dtype=tensor.dtype, device=META)
    func(meta, torch.UntypedStorage(storage.nbytes(), device=META), *layout)
    after = TensorLayout.of(storage._cell.layout.device, meta)
    if after.num_bytes > storage.nbytes():
        storage.resize_(after.num_bytes)
    become(tensor, view_as(storage.flat(tensor.dtype), after))
    return tensor


def check_device(tensor, source):
    """Raise RuntimeError unless a tensor can be set to `source`, a tensor or a storage."""
    if tensor.device != source.device:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{tensor.device}" to a storage on '
            f'different device "{source.device}".  This is no longer allowed; the devices must '
            "match."
        )


def _resize(op):
    cell, num_bytes = op.args
    values, lacking = cell.data, lacks_values(cell.data)
    if type(values) is Missing:
        values = values.data
    if values is None:  # a kernel failed, or there are none
        return
    memory = values.untyped_storage()
    if num_bytes > memory.nbytes():
        memory.resize_(num_bytes)
    elif num_bytes == 0:
        _drop_pages(memory)
    if not lacking:
        cell.data = values if num_bytes else Missing(RuntimeError(FREED), values)


def _drop_pages(storage):
    """Return the whole pages of a CPU storage to the system; they then read as zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        start, page = storage.data_ptr(), mmap.PAGESIZE
        first, end = -(-start // page) * page, (start + storage.nbytes()) // page * page
        if first < end:
            address, size = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
            ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)
