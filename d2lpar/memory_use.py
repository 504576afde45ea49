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
        self._parameters = {p.data_ptr() for p in net.parameters()}
        self._saved = {}  # from addresses to bytes
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor):
        address = tensor.data_ptr()
        if address not in self._parameters:
            largest = max(tensor.nbytes, self._saved.get(address, 0))  # of views of one tensor
            self._saved[address] = largest
        return tensor.detach()  # otherwise a saved output and its grad_fn would refer to each other

    @property
    def total(self):
        return sum(self._saved.values())

    def __enter__(self):
        super().__enter__()
        return self
