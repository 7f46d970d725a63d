"""GoogLeNet as Caffe ships it (bvlc_googlenet): nine inception modules, no batch normalisation.

Szegedy et al., "Going Deeper with Convolutions", CVPR 2015. The paper trains with two auxiliary classifiers whose
losses count 0.3 each; they are not used afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fillers import xavier

AUXILIARY_WEIGHT = 0.3
"""The weight of each auxiliary classifier's loss, as in the paper."""


class GoogLeNet(nn.Module):
    """(n, 3, 224, 224) images to (n, 1000) scores; 6,998,552 parameters.

    With ``auxiliary`` 13,378,280, and in training mode the result is a tuple of three: the scores and those of the
    two auxiliary classifiers.
    """

    def __init__(self, auxiliary: bool = False) -> None:
        super().__init__()
        self.auxiliary = auxiliary
        self.stem = nn.Sequential(
            *_convolution(3, 64, 7, stride=2, padding=3),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            *_convolution(64, 64, 1),
            *_convolution(64, 192, 3, padding=1),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        self.first = nn.Sequential(
            Inception(192, 64, (96, 128), (16, 32), 32),
            Inception(256, 128, (128, 192), (32, 96), 64),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(480, 192, (96, 208), (16, 48), 64),
        )
        self.first_auxiliary = _auxiliary(512) if auxiliary else None
        self.second = nn.Sequential(
            Inception(512, 160, (112, 224), (24, 64), 64),
            Inception(512, 128, (128, 256), (24, 64), 64),
            Inception(512, 112, (144, 288), (32, 64), 64),
        )
        self.second_auxiliary = _auxiliary(528) if auxiliary else None
        self.third = nn.Sequential(
            Inception(528, 256, (160, 320), (32, 128), 128),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            Inception(832, 256, (160, 320), (32, 128), 128),
            Inception(832, 384, (192, 384), (48, 128), 128),
            nn.AvgPool2d(7),
            nn.Flatten(),
            nn.Dropout(0.4),
            _linear(1024, 1000, bias=0.0),
        )

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The scores, and in training mode those of the auxiliary classifiers if there are any."""
        first = self.first(self.stem(images))
        second = self.second(first)
        scores: Tensor = self.third(second)
        if not self.training or self.first_auxiliary is None or self.second_auxiliary is None:
            return scores
        return scores, self.first_auxiliary(first), self.second_auxiliary(second)


class Inception(nn.Module):
    """Four branches side by side, their channels joined: 1x1, 3x3, 5x5 (each reduced by a 1x1 before), and pooling."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = nn.Sequential(*_convolution(inputs, one, 1))
        self.three = nn.Sequential(*_convolution(inputs, three[0], 1), *_convolution(*three, 3, padding=1))
        self.five = nn.Sequential(*_convolution(inputs, five[0], 1), *_convolution(*five, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *_convolution(inputs, pool, 1))

    def forward(self, images: Tensor) -> Tensor:
        """All four branches, joined along the channels."""
        return torch.cat([self.one(images), self.three(images), self.five(images), self.pool(images)], 1)


def _auxiliary(inputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, 3),
        *_convolution(inputs, 128, 1),
        nn.Flatten(),
        _linear(2048, 1024, bias=0.2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        _linear(1024, 1000, bias=0.0),
    )


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0
) -> tuple[nn.Conv2d, nn.ReLU]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    xavier(layer, 0.2)
    return layer, nn.ReLU(inplace=True)


def _linear(inputs: int, outputs: int, bias: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    xavier(layer, bias)
    return layer
