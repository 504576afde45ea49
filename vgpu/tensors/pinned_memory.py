"""Pinned CPU memory, from and to which copies run without a wait of the host."""

from vgpu.private.virtual_tables import is_from_pinned_allocator


def is_pinned(tensor):
    """Return whether the memory of a CPU tensor is pinned for virtual GPUs."""
    marked = getattr(tensor.untyped_storage(), "_vgpu_pinned", False)
    return marked or is_from_pinned_allocator(tensor)


def pin(tensor):
    """Mark the memory of a CPU tensor as pinned and return the tensor."""
    tensor.untyped_storage()._vgpu_pinned = True
    return tensor
