"""Networks of the chapters: LeNet and ResNet-18."""

from torch import nn
from torch.nn import functional as F


def lenet(num_classes=10, in_channels=1):
    """Build the LeNet of d2l 13.5: images (N, in_channels, 28, 28) to logits (N, num_classes)."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 20, kernel_size=3),  # (N, 20, 26, 26)
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),  # (N, 20, 13, 13)
        nn.Conv2d(20, 50, kernel_size=5),  # (N, 50, 9, 9)
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),  # (N, 50, 4, 4)
        nn.Flatten(),  # (N, 800)
        nn.Linear(800, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


class Residual(nn.Module):
    """A residual block: two 3x3 convolutions, to whose output a shortcut adds the input.

    Source: He et al. 2016, https://arxiv.org/abs/1512.03385.

    Args:
        num_channels: channels of the output.
        use_1x1conv: whether the shortcut has a 1x1 convolution, needed if it changes the shape.
        strides: stride of the first convolution and of the shortcut's.
        in_channels: channels of the input; by default `num_channels` or, with `use_1x1conv`,
            inferred from the first input by lazy layers.
    """

    def __init__(self, num_channels, use_1x1conv=False, strides=1, in_channels=None):
        super().__init__()
        if in_channels is None and not use_1x1conv:
            in_channels = num_channels

        def convolution(kernel_size, padding):
            arguments = (num_channels, kernel_size, strides, padding)
            if in_channels is None:
                return nn.LazyConv2d(*arguments)
            return nn.Conv2d(in_channels, *arguments)

        self.conv1 = convolution(3, padding=1)
        self.conv2 = nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1)
        self.conv3 = convolution(1, padding=0) if use_1x1conv else None
        self.bn1 = nn.BatchNorm2d(num_channels)
        self.bn2 = nn.BatchNorm2d(num_channels)

    def forward(self, X):
        """Map X (N, in_channels, H, W) to (N, num_channels, H / strides, W / strides)."""
        Y = F.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        short_cut = X if self.conv3 is None else self.conv3(X)
        return F.relu(Y + short_cut)


def resnet18(num_classes, in_channels=1, width=64, stem_stride=1):
    """Build the ResNet-18 for small images of d2l 13.6: a 3x3 stem and no max-pooling.

    It maps images (N, in_channels, H, W) to logits (N, num_classes). For 10 classes and 1 channel
    it has 11,175,818 parameters, named as in d2l.

    Args:
        num_classes, in_channels: number of classes, and channels of the images.
        width: channels after the stem; the four stages have 1, 2, 4 and 8 times as many.
        stem_stride: stride of the stem's convolution.
    """
    net = nn.Sequential(
        nn.Conv2d(in_channels, width, kernel_size=3, stride=stem_stride, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )
    num_inputs = width
    for stage in (1, 2, 3, 4):
        num_channels = width * 2 ** (stage - 1)
        strides = 1 if stage == 1 else 2  # each later stage halves height and width
        first = Residual(num_channels, stage > 1, strides, in_channels=num_inputs)
        net.add_module(f"resnet_block{stage}", nn.Sequential(first, Residual(num_channels)))
        num_inputs = num_channels
    net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
    net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_classes)))
    return net
