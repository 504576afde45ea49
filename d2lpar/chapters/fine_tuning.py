"""Chapter 15: the network to fine-tune."""

from torch import nn

from d2lpar.models import Residual


def resnet_body(widths=(16, 32, 64), in_channels=3):
    """Build a small ResNet without the output layer, a body for a new head.

    It maps images (N, in_channels, H, W) to features (N, widths[-1]). Its children are named stem,
    stage1, stage2, ..., and pool.

    Args:
        widths: channels of the stages, one `Residual` each. The stem and all stages but the first
            halve the side of the image.
        in_channels: channels of the images.
    """
    num_inputs = widths[0]
    body = nn.Sequential()
    convolution = nn.Conv2d(in_channels, num_inputs, kernel_size=3, stride=2, padding=1)
    body.add_module("stem", nn.Sequential(convolution, nn.BatchNorm2d(num_inputs), nn.ReLU()))
    for stage, num_channels in enumerate(widths, 1):
        strides = 1 if stage == 1 else 2
        block = Residual(num_channels, stage > 1, strides, in_channels=num_inputs)
        body.add_module(f"stage{stage}", block)
        num_inputs = num_channels
    body.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()))
    return body
