from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from modelling import fixed_gpus
from torch import nn
from torch.nn import functional as F

from d2lpar import training
from d2lpar.training import Accumulator, accuracy, evaluate_accuracy_gpu, sgd, train_ch13
from vgpu import host_takes, virtual_gpus


def test_an_accumulator_has_as_many_sums_after_a_reset():
    sums = Accumulator(2)
    for _ in range(2):
        sums.reset()
        sums.add(1, torch.tensor([2.5]))
        sums.add(1, 1)
        assert (sums[0], sums[1]) == (2, 3.5)


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
    two_labels = [(torch.eye(2)[None], torch.tensor([[0, 0]])), *batches()]
    assert evaluate_accuracy_gpu(lambda X: X, two_labels) == pytest.approx(3 / 5)
    pairs = [([X, torch.zeros_like(X)], y) for X, y in batches()]
    assert evaluate_accuracy_gpu(lambda X: X[0] + X[1], pairs, "cpu") == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="data_iter must not be empty"):
        evaluate_accuracy_gpu(lambda X: X, [])
    for train_iter, num_epochs in ([], 1), (batches(), 0):
        with pytest.raises(ValueError, match=f"got {num_epochs} and {len(train_iter)}"):
            train_ch13(None, train_iter, [], None, None, num_epochs, ["cpu"])


def test_train_ch13_takes_the_steps_of_one_device_and_times_nothing_else(capsys, monkeypatch):
    """Each batch takes 2 s, in its loss; a test takes 5 s, which do not count."""
    seen, points, devices = [], [], fixed_gpus(2)

    class Net(nn.Linear):
        def forward(self, X):
            seen.append((X.device, self.training, torch.is_grad_enabled()))
            host_takes(0 if self.training else 5)
            return super().forward(X)

    def loss(y_hat, y):
        host_takes(2)
        return F.cross_entropy(y_hat, y, reduction="none")

    animator = SimpleNamespace(add=lambda x, values: points.append((x, *values)))
    monkeypatch.setattr(training, "Animator", lambda *arguments: animator)
    torch.manual_seed(0)
    net, alone, X, y = Net(2, 2), nn.Linear(2, 2), torch.rand(2, 8, 2), torch.tensor([0, 1] * 4)
    alone.load_state_dict(net.state_dict())
    test = X[1], torch.tensor([1, 0, 1, 1, 0, 1, 0, 0])
    trainer, plain = (torch.optim.SGD(each.parameters(), lr=0.2) for each in (net, alone))
    train_ch13(net, [(X[0], y), (X[1], y)], [test], loss, trainer, num_epochs=2)
    for _ in range(2):
        total, correct = 0.0, 0.0
        for images in X:
            plain.zero_grad()
            each = F.cross_entropy(alone(images), y, reduction="sum")
            total, correct = total + each.item() / 16, correct + accuracy(alone(images), y) / 16
            each.backward()
            plain.step()
    tested = accuracy(alone(test[0]), test[1]) / 8
    assert capsys.readouterr().out == (
        f"loss {total:.3f}, train acc {correct:.3f}, test acc {tested:.3f}\n"
        f"4.0 examples/sec on {devices}\n"
    )
    assert [x for x, *_ in points] == [0.5, 1, 1, 1.5, 2, 2]
    assert points[-2:] == [(2, pytest.approx(total), correct, None), (2, None, None, tested)]
    assert Counter(seen) == {(d, each, each): 2 + 2 * each for d in devices for each in (0, 1)}
    assert evaluate_accuracy_gpu(net, [test]) == tested, "on the device of the network"
    virtual_gpus(2)
