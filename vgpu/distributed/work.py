"""The `Work` that a collective returns, and the future for DDP and its hooks."""

import time

import torch
import torch.distributed as dist

from vgpu.distributed.collective import Collective
from vgpu.operators.issuing import raise_now
from vgpu.private.autograd import in_backward
from vgpu.private.dispatch import tree_leaves
from vgpu.runtime import scheduler, threads
from vgpu.tensors.tensor import VirtualTensor


class VirtualWork(dist.Work):
    """One or more collectives issued on one virtual GPU.

    `result` are the tensors that they write; where it `blocks`, `wait` blocks the host, as for a
    barrier.
    """

    def __init__(self, ops, result, blocks=False):
        super().__init__()
        self._ops, self._result, self._blocks = tuple(ops), result, blocks

    def wait(self, timeout=None):
        """Make the current stream wait; raise if a collective has failed already.

        With a timeout, a `timedelta`, the host waits too, as for NCCL: DistBackendError after it.
        """
        if timeout is not None and timeout.total_seconds() > 0:  # from C++, 0 means none
            self._wait_on_host(timeout)
        for op in self._ops:
            if self._blocks:
                scheduler.wait(op, op.stream.device.torch_device)
            error = op.error
            if op.done and error is not None:
                try:
                    raise_now(op, op.stream.device)
                finally:
                    op.error = error  # kept for `exception` and the next `wait`
        for device in {op.stream.device for op in self._ops}:
            device.current_stream().wait_for(self._ops)
        for op in self._ops:
            op.drop_tensors()  # the next use of their memory runs behind the collective
        return True

    synchronize = block_current_stream = wait

    def _wait_on_host(self, timeout):
        end = scheduler.clock.now() + timeout.total_seconds()
        while not self.is_completed():
            if scheduler.clock.now() > end:
                names = ", ".join(op.name for op in self._ops)
                raise dist.DistBackendError(f"{names}: not complete after {timeout}")
            time.sleep(1e-4)

    def is_completed(self):
        scheduler.clock.poll()
        return not any(map(scheduler.under_way, self._ops))

    def is_success(self):
        return self.is_completed() and self.exception() is None

    def exception(self):
        """Return the first error so far, or None."""
        return next((op.error for op in self._ops if op.done and op.error is not None), None)

    def result(self):
        """Return the tensors that are written, a list."""
        return self._result

    def get_future(self):
        current = threads.thread.current
        for op in self._ops:
            if in_backward() and hasattr(current, "used"):
                current.used.add(op.stream)  # backward must wait for it: DDP's C++ does not
        return VirtualFuture(self._result)


class VirtualFuture(torch.futures.Future):
    """A future of tensors that collectives write; done as soon as they are issued.

    `then` computes on a new stream that waits for the tensors; the current stream does not wait.
    """

    def __init__(self, result=None):
        super().__init__()
        if result is not None:
            self.set_result(result)

    def wait(self):
        """Make the current streams wait for the tensors; return them."""
        result = super().wait()
        for tensor in _tensors(result):
            wait_for_writer(tensor)
        return result

    def then(self, callback):
        """Return a future of `callback(self)`, computed once the tensors are written."""
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
    return [leaf for leaf in tree_leaves(value) if type(leaf) is VirtualTensor]


def wait_for_writer(tensor):
    """Make the current stream wait for the last op issued to write a tensor."""
    cell = tensor._cell.root()
    if cell.writer is not None:
        cell.layout.device.current_stream().wait_for((cell.writer,))
        if isinstance(cell.writer, Collective):
            cell.writer.drop_tensors()
