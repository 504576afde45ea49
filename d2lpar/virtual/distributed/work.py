"""What a collective returns: a `Work`, and the future that DDP and its hooks ask for."""

import torch
import torch.distributed as dist

from .. import device as registry
from .. import private, scheduler
from ..issuing import raise_now
from ..tensor import VirtualTensor


class VirtualWork(dist.Work):
    """Collectives under way on a virtual GPU.

    Args:
        ops: their ops, on one device.
        result: the tensors that they write.
        blocks: whether `wait` lets the host wait, as for a barrier.
    """

    def __init__(self, ops, result, blocks=False):
        super().__init__()
        self._ops, self._result, self._blocks = tuple(ops), result, blocks

    def wait(self, timeout=None):
        """Let the current stream wait; the host only looks whether it has failed already."""
        for op in self._ops:
            if self._blocks:
                scheduler.wait(op, op.stream.device.torch_device)
            error = op.error
            if op.done and error is not None:
                try:
                    raise_now(op, op.stream.device)
                finally:
                    op.error = error  # for `exception`, and for who waits once more
        for device in {op.stream.device for op in self._ops}:
            device.current_stream().wait_for(self._ops)
        _let_go(self._ops)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self):
        """Return whether the values have arrived."""
        scheduler.poll()
        return not any(map(scheduler.under_way, self._ops))

    def is_success(self):
        """Return whether the values have arrived, without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self):
        """Return what went wrong so far, or None."""
        return next((op.error for op in self._ops if op.done and op.error is not None), None)

    def result(self):
        """Return the list of the tensors that are written."""
        return self._result

    def source_rank(self):
        """Raise: a message from any rank is not to be had, as on NCCL."""
        raise RuntimeError("sourceRank() may only be called on a message from any source")

    def get_future(self):
        """Return a future of `result`."""
        current = registry.thread.current
        for op in self._ops:
            if private.in_backward() and hasattr(current, "used"):
                current.used.add(op.stream)  # C++ code waits for it, which no stream would notice
        return VirtualFuture(self._result)


class VirtualFuture(torch.futures.Future):
    """A future of tensors that collectives write: it is done at once, as all is issued.

    What `then` computes with the tensors runs on a stream of its own that waits for them, so that
    the current stream goes on.
    """

    def __init__(self, result=None):
        super().__init__()
        if result is not None:
            self.set_result(result)

    def wait(self):
        """Let the current streams wait for the tensors; return them."""
        result = super().wait()
        for tensor in _tensors(result):
            wait_for_writer(tensor)
        return result

    def value(self):
        """Return the tensors, without waiting."""
        return super().value()

    def then(self, callback):
        """Return the future of what `callback(self)` returns, computed behind the tensors."""
        devices = {tensor._cell.layout.device for tensor in _tensors(super().value())}
        future = VirtualFuture()
        if not devices:
            future.set_result(callback(self))
            return future
        (device,) = devices
        with torch.vgpu.Stream(device.index):
            for tensor in _tensors(super().value()):
                wait_for_writer(tensor)
            future.set_result(callback(self))
        return future


def _tensors(value):
    leaves = private.tree_flatten(value)[0]
    return [leaf for leaf in leaves if type(leaf) is VirtualTensor]


def wait_for_writer(tensor):
    """Let the current stream wait for the op that was issued last to write a tensor."""
    cell = tensor._cell.root()
    if cell.writer is not None:
        cell.layout.device.current_stream().wait_for((cell.writer,))
        _let_go((cell.writer,))


def _let_go(ops):
    """Let the memory of tensors of collectives go: as of now a stream waits that would use it."""
    for op in ops:
        kwargs = op.kwargs  # None once it has ended
        if kwargs and "call" in kwargs:
            kwargs["call"].inputs = kwargs["call"].outputs = ()
