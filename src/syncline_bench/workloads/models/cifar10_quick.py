"""Caffe's Cifar10 "quick" CNN, after cuda-convnet: three convolutions with pooling, two fully connected layers.

Jia et al., "Caffe: Convolutional Architecture for Fast Feature Embedding", MM 2014, examples/cifar10 of that project.
Windows of a pooling that begin inside the image but end outside count (Caffe rounds up), so the sides are 32, 16, 8, 4.
"""

from __future__ import annotations

from torch import nn

from .fillers import gaussian


class Cifar10Quick(nn.Sequential):
    """(n, 3, 32, 32) images to (n, 10) scores; 145,578 parameters."""

    def __init__(self) -> None:
        super().__init__(
            _convolution(3, 32, std=0.0001),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.ReLU(),
            _convolution(32, 32, std=0.01),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            _convolution(32, 64, std=0.01),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            nn.Flatten(),
            _linear(1024, 64),
            _linear(64, 10),
        )


def _convolution(inputs: int, outputs: int, std: float) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 5, padding=2)
    gaussian(layer, std)
    return layer


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    gaussian(layer, 0.1)
    return layer
