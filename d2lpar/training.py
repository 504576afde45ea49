"""What the chapters' training loops share: accuracy, plain SGD, a timed step."""

import torch
from torch import nn
from torch.nn import functional as F

from d2lpar.timing import best_seconds


def accuracy(y_hat, y):
    """Return the number of correct predictions, a float; reading it waits for the device.

    Args:
        y_hat: scores (N, num_classes), or predicted classes (N,).
        y: true classes (N,).
    """
    if y_hat.dim() > 1 and y_hat.shape[1] > 1:
        y_hat = y_hat.argmax(dim=1)
    return float((y_hat.type(y.dtype) == y).sum())


def evaluate_accuracy_gpu(net, data_iter, device=None):
    """Return the fraction of correct predictions over a data set.

    Args:
        net: a module, which is left in evaluation mode as d2l leaves it, or any callable.
        data_iter: batches (X, y); X may be a list of tensors.
        device: where to send the batches; for a module, its first parameter's device by default.

    Raises:
        ValueError: `data_iter` holds no example.
    """
    if isinstance(net, nn.Module):
        net.eval()
        if device is None:
            device = next(net.parameters()).device
    num_correct, num_examples = 0.0, 0
    with torch.no_grad():
        for X, y in data_iter:
            X = [x.to(device) for x in X] if isinstance(X, list) else X.to(device)
            y = y.to(device)
            num_correct += accuracy(net(X), y)
            num_examples += y.numel()
    if not num_examples:
        raise ValueError("data_iter holds no example")
    return num_correct / num_examples


def sgd(params, lr, batch_size):
    """Take one step of minibatch stochastic gradient descent, then zero the gradients.

    Args:
        params: parameters whose gradients are sums over the batch; updated in place.
        lr: learning rate.
        batch_size: number of examples in the sums.

    Raises:
        ValueError: a gradient is None; no parameter has been updated.
    """
    params = list(params)
    check_none_missing("gradient", [param.grad for param in params])
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()


def check_none_missing(what, data):
    """Raise ValueError where an entry of `data`, a list of gradients for example, is None."""
    for i, tensor in enumerate(data):
        if tensor is None:
            raise ValueError(
                f"{what} {i} of {len(data)} is None, as a gradient is before backward(): "
                "call backward() on a loss that uses the parameter"
            )


def step_seconds(net, X, y, dtype=torch.float32):
    """Return the seconds of a training step with SGD, the best of two after one to warm up.

    In the second step `DistributedDataParallel` rebuilds its buckets, so the best of two counts.

    Args:
        net: a classifier, possibly wrapped in `DataParallel` or `DistributedDataParallel`.
        X, y: a batch, (b, ...) and (b,), on the device of its (first) parameters.
        dtype: the dtype for `torch.autocast`; float32 leaves autocast off.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        with torch.autocast(X.device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(net(X), y)
        loss.backward()
        optimizer.step()

    return best_seconds(step, repeats=2)
