"""Chapter 07: the GPU and the batch of a rank."""

import torch
import torch.distributed as dist

from d2lpar.data.batches import check_batch


def device_of_rank():
    """Return the GPU of this rank, virtual or real: the current device, set by `launch`."""
    kind = "cuda" if torch.cuda.is_initialized() else "vgpu"
    return torch.device(kind, torch.get_device_module(kind).current_device())


def batch_of_rank(X, y):
    """Return this rank's parts of a batch, on its GPU; sizes differ by at most one.

    Args:
        X, y: the whole batch, (b, ...) and (b,).

    Raises:
        ValueError: X and y differ in length.
    """
    check_batch(X, y)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return tuple(tensor.tensor_split(world_size)[rank].to(device_of_rank()) for tensor in (X, y))
