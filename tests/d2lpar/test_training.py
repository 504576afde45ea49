import pytest
import torch
from torch import nn

from d2lpar.training import accuracy, evaluate_accuracy_gpu, sgd, train_ch13


def test_accuracy_counts_scores_and_classes():
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    y = torch.tensor([1, 0, 0])
    assert accuracy(scores, y) == 2.0
    assert accuracy(scores.argmax(dim=1), y) == 2.0
    assert accuracy(torch.tensor([1.0, 0.0, 1.0]), y) == 2.0
    assert isinstance(accuracy(scores, y), float)


def test_sgd_takes_the_step_of_torch_and_zeroes_the_gradient():
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    reference = w.detach().clone().requires_grad_()
    for param in (w, reference):
        (param**2).sum().backward()
    before = w.data_ptr()
    sgd([w], lr=0.1, batch_size=4)
    torch.optim.SGD([reference], lr=0.1 / 4).step()
    torch.testing.assert_close(w, reference)
    assert w.data_ptr() == before and w.is_leaf and w.requires_grad
    assert w.grad.tolist() == [0.0, 0.0]


def test_sgd_before_backward_changes_nothing():
    params = [torch.ones(2, requires_grad=True) for _ in range(3)]
    params[0].sum().backward()
    with pytest.raises(ValueError, match=r"gradient 1 of 3 is None, .*call backward\(\)"):
        sgd(iter(params), lr=0.1, batch_size=1)
    assert params[0].tolist() == params[0].grad.tolist() == [1.0, 1.0]


def batches():
    X = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0]])
    return [(X[:2], torch.tensor([0, 1])), (X[2:], torch.tensor([1]))]


def test_evaluate_accuracy_counts_examples_not_batches():
    assert evaluate_accuracy_gpu(nn.Identity(), batches(), "cpu") == pytest.approx(2 / 3)
    assert evaluate_accuracy_gpu(lambda X: X, batches(), "cpu") == pytest.approx(2 / 3)
    pairs = [([X, torch.zeros_like(X)], y) for X, y in batches()]
    assert evaluate_accuracy_gpu(lambda X: X[0] + X[1], pairs, "cpu") == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="data_iter must not be empty"):
        evaluate_accuracy_gpu(lambda X: X, [])
    for train_iter, num_epochs in ([], 1), (batches(), 0):
        with pytest.raises(ValueError, match=f"got {num_epochs} and {len(train_iter)}"):
            train_ch13(None, train_iter, [], None, None, num_epochs, ["cpu"])


def test_evaluate_accuracy_evaluates_without_gradients_on_the_networks_device():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2, device="meta"))

        def forward(self, X):
            seen.append((X.device.type, self.training, torch.is_grad_enabled()))
            return torch.zeros(len(X), 2)

    seen = []
    with pytest.raises(RuntimeError):  # what lies on meta cannot be counted
        evaluate_accuracy_gpu(Net(), batches())
    assert seen == [("meta", False, False)]
