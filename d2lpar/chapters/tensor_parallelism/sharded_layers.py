"""Layers split over devices in one process: by outputs ("column") or by inputs ("row").

What flows from layer to layer is a list, `parts`, with one tensor for each device. It is in one of
three states:

- replicated: every device holds the whole tensor;
- split: every device holds some of the features (of a convolution: channels), in order;
- partial: every device holds a term, and the tensor is the sum of them.

A replicated tensor has a replicated gradient, so every device computes the loss:

    outputs = net([X.to(device) for device in devices])
    losses = [loss(output, y.to(output.device)) for output in outputs]
    torch.autograd.backward(losses)

Four functions lead from state to state. `copied` and `summed` are f and g of Shoeybi et al. 2019
(https://arxiv.org/abs/1909.08053); each is what the other does backwards, and so are `cut` and
`gathered`. Only sums and gathers need the other devices. Each of these is a barrier: no device can
go on before all have arrived.
"""

import copy
import itertools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from d2lpar.collectives import allgather, allreduce

_LOCAL = (nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.Flatten)


def _sum(parts):
    """Return the sum of `parts`, on every device."""
    sums = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    allreduce(sums, "ring")
    return tuple(sums)


def _gather(parts, dim):
    """Return `parts` put together along `dim`, on every device."""
    return tuple(torch.cat(pieces, dim) for pieces in allgather(parts))


def _cut(wholes, sizes, dim):
    """Return from each of `wholes` the piece of its own device."""
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        whole.narrow(dim, start, size).contiguous()
        for whole, start, size in zip(wholes, starts, sizes, strict=False)
    )


class _Step(torch.autograd.Function):
    """A step from state to state: `there` forwards, `back` with the gradients."""

    @staticmethod
    def forward(ctx, there, back, *parts):
        ctx.back = back
        return there(parts)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, *ctx.back(gradients)


def copied(parts):
    """Hand a replicated tensor to layers that differ by device; backwards, sum its gradients.

    Takes equal tensors, one a device, and returns the same tensors, a tuple.
    """
    return _Step.apply(lambda parts: tuple(part.view_as(part) for part in parts), _sum, *parts)


def summed(parts):
    """Sum a partial tensor; backwards, hand the gradient of the sum to every term.

    Takes tensors of one shape, one a device, and returns the replicated sum, a tuple.
    """
    return _Step.apply(_sum, tuple, *parts)


def gathered(parts, dim):
    """Put a split tensor together; backwards, cut the gradient.

    Takes tensors, one a device, whose shapes may differ along `dim`, the split dimension, and
    returns the whole tensor, replicated: a tuple.
    """
    sizes = [part.shape[dim] for part in parts]
    return _Step.apply(partial(_gather, dim=dim), partial(_cut, sizes=sizes, dim=dim), *parts)


def cut(parts, dim):
    """Keep each device's piece of a replicated tensor; backwards, gather the gradient.

    Takes equal tensors, one a device, and returns a tuple of pieces along `dim`, of `split_sizes`.
    Raises ValueError if there are fewer features than devices.
    """
    sizes = split_sizes(parts[0].shape[dim], len(parts))
    return _Step.apply(partial(_cut, sizes=sizes, dim=dim), partial(_gather, dim=dim), *parts)


def split_sizes(n, k):
    """Return the sizes of n features split over k devices, which differ by at most one.

    Raises ValueError when there are fewer features than devices.
    """
    if n < k:
        raise ValueError(f"{n} features do not split over {k} devices")
    return [n // k + (i < n % k) for i in range(k)]


class _SplitLayer(nn.Module):
    """A linear layer or a convolution in shards, one a device.

    `dim` is the split dimension of the weight, 0 for outputs and 1 for inputs.
    """

    def __init__(self, layer, devices, dim):
        super().__init__()
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            kind = type(layer).__name__
            raise TypeError(f"{kind} does not split over devices: Linear and Conv2d do")
        if getattr(layer, "groups", 1) != 1:
            raise ValueError(f"a convolution in groups does not split: groups={layer.groups}")
        self.dim = dim
        self.features = 1 if isinstance(layer, nn.Conv2d) else -1  # dimension of data
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
                f"a layer on {len(self.shards)} devices takes a list of as many tensors, "
                f"one a device: got {len(parts)}"
            )
        return [shard(part) for shard, part in zip(self.shards, parts, strict=True)]

    def unsplit(self):
        """Return the layer in one piece on the CPU, with its gradients if there are any."""
        layer = copy.deepcopy(self.shards[0])
        layer.weight = self._joined([shard.weight for shard in self.shards], self.dim)
        if layer.bias is not None:
            biases = [shard.bias for shard in self.shards if shard.bias is not None]
            layer.bias = self._joined(biases, 0)
        return _with_sizes(layer)

    def _joined(self, params, dim):
        joined = nn.Parameter(torch.cat([param.detach().cpu() for param in params], dim))
        if all(param.grad is not None for param in params):
            joined.grad = torch.cat([param.grad.cpu() for param in params], dim)
        return joined


