"""Kernels that torch implements for GPUs only, on CPU tensors.

The fused cells of LSTM and GRU: gates (N, 4H) or (N, 3H), states (N, H). Backward reads the
workspace written by forward: the activated gates.

The five of SyncBatchNorm: each rank computes mean and deviation of its part (`batch_norm_stats`);
the ranks gather and combine them. Backward sums over the part, then over the ranks. See
torch/nn/modules/_functions.py.
"""

import torch


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    """Return hy, cy (N, H) and the activated gates (N, 4H): input, forget, cell, output."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """Return the gradients of the gates (N, 4H), of cx (N, H) and of the bias (4H,) or None."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cy = torch.zeros_like(cy) if grad_cy is None else grad_cy
    grad_c = grad_cy + grad_hy * o * (1 - tanh_cy * tanh_cy)
    grad_gates = torch.cat(
        (
            grad_c * g * i * (1 - i),
            grad_c * cx * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_hy * tanh_cy * o * (1 - o),
        ),
        1,
    )
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    """Return hy (N, H) and the workspace (N, 5H): r, z, n, hx and the hidden part of n."""
    ir, iz, inew = _with_bias(input_gates, input_bias).chunk(3, 1)
    hr, hz, hnew = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hnew).tanh()
    return n + z * (hx - n), torch.cat((r, z, n, hx, hnew), 1)


def gru_cell_backward(grad_hy, workspace, has_bias):
    """Return the gradients of both gates (N, 3H), of hx (N, H) and of both biases (3H,)."""
    r, z, n, hx, hnew = workspace.chunk(5, 1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * z * (1 - z)
    grad_r = grad_n * hnew * r * (1 - r)
    grad_input = torch.cat((grad_r, grad_z, grad_n), 1)
    grad_hidden = torch.cat((grad_r, grad_z, grad_n * r), 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *biases


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
