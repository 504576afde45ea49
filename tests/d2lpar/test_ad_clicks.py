"""The workload of chapter 11."""

import pytest
import torch

from d2lpar.chapters.parameter_server import ad_clicks


@pytest.fixture(scope="module")
def data():
    return ad_clicks.AdClicks(1000, 10)


def test_minibatches_follow_their_seed(data):
    X, y = data.minibatch(64, seed=3)
    assert X.shape == (64, 10) and y.shape == (64,)
    assert 0 <= X.min() and X.max() < 1000 and set(y.tolist()) == {0.0, 1.0}
    again, other = data.minibatch(64, seed=3), data.minibatch(64, seed=4)
    assert torch.equal(X, again[0]) and torch.equal(y, again[1])
    assert not torch.equal(X, other[0])


def test_features_follow_a_power_law(data):
    X, _ = data.minibatch(20_000, seed=0)
    counts = torch.bincount(X.flatten(), minlength=1000)
    p = data.probabilities
    assert p.sum().item() == pytest.approx(1) and (p[0] / p[99]).item() == pytest.approx(100)
    expected = p * X.numel()
    assert ((counts - expected).abs() <= 6 * expected.sqrt()).all()  # six standard deviations


def test_labels_can_be_learned(data):
    X, y = data.minibatch(4000, seed=1)
    w = torch.zeros(1000, requires_grad=True)
    for _ in range(30):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(w[X].sum(1), y)
        (gradient,) = torch.autograd.grad(loss, w)
        w = (w - 3 * gradient).detach().requires_grad_()
    X, y = data.minibatch(4000, seed=2)
    accuracy = ((w[X].sum(1) > 0) == y.bool()).float().mean()
    assert accuracy > max(y.mean(), 1 - y.mean()) + 0.05
