"""What DTensor asks of CUDA and of no other device: random numbers by offsets, fused attention."""

import contextlib
import functools

import torch
from torch.nn import functional

from .patching import when_imported
from .tensors import CPUGenerator

_SEEDS = 2**62


def patch_dtensor(is_virtual, generator_of):
    """Make DTensors of virtual GPUs draw random numbers and compute attention.

    Both change with the import of torch.distributed.tensor.

    Args:
        is_virtual: function that returns whether a `torch.device` is a virtual GPU.
        generator_of: function of such a device that returns its generator.
    """
    when_imported(
        "torch.distributed.tensor._random",
        lambda module: _patch_random(module, is_virtual, generator_of),
    )
    when_imported(
        "torch.distributed.tensor._api", lambda module: _patch_attention(module, is_virtual)
    )


def patch_dtensor_class(change):
    """Call `change` with the class DTensor once there is one."""
    when_imported("torch.distributed.tensor._api", lambda module: change(module.DTensor))


def _part(tracker, spec):
    """Return the number of this rank's part of a DTensor, whose copies have the same number.

    Args:
        tracker: the `OffsetBasedRNGTracker`.
        spec: the `DTensorSpec`.
    """
    from torch.distributed.tensor import _random

    mesh = spec.mesh
    coordinate = [mesh._sym_get_coordinate(dim) for dim in range(mesh.ndim)]
    return tracker._calc_shard_linear_idx(*_random._calc_shard_info(coordinate, spec))


def _patch_random(module, is_virtual, generator_of):
    tracker = module.OffsetBasedRNGTracker
    distribute_region = tracker._distribute_region

    @contextlib.contextmanager
    def _distribute_region(self, spec, generator=None):
        """Within it a random operator draws this rank's part of a DTensor.

        CUDA's random numbers have a seed and an offset, and torch gives each part an offset. Those
        of virtual GPUs are the CPU's, which have none: each part gets a seed. It comes from a state
        that all ranks share, and all of them share the next one, too.
        """
        if self._device is None or not is_virtual(self._device):
            with distribute_region(self, spec, generator):
                yield
            return
        if not self.distribute_region_enabled:
            yield
            return
        source = generator_of(self._device)
        shared = CPUGenerator()
        shared.set_state((source if generator is None else generator).get_state())
        seed = torch.randint(_SEEDS, (), generator=shared, device="cpu").item()
        before = source.get_state()
        source.manual_seed(seed + _part(self, spec))
        try:
            yield
        finally:
            source.set_state(before)
            (source if generator is None else generator).set_state(shared.get_state())

    tracker._distribute_region = _distribute_region


def _patch_attention(module, is_virtual):
    DTensor, Replicate = module.DTensor, module.Replicate  # noqa: N806
    attention = functional.scaled_dot_product_attention

    def local(tensor, mesh, placements):
        """Return this rank's part of a tensor under `placements`: its shard, or all of it."""
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.redistribute(mesh, placements).to_local()

    def keeps(query, mesh_dim, placement):
        """Return whether each rank can compute its part of the result from its part of a query."""
        if not placement.is_shard() or placement.dim % query.ndim >= query.ndim - 2:
            return False
        return query.shape[placement.dim] % query.device_mesh.size(mesh_dim) == 0

    def of_mask(mask, query, placement):
        """Return how a mask is split where a query is: not where it is the same for all."""
        if placement.is_shard() and mask.ndim == query.ndim:
            if mask.shape[placement.dim] == query.shape[placement.dim]:
                return placement
        return Replicate()

    @functools.wraps(attention)
    def scaled_dot_product_attention(query, key, value, attn_mask=None, *args, **kwargs):
        """Compute attention of DTensors of virtual GPUs part by part, as fused kernels do."""
        if not (isinstance(query, DTensor) and is_virtual(query.device)):
            return attention(query, key, value, attn_mask, *args, **kwargs)
        mesh = query.device_mesh
        placements = [
            placement if keeps(query, mesh_dim, placement) else Replicate()
            for mesh_dim, placement in enumerate(query.placements)
        ]
        parts = (local(tensor, mesh, placements) for tensor in (query, key, value))
        if isinstance(attn_mask, DTensor):
            split = [of_mask(attn_mask, query, placement) for placement in placements]
            attn_mask = local(attn_mask, mesh, split)
        result = attention(*parts, attn_mask, *args, **kwargs)
        return DTensor.from_local(result, mesh, placements, run_check=False)

    functional.scaled_dot_product_attention = scaled_dot_product_attention
