"""Layers split over devices in one process: by outputs ("column") or by inputs ("row").

Layers pass a list `parts` with one tensor per device, in one of three states:

- replicated: every device has the whole tensor;
- split: every device has some of the features (channels of a convolution), in order;
- partial: every device has a term, and the tensor is their sum.

The gradient of a replicated tensor is replicated, so every device computes the loss:

    outputs = net([X.to(device) for device in devices])
    losses = [loss(output, y.to(output.device)) for output in outputs]
    torch.autograd.backward(losses)

`copied` and `summed` change the state. They are f and g of Shoeybi et al. 2019
(https://arxiv.org/abs/1909.08053): the backward pass of each is the forward pass of the other. Only
sums communicate; each is a barrier for all devices.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from d2lpar.collectives import allreduce


def _sum(parts):
    """Return the sum of `parts`, on every device."""
    sums = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    allreduce(sums, "ring")
    return tuple(sums)


class _Step(torch.autograd.Function):
    """A change of state: `change` in forward, `change_back` of the gradients in backward."""

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
    """Sum a partial tensor; backward passes the gradient of the sum to every term.

    Args:
        parts: tensors of one shape, one per device.

    Returns:
        The replicated sum, a tuple.
    """
    return _Step.apply(_sum, tuple, *parts)


def split_sizes(n, k):
    """Return the sizes of n features split over k devices, which differ by at most one.

    Raises:
        ValueError: there are fewer features than devices.
    """
    if n < k:
        raise ValueError(f"features must be at least {k} to split over {k} devices: got {n}")
    return [n // k + (i < n % k) for i in range(k)]


class _SplitLayer(nn.Module):
    """A linear layer or a convolution in shards, one per device.

    `dim` is the split dimension of the weight: 0 for outputs, 1 for inputs.
    """

    def __init__(self, layer, devices, dim):
        super().__init__()
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            kind = type(layer).__name__
            raise TypeError(f"the layer must be Linear or Conv2d to split over devices: got {kind}")
        if getattr(layer, "groups", 1) != 1:
            raise ValueError(f"groups of a convolution must be 1 to split: got {layer.groups}")
        sizes = split_sizes(layer.weight.shape[dim], len(devices))
        weights, biases = layer.weight.detach().split(sizes, dim), [None] * len(devices)
        if layer.bias is not None:
            bias = layer.bias.detach()
            biases = bias.split(sizes) if dim == 0 else [bias, *biases[1:]]
        self.shards = nn.ModuleList(
            _shard(layer, weight, bias, device)
            for weight, bias, device in zip(weights, biases, devices, strict=True)
        )

    def _outputs(self, parts):
        """Return the output of each shard for its part."""
        if len(parts) != len(self.shards):
            raise ValueError(
                f"the input of a layer on {len(self.shards)} devices must have one tensor per "
                f"device: got {len(parts)}"
            )
        return [shard(part) for shard, part in zip(self.shards, parts, strict=True)]


def _shard(layer, weight, bias, device):
    """Return a copy of `layer` on a device with copies of the given parameters."""
    shard = copy.deepcopy(layer)
    for name, value in (("weight", weight), ("bias", bias)):
        param = None if value is None else nn.Parameter(value.to(device, copy=True))
        setattr(shard, name, param)
    return _with_sizes(shard)


def _with_sizes(layer):
    """Set a layer's numbers of inputs and outputs from the shape of its weight; return it."""
    kind = "channels" if isinstance(layer, nn.Conv2d) else "features"
    for i, side in enumerate(("out", "in")):
        setattr(layer, f"{side}_{kind}", layer.weight.shape[i])
    return layer


class ColumnParallel(_SplitLayer):
    """A layer split by outputs: maps a replicated tensor to a split one.

    Every device has some rows of PyTorch's weight (outputs, inputs), which are columns of A in
    Y = X A. Backward sums the gradient of the input: one barrier.

    Args:
        layer: an `nn.Linear` or `nn.Conv2d`; it is not changed.
        devices: a list of devices.

    Raises:
        TypeError: the layer is neither linear nor a convolution.
        ValueError: there are fewer outputs than devices, or a convolution has groups. When called:
            the input is not a list with one tensor per device.
    """

    def __init__(self, layer, devices):
        super().__init__(layer, devices, dim=0)

    def forward(self, parts):
        return self._outputs(copied(parts))


class RowParallel(_SplitLayer):
    """A layer split by inputs: maps a split tensor to a replicated one, a sum over the devices.

    Every device has some columns of PyTorch's weight (outputs, inputs), which are rows of A in
    Y = X A; only the first has the bias. Forward sums the outputs: one barrier.

    Args:
        layer: an `nn.Linear` or `nn.Conv2d`; it is not changed.
        devices: a list of devices.

    Raises:
        TypeError: the layer is neither linear nor a convolution.
        ValueError: there are fewer inputs than devices, or a convolution has groups. When called:
            the input is not a list with one tensor per device.
    """

    def __init__(self, layer, devices):
        super().__init__(layer, devices, dim=1)

    def forward(self, parts):
        return summed(self._outputs(parts))


def split_cross_entropy(outputs, labels, group):
    """Return the mean cross-entropy of logits split by classes over the ranks of a group.

    Ranks exchange three numbers per example: the largest logit, the sum of the exponentials and
    the logit of the label. Backward does not communicate.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

    Args:
        outputs: logits (..., num_classes / world_size) of this rank's classes, in rank order.
        labels: class indices (...), among all classes.
        group: a process group.
    """
    return _SplitCrossEntropy.apply(outputs, labels, group)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, labels, group):
        num_classes = outputs.shape[-1]
        labels = labels.unsqueeze(-1) - group.rank() * num_classes
        here = (labels >= 0) & (labels < num_classes)
        labels = labels.clamp(0, num_classes - 1)
        z = outputs.to(torch.promote_types(outputs.dtype, torch.float32), copy=True)
        largest = z.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        z -= largest
        chosen = z.gather(-1, labels) * here
        z.exp_()
        both = torch.stack([z.sum(-1, keepdim=True), chosen])
        dist.all_reduce(both, group=group)
        total, chosen = both
        ctx.save_for_backward(z.div_(total), labels, here)  # the softmax
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, labels, here = ctx.saved_tensors
        softmax.scatter_add_(-1, labels, -here.to(softmax.dtype))
        return softmax.mul_(gradient / here.numel()), None, None
