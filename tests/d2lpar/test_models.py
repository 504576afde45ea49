from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from d2lpar import _d2l
from d2lpar.chapters.fine_tuning import resnet_body
from d2lpar.chapters.scaling import Bert, convnet
from d2lpar.models import Residual, lenet, resnet18

LENET = (20 * 9 + 20) + (50 * 20 * 25 + 50) + (800 * 128 + 128) + (128 * 10 + 10)
CONVNET = (16 * 25 + 16) + (32 * 16 * 9 + 32) + (800 * 10 + 10)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [(lenet, LENET), (partial(resnet18, 10), 11_175_818), (convnet, CONVNET)],
)
def test_shapes_and_parameters(make, parameters):
    with torch.device("meta"):
        net = make()
        assert net(torch.empty(2, 1, 28, 28)).shape == (2, 10)
    assert sum(param.numel() for param in net.parameters()) == parameters


def test_networks_for_other_classes_and_channels():
    for make in (lenet, resnet18):
        with torch.device("meta"):
            assert make(7, in_channels=3)(torch.empty(2, 3, 28, 28)).shape == (2, 7)


def test_bert_base_has_the_parameters_of_its_paper():
    """110 million (Devlin et al. 2018), without position and segment embeddings and the pooler."""
    with torch.device("meta"):
        net = Bert()
        assert net(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 30_528)
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert sum(p.numel() for p in net.parameters()) == 12 * layer + 30_528 * 768


def test_biases_of_convnet_begin_at_zero():
    assert not any(p.any() for p in convnet().parameters() if p.dim() == 1)


def test_resnet_body_shape_and_stages():
    body = resnet_body()
    assert " ".join(name for name, _ in body.named_children()) == "stem stage1 stage2 stage3 pool"
    images = torch.rand(2, 3, 32, 32)
    assert body(images).shape == (2, 64)
    assert body[:-1](images).shape == (2, 64, 4, 4)
    assert resnet_body((8, 16), in_channels=1)(torch.rand(2, 1, 28, 28)).shape == (2, 16)


def test_resnet18_stages_halve_the_image():
    X, shapes = torch.rand(2, 1, 28, 28), []
    for name, layer in resnet18(10).named_children():
        X = layer(X)
        if name.startswith("resnet_block"):
            shapes.append(tuple(X.shape[1:]))
    assert shapes == [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]
    thin = resnet18(10, 3, width=8, stem_stride=2)
    assert thin[0](torch.rand(2, 3, 32, 32)).shape == (2, 8, 16, 16)
    assert thin(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_networks_are_built_with_their_parameters():
    for net in (lenet(), resnet18(10), Residual(4)):
        assert not any(nn.parameter.is_lazy(param) for param in net.parameters())


def test_residual_adds_its_input_or_what_the_1x1_convolution_makes_of_it():
    plain, block = Residual(4), Residual(4, use_1x1conv=True, strides=2, in_channels=3)
    for bn in (plain.bn2, block.bn2):
        nn.init.zeros_(bn.weight)
    X = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(plain(X), X.relu())
    expected = F.conv2d(X[:, :3], block.conv3.weight, block.conv3.bias, stride=2)
    torch.testing.assert_close(block(X[:, :3]), expected.relu())


def test_residual_changes_the_shape_over_a_1x1_convolution():
    X = torch.rand(2, 3, 6, 6)
    lazy = Residual(8, use_1x1conv=True, strides=2)
    assert lazy(X).shape == (2, 8, 3, 3)
    known = Residual(8, use_1x1conv=True, strides=2, in_channels=3)
    known.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(known(X), lazy(X))
    assert Residual(8, True, 2)(X).shape == (2, 8, 3, 3)


def test_lenet_is_that_of_d2l_12_5():
    def theirs(X, W1, b1, W2, b2, W3, b3, W4, b4):
        h = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), (2, 2), (2, 2))
        h = F.avg_pool2d(F.relu(F.conv2d(h, W2, b2)), (2, 2), (2, 2)).reshape(len(X), -1)
        return torch.mm(F.relu(torch.mm(h, W3.T) + b3), W4.T) + b4

    torch.manual_seed(0)
    net, X = lenet().double(), torch.rand(3, 1, 28, 28).double()
    torch.testing.assert_close(net(X), theirs(X, *net.parameters()))


@pytest.fixture
def d2l():
    try:
        return _d2l.load()
    except ImportError as error:
        pytest.skip(f"d2l is not there to compare with: {error}")


def assert_same(ours, theirs, X):
    """Two networks have parameters of the same names, and do the same with the same ones."""
    theirs(X)  # d2l's layers get their parameters here
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(X), theirs.eval()(X), rtol=0, atol=0)
    torch.testing.assert_close(ours.train()(X), theirs.train()(X), rtol=0, atol=0)


def test_resnet18_equals_that_of_d2l(d2l):
    torch.manual_seed(0)
    assert_same(resnet18(10), d2l.resnet18(10), torch.rand(4, 1, 28, 28))


@pytest.mark.parametrize("arguments", [(3,), (8, True), (8, True, 2)])
def test_residual_equals_that_of_d2l(d2l, arguments):
    torch.manual_seed(0)
    ours, X = Residual(*arguments), torch.randn(4, 3, 7, 7)
    ours(X)
    assert_same(ours, d2l.Residual(*arguments), X)
