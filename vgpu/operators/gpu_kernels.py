"""Kernels that torch implements for GPUs only, on CPU tensors.

The fused cells of LSTM and GRU: gates (N, 4H) or (N, 3H), states (N, H). Backward reads the
workspace written by forward: the sums of the gates, for GRU with the hidden part of n and hx.

The five of SyncBatchNorm: each rank computes mean and deviation of its part (`batch_norm_stats`);
the ranks gather and combine them. Backward sums over the part, then over the ranks. See
torch/nn/modules/_functions.py.
"""

import torch

from vgpu.operators.plans import aten


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """Return hy, cy (N, H) and the gates (N, 4H): input, forget, cell, output."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, gates, has_bias):
    """Return the gradients of the gates (N, 4H), of cx (N, H) and of the bias (4H,) or None."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    backward = aten._thnn_differentiable_lstm_cell_backward.default
    grads = backward(grad_hy, grad_cy, gates, torch.zeros_like(gates), None, None, cx, cy)
    return grads[0], grads[2], grads[0].sum(0) if has_bias else None


def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """Return hy (N, H) and the workspace (N, 5H): sums of r and z, the two parts of n, and hx."""
    ir, iz, inew = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hnew = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = ir + hr, iz + hz
    n = (inew + r.sigmoid() * hnew).tanh()
    return n + z.sigmoid() * (hx - n), torch.cat((r, z, inew, hnew, hx), 1)


def gru_cell_backward(grad_hy, workspace, has_bias):
    """Return the gradients of both gates (N, 3H), of hx (N, H) and of both biases (3H,)."""
    *gates, hnew, hx = workspace.chunk(5, 1)
    zeros = torch.zeros_like(hx)
    gates, hidden = torch.cat(gates, 1), torch.cat((zeros, zeros, hnew), 1)
    backward = aten._thnn_differentiable_gru_cell_backward.default
    grads = backward(grad_hy, gates, hidden, hx, None, None)[:3]
    return *grads, *((grads[0].sum(0), grads[1].sum(0)) if has_bias else (None, None))


def _with_bias(gates, bias):
    return gates if bias is None else gates + bias


def batch_norm_stats(tensor, eps):
    dims = [dim for dim in range(tensor.dim()) if dim != 1]
    var, mean = torch.var_mean(_exact(tensor), dims, correction=0)
    return mean, torch.rsqrt(var + eps)


def batch_norm_gather_stats(
    tensor, means, invstds, running_mean, running_var, momentum, eps, counts
):
    counts = counts.to(means.dtype).view(-1, 1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    parts = invstds.square().reciprocal() - eps + (means - mean).square()
    squares = (parts * counts).sum(0)
    for running, new in ((running_mean, mean), (running_var, squares / (total - 1))):
        if running is not None:
            running.mul_(1 - momentum).add_(momentum * new)
    return mean, torch.rsqrt(squares / total + eps)


def batch_norm_normalize(tensor, weight, bias, mean, invstd, eps):
    out = (_exact(tensor) - _like(tensor, mean)) * _like(tensor, invstd)
    if weight is not None:
        out = out * _like(tensor, weight)
    if bias is not None:
        out = out + _like(tensor, bias)
    return out.to(tensor.dtype)


def batch_norm_backward_reduce(grad, tensor, mean, invstd, weight, input_g, weight_g, bias_g):
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


def batch_norm_backward(grad, tensor, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
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
