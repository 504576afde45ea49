"""DTensor: fused attention, which it supports on CUDA only."""

import functools
import math

from torch.nn import functional

from vgpu.private.patching import when_imported


def patch_dtensor(is_virtual):
    """Make attention work on DTensors of virtual GPUs once torch.distributed.tensor is imported."""
    when_imported(
        "torch.distributed.tensor._api", lambda module: _patch_attention(module, is_virtual)
    )


def patch_dtensor_class(change):
    when_imported("torch.distributed.tensor._api", lambda module: change(module.DTensor))


def _patch_attention(module, is_virtual):
    DTensor, Replicate = module.DTensor, module.Replicate  # noqa: N806
    attention = functional.scaled_dot_product_attention

    def local(tensor, mesh, placements):
        """Return this rank's local part of a tensor under `placements`."""
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(mesh, placements).to_local()

    def keeps(query, placement):
        """Return whether each rank can compute its part of the result from its part of query."""
        if not placement.is_shard() or placement.dim % query.ndim >= query.ndim - 2:
            return False
        mesh = zip(query.device_mesh.shape, query.placements, strict=True)
        parts = math.prod(size for size, each in mesh if each.is_shard(placement.dim))
        return query.shape[placement.dim] % parts == 0

    def of_mask(mask, query, placement):
        """Return the placement of a mask: that of the query, or replicated if it broadcasts."""
        if placement.is_shard() and mask.ndim == query.ndim:
            if mask.shape[placement.dim] == query.shape[placement.dim]:
                return placement
        return Replicate()

    @functools.wraps(attention)
    def scaled_dot_product_attention(query, key, value, attn_mask=None, *args, **kwargs):
        """Compute attention of DTensors of virtual GPUs on local parts, like fused kernels."""
        if not (isinstance(query, DTensor) and is_virtual(query.device)):
            return attention(query, key, value, attn_mask, *args, **kwargs)
        mesh = query.device_mesh
        placements = [each if keeps(query, each) else Replicate() for each in query.placements]
        parts = (local(tensor, mesh, placements) for tensor in (query, key, value))
        if isinstance(attn_mask, DTensor):
            split = [of_mask(attn_mask, query, placement) for placement in placements]
            attn_mask = local(attn_mask, mesh, split)
        result = attention(*parts, attn_mask, *args, **kwargs)
        return DTensor.from_local(result, mesh, placements, run_check=False)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
