"""The five kernels of SyncBatchNorm, which torch implements for GPUs only.

Each rank computes mean and deviation of its part (`batch_norm_stats`); the ranks gather and combine
them. Backward sums over the part, then over the ranks. See torch/nn/modules/_functions.py.
"""

import torch

from vgpu.operators.plans import aten, tables


def _stats(tensor, eps):
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    var, mean = torch.var_mean(_exact(tensor), dims, correction=0)
    return mean, torch.rsqrt(var + eps)


def _gather_stats(tensor, means, invstds, running_mean, running_var, momentum, eps, counts):
    counts = counts.to(means.dtype).view(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    parts = invstds.square().reciprocal() - eps + (means - mean).square()
    squares = (parts * counts).sum(0)
    for running, new in ((running_mean, mean), (running_var, squares / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(momentum * new)
    return mean, torch.rsqrt(squares / total + eps)


def _normalize(tensor, weight, bias, mean, invstd, eps):
    out = (_exact(tensor) - _like(tensor, mean)) * _like(tensor, invstd)
    if weight is not None:
        out = out * _like(tensor, weight)
    if bias is not None:
        out = out + _like(tensor, bias)
    return out.to(tensor.dtype)


def _backward_reduce(grad, tensor, mean, invstd, weight, input_g, weight_g, bias_g):
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    grad = _exact(grad)
    total = grad.sum(dims)
    product = (grad * (_exact(tensor) - _like(tensor, mean))).sum(dims)
    dtype = product.dtype if weight is None else weight.dtype
    return (
        total if input_g else None,
        product if input_g else None,
        (product * invstd).to(dtype) if weight_g else None,
        total.to(dtype) if bias_g else None,
    )


def _backward(grad, tensor, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    total = counts.sum()
    slope = _like(tensor, invstd.square() * sum_dy_xmu / total)
    centred = _exact(tensor) - _like(tensor, mean)
    out = _exact(grad) - _like(tensor, sum_dy / total) - centred * slope
    scale = invstd if weight is None else invstd * weight
    return (out * _like(tensor, scale)).to(tensor.dtype)


def _exact(tensor):
    """Return a tensor in the dtype of GPUs' arithmetic: float32 for 16-bit dtypes."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _like(tensor, values):
    """Return values by channel in a shape that broadcasts to `tensor`."""
    return values.view(-1, *(1,) * (tensor.dim() - 2))


for _operator, _function in {
    aten.batch_norm_stats.default: _stats,
    aten.batch_norm_gather_stats_with_counts.default: _gather_stats,
    aten.batch_norm_elemt.default: _normalize,
    aten.batch_norm_backward_reduce.default: _backward_reduce,
    aten.batch_norm_backward_elemt.default: _backward,
}.items():
    tables.run[_operator] = tables.shape[_operator] = _function