def _shard(layer, weight, bias, device):
    """Return a layer like `layer` with copies of these parameters on a device."""
    shard = copy.deepcopy(layer)
    for name, value in (("weight", weight), ("bias", bias)):
        param = None if value is None else nn.Parameter(value.to(device, copy=True))
        setattr(shard, name, param)
    return _with_sizes(shard)


def _with_sizes(layer):
    """Set a layer's counts of inputs and outputs to the shape of its weight; return the layer."""
    kind = "channels" if isinstance(layer, nn.Conv2d) else "features"
    for i, side in enumerate(("out", "in")):
        setattr(layer, f"{side}_{kind}", layer.weight.shape[i])
    return layer


class ColumnParallel(_SplitLayer):
    """A layer split by outputs: from a replicated tensor to a split one.

    Every device has some rows of PyTorch's weight (outputs, inputs), which are columns of the
    matrix in Y = X A. Backwards, the gradient of the input is summed: one barrier.

    Args:
        layer: an `nn.Linear` or `nn.Conv2d`; it stays as it is.
        devices: a list of devices.
        gather_output: put the output together, for layers that need all of it: one barrier more.

    Raises:
        TypeError: the layer is neither.
        ValueError: it has fewer outputs than there are devices, or a convolution has groups;
            when called, the list does not have one tensor for each device.
    """

    def __init__(self, layer, devices, gather_output=False):
        super().__init__(layer, devices, dim=0)
        self.gather_output = gather_output

    def forward(self, parts):
        outputs = self._outputs(copied(parts))
        return gathered(outputs, self.features) if self.gather_output else outputs


class RowParallel(_SplitLayer):
    """A layer split by inputs: from a split tensor to a replicated one, a sum over the devices.

    Every device has some columns of PyTorch's weight (outputs, inputs), which are rows of the
    matrix in Y = X A, and the first one has the bias, which counts once. One barrier forwards.

    Args:
        layer: an `nn.Linear` or `nn.Conv2d`; it stays as it is.
        devices: a list of devices.
        cut_input: take a replicated input and cut it; backwards it is put together again: one
            barrier more.

    Raises:
        TypeError: the layer is neither.
        ValueError: it has fewer inputs than there are devices, or a convolution has groups;
            when called, the list does not have one tensor for each device.
    """

    def __init__(self, layer, devices, cut_input=False):
        super().__init__(layer, devices, dim=1)
        self.cut_input = cut_input

    def forward(self, parts):
        if self.cut_input:
            parts = cut(parts, self.features)
        return summed(self._outputs(parts))


class OnEveryDevice(nn.Module):
    """A function or module, such as an activation, that every device applies to its own tensor."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, parts):
        return [self.module(part) for part in parts]


def tensor_parallel(net, devices):
    """Split a network inside its layers, in pairs of column and row (Shoeybi et al. 2019).

    A pair has one barrier forwards and, unless its input needs no gradient, one backwards. A last
    layer without a partner is split by outputs, which are gathered.

    Args:
        net: an `nn.Sequential` of `nn.Linear`, `nn.Conv2d` and modules without parameters that
            treat each channel alone; it stays as it is.
        devices: a list of devices.

    Returns:
        An `nn.Sequential` from a replicated input to a replicated output.

    Raises:
        TypeError: another kind of module is in the network.
        ValueError: a layer does not split.
    """
    last = max((i for i, m in enumerate(net) if isinstance(m, nn.Linear | nn.Conv2d)), default=-1)
    layers, is_split = [], False
    for i, module in enumerate(net):
        if isinstance(module, _LOCAL):
            layers.append(OnEveryDevice(module))
        elif is_split:
            layers.append(RowParallel(module, devices))
            is_split = False
        else:
            is_split = i != last
            layers.append(ColumnParallel(module, devices, gather_output=not is_split))
    return nn.Sequential(*layers)


def unsplit(net):
    """Undo `tensor_parallel`: return the network on the CPU, with its gradients if any."""
    return nn.Sequential(
        *(layer.module if isinstance(layer, OnEveryDevice) else layer.unsplit() for layer in net)
    )


def split_cross_entropy(outputs, labels, group):
    """Return the mean cross-entropy of outputs that are cut over the ranks of a group.

    Each rank has the outputs of some classes, in the order of ranks, and the loss of all. Three
    numbers for each example are exchanged: the largest output, the sum of all exponentials, and
    the output of the label. The gradient needs no exchange.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3.

    Args:
        outputs: (..., classes of this rank); every rank has as many.
        labels: (...), of the classes of all ranks.
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
