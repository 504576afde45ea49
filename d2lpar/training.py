"""Train and evaluate classifiers: accuracy, plain SGD, d2l's training loop for several GPUs."""

import torch
from torch import nn

from d2lpar.animator import Animator
from d2lpar.collectives import check_none_missing
from d2lpar.devices import try_all_gpus
from d2lpar.timing import Timer


class Accumulator:
    """Accumulate sums over `n` variables."""

    def __init__(self, n):
        self.data = [0.0] * n

    def add(self, *args):
        """Add one number or one-element tensor to each sum; blocks until a GPU has computed it.

        Raises:
            ValueError: the number of arguments is not `n`.
        """
        self.data = [a + float(b) for a, b in zip(self.data, args, strict=True)]

    def reset(self):
        """Reset all sums to 0."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, idx):
        return self.data[idx]


def accuracy(y_hat, y):
    """Return the number of correct predictions, a float; blocks until the device has it.

    Args:
        y_hat: scores (N, num_classes) or predicted classes (N,).
        y: true classes (N,).
    """
    if y_hat.dim() > 1 and y_hat.shape[1] > 1:
        y_hat = y_hat.argmax(dim=1)
    return float((y_hat.type(y.dtype) == y).sum())


def evaluate_accuracy_gpu(net, data_iter, device=None):
    """Return the fraction of correct predictions on a data set.

    Args:
        net: a module, left in evaluation mode as in d2l, or any callable.
        data_iter: batches (X, y); X may be a list of tensors.
        device: the device of the batches; by default that of the module's first parameter.

    Raises:
        ValueError: `data_iter` is empty.
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
        raise ValueError("data_iter must not be empty")
    return num_correct / num_examples


def sgd(params, lr, batch_size):
    """Take one step of minibatch stochastic gradient descent, then zero the gradients.

    Args:
        params: parameters, updated in place; their gradients are sums over the batch.
        lr: learning rate.
        batch_size: number of examples in the batch.

    Raises:
        ValueError: a gradient is None; no parameter is updated.
    """
    params = list(params)
    check_none_missing("gradient", [param.grad for param in params])
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad / batch_size
            param.grad.zero_()


def train_batch_ch13(net, X, y, loss, trainer, devices):
    """Take one training step, as in d2l 14.1.

    Args:
        net: a module or `nn.DataParallel` with its parameters on the first device.
        X: inputs (b, ...), or a list of such tensors.
        y: classes (b,).
        loss: a function of scores and classes that returns the losses (b,), not reduced.
        trainer: an optimizer.
        devices: a list; the batch is copied to the first device.

    Returns:
        The sum of the losses, a tensor, and the number of correct predictions.
    """
    X = [x.to(devices[0]) for x in X] if isinstance(X, list) else X.to(devices[0])
    y = y.to(devices[0])
    net.train()
    trainer.zero_grad()
    pred = net(X)
    loss_sum = loss(pred, y).sum()
    loss_sum.backward()
    trainer.step()
    return loss_sum, accuracy(pred, y)


def train_ch13(net, train_iter, test_iter, loss, trainer, num_epochs, devices=None):
    """Train on several GPUs with `nn.DataParallel`, as in d2l 14.1, and plot loss and accuracy.

    Prints loss and accuracy of the last epoch, and the mean number of examples per second, without
    the time of loading and of the test.

    Args:
        net: a module; it is moved to the first device.
        train_iter, test_iter: batches (X, y), with a length.
        loss, trainer: as in `train_batch_ch13`.
        num_epochs: number of epochs.
        devices: a list; `try_all_gpus()` by default.

    Raises:
        ValueError: no epoch or no batch.
    """
    devices = try_all_gpus() if devices is None else devices
    timer, num_batches = Timer(), len(train_iter)
    if num_epochs < 1 or num_batches < 1:
        raise ValueError(
            f"num_epochs and batches must be at least 1: got {num_epochs} and {num_batches}"
        )
    legend = ["train loss", "train acc", "test acc"]
    animator = Animator("epoch", "loss, accuracy", legend, [1, num_epochs], [0, 1])
    net = nn.DataParallel(net, device_ids=devices).to(devices[0])
    for epoch in range(num_epochs):
        metric = Accumulator(3)  # sum of losses, number of correct predictions, number of examples
        for i, (features, labels) in enumerate(train_iter):
            timer.start()
            loss_sum, num_correct = train_batch_ch13(net, features, labels, loss, trainer, devices)
            metric.add(loss_sum.detach(), num_correct, len(labels))
            timer.stop()
            if (i + 1) % max(1, num_batches // 5) == 0 or i == num_batches - 1:
                x = epoch + (i + 1) / num_batches
                animator.add(x, (metric[0] / metric[2], metric[1] / metric[2], None))
        test_acc = evaluate_accuracy_gpu(net, test_iter, devices[0])
        animator.add(epoch + 1, (None, None, test_acc))
    print(
        f"loss {metric[0] / metric[2]:.3f}, train acc {metric[1] / metric[2]:.3f}, "
        f"test acc {test_acc:.3f}"
    )
    print(f"{metric[2] * num_epochs / timer.sum():.1f} examples/sec on {[*devices]}")
