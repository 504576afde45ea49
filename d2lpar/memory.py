"""The memory that a computation needs: its peak, and what a forward pass keeps for backward."""

import torch

from vgpu import synchronize


def peak_bytes(work, devices):
    """Return by how many bytes the allocated memory of each device rises during `work()`.

    The result is a list with a number for each of the GPUs in `devices`: the peak, less what was
    allocated at the start.
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
    """Count the bytes that a forward pass keeps for the backward pass.

        with SavedBytes(net) as saved:
            loss = net(X).sum()
        saved.total

    The parameters of `net` do not count.
    """

    def __init__(self, net):
        self._ours = {p.data_ptr() for p in net.parameters()}
        self._saved = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor):
        if tensor.data_ptr() not in self._ours:
            self._saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    @property
    def total(self):
        """The bytes that were kept; each tensor counts once."""
        return sum(self._saved.values())

    def __enter__(self):
        super().__enter__()
        return self
