"""Sums over the devices of one process that autograd differentiates: f and g of split layers.

`copied` and `summed` take a list `parts` with one tensor per device. They are f and g of Shoeybi et
al. 2019 (https://arxiv.org/abs/1909.08053): the backward pass of each is the forward pass of the
other. Only sums communicate; each is a barrier for all devices. Every device computes the loss:

    losses = [loss(output, y.to(output.device)) for output in outputs]
    torch.autograd.backward(losses)
"""

import torch

from d2lpar.collectives import allreduce


def _sum(parts):
    """Return the sum of `parts`, on every device."""
    sums = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    allreduce(sums, "ring")
    return tuple(sums)


class _Step(torch.autograd.Function):
    """Forward is `change`, backward `change_back` of the gradients."""

    @staticmethod
    def forward(ctx, change, change_back, *parts):
        ctx.change_back = change_back
        return change(parts)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.change_back(gradients)


def copied(parts):
    """Pass a replicated tensor to layers that differ by device; backward sums its gradients.

    Args:
        parts: equal tensors, one per device.

    Returns:
        The same tensors, a tuple.
    """
    return _Step.apply(lambda parts: tuple(part.view_as(part) for part in parts), _sum, *parts)


def summed(parts):
    """Sum terms; backward passes the gradient of the sum to every term.

    Args:
        parts: tensors of one shape, one per device.

    Returns:
        The sum, on every device: a tuple.
    """
    return _Step.apply(_sum, tuple, *parts)
