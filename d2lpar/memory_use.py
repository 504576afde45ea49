"""Measure memory: the peak of a computation, and what forward saves for backward."""

import torch

from vgpu import synchronize


def peak_bytes(work, devices):
    """Return the peak memory of `work()` on each device, a list of bytes.

    What was allocated before `work()` does not count.

    Args:
        work: a function without arguments.
        devices: a list of GPUs.
    """
    synchronize()
    accel = torch.get_device_module(devices[0])
    before = [accel.memory_allocated(device) for device in devices]
    for device in devices:
        accel.reset_peak_memory_stats(device)
    work()
    synchronize()
    return [
        accel.max_memory_allocated(device) - num_bytes
        for device, num_bytes in zip(devices, before, strict=True)
    ]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes that a forward pass saves for the backward pass.

        with SavedBytes(net) as saved:
            loss = net(X).sum()
        saved.total

    The parameters of `net` do not count.

    Attributes:
        total: the saved bytes; each tensor counts once.
    """

    def __init__(self, net):
        self._ours = {p.data_ptr() for p in net.parameters()}
        self._saved = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor):
        if tensor.data_ptr() not in self._ours:
            place, num_bytes = tensor.data_ptr(), tensor.nbytes
            self._saved[place] = max(num_bytes, self._saved.get(place, 0))  # of views, the largest
        return tensor.detach()  # an output, its grad_fn and what that saved would be a cycle

    @property
    def total(self):
        return sum(self._saved.values())

    def __enter__(self):
        super().__enter__()
        return self
