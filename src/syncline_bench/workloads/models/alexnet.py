"""AlexNet as Caffe ships it (bvlc_alexnet): grouped convolutions and local response normalisation.

Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012. The two
groups of conv2, conv4 and conv5 are the halves that the paper kept on two GPUs.
"""

from __future__ import annotations

from torch import nn

from .fillers import gaussian


class AlexNet(nn.Sequential):
    """(n, 3, 227, 227) images to (n, 1000) scores; 60,965,224 parameters, 94 % of them in three layers."""

    def __init__(self) -> None:
        super().__init__(
            *_convolution(3, 96, 11, stride=4),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            nn.MaxPool2d(3, 2),
            *_convolution(96, 256, 5, padding=2, groups=2, bias=0.1),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            nn.MaxPool2d(3, 2),
            *_convolution(256, 384, 3, padding=1),
            *_convolution(384, 384, 3, padding=1, groups=2, bias=0.1),
            *_convolution(384, 256, 3, padding=1, groups=2, bias=0.1),
            nn.MaxPool2d(3, 2),
            nn.Flatten(),
            _linear(9216, 4096, std=0.005, bias=0.1),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            _linear(4096, 4096, std=0.005, bias=0.1),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            _linear(4096, 1000, std=0.01, bias=0.0),
        )


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1, bias: float = 0.0
) -> tuple[nn.Conv2d, nn.ReLU]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups)
    gaussian(layer, 0.01, bias)
    return layer, nn.ReLU(inplace=True)


def _linear(inputs: int, outputs: int, std: float, bias: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    gaussian(layer, std, bias)
    return layer
