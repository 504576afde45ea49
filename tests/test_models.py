import pytest
import torch
from torch import nn

from d2lpar import _d2l
from d2lpar.models import Residual, alexnet, lenet, resnet18


def num_parameters(net):
    return sum(param.numel() for param in net.parameters())


def test_lenet_shape_and_parameters():
    net = lenet()
    assert net(torch.rand(3, 1, 28, 28)).shape == (3, 10)
    convolutions = (20 * 9 + 20) + (50 * 20 * 25 + 50)
    assert num_parameters(net) == convolutions + (800 * 128 + 128) + (128 * 10 + 10)
    assert lenet(num_classes=7, in_channels=3)(torch.rand(2, 3, 28, 28)).shape == (2, 7)


def test_alexnet_shape_and_parameters():
    with torch.device("meta"):
        net = alexnet()
        assert net(torch.empty(2, 1, 224, 224)).shape == (2, 10)
        assert alexnet(7, in_channels=3)(torch.empty(1, 3, 224, 224)).shape == (1, 7)
    sizes = ((1, 96, 11), (96, 256, 5), (256, 384, 3), (384, 384, 3), (384, 256, 3))
    convolutions = sum(n * m * size**2 + m for n, m, size in sizes)
    dense = sum(n * m + m for n, m in ((256 * 5 * 5, 4096), (4096, 4096), (4096, 10)))
    assert num_parameters(net) == convolutions + dense


def test_resnet18_shape_and_parameters():
    net = resnet18(10)
    assert num_parameters(net) == 11_175_818
    assert sum(isinstance(module, nn.Conv2d) for module in net.modules()) == 20
    assert net(torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert resnet18(5, in_channels=3)(torch.rand(2, 3, 32, 32)).shape == (2, 5)


def test_resnet18_stages_halve_the_image():
    X = torch.rand(2, 1, 28, 28)
    shapes = []
    for name, layer in resnet18(10).named_children():
        X = layer(X)
        if name.startswith("resnet_block"):
            shapes.append(tuple(X.shape[1:]))
    assert shapes == [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]


def test_networks_are_built_with_their_parameters():
    for net in (lenet(), resnet18(10), Residual(4)):
        assert not any(nn.parameter.is_lazy(param) for param in net.parameters())


def test_residual_adds_its_input():
    block = Residual(4)
    for param in block.parameters():
        nn.init.zeros_(param)
    X = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(block(X), X.relu())


def test_residual_adds_what_the_1x1_convolution_makes_of_its_input():
    block = Residual(4, use_1x1conv=True, strides=2, in_channels=3)
    nn.init.zeros_(block.bn2.weight)
    X = torch.randn(2, 3, 6, 6)
    expected = nn.functional.conv2d(X, block.conv3.weight, block.conv3.bias, stride=2)
    torch.testing.assert_close(block(X), expected.relu())


def test_residual_changes_the_shape_over_a_1x1_convolution():
    X = torch.rand(2, 3, 6, 6)
    lazy = Residual(8, use_1x1conv=True, strides=2)
    assert lazy(X).shape == (2, 8, 3, 3)
    known = Residual(8, use_1x1conv=True, strides=2, in_channels=3)
    known.load_state_dict(lazy.state_dict())
    torch.testing.assert_close(known(X), lazy(X))
    assert Residual(8, True, 2)(X).shape == (2, 8, 3, 3)


def test_networks_equal_those_of_d2l():
    try:
        d2l = _d2l.load()
    except ImportError as error:
        pytest.skip(f"d2l is not there to compare with: {error}")
    torch.manual_seed(0)
    X = torch.rand(4, 1, 28, 28)
    theirs, ours = d2l.resnet18(10), resnet18(10)
    theirs(X)  # d2l's layers get their parameters here
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(X), theirs.eval()(X), rtol=0, atol=0)
    torch.testing.assert_close(ours.train()(X), theirs.train()(X), rtol=0, atol=0)
