"""The networks as torch modules, and their initial weights: Caffe's fillers and He's rule, as they were trained.

Caffe scales by the inputs of a neuron (fan-in) unless told otherwise; torch's initialisers of the same names differ.
Parameters are registered in forward order. A test checks the published number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

Weighted = TypeVar("Weighted", bound=nn.Conv2d | nn.Linear)
"""A layer with a weight and optionally a bias."""


def gaussian(layer: Weighted, std: float, bias: float = 0.0) -> Weighted:
    """The layer with normal weights of mean 0 and the given standard deviation, and a constant bias."""
    nn.init.normal_(layer.weight, 0.0, std)
    return _biased(layer, bias)


def xavier(layer: Weighted, bias: float = 0.0) -> Weighted:
    """The same with uniform weights of variance 1 / fan-in (Glorot and Bengio, AISTATS 2010, in Caffe's form)."""
    bound = sqrt(3 / layer.weight[0].numel())
    nn.init.uniform_(layer.weight, -bound, bound)
    return _biased(layer, bias)


def he(layer: Weighted, bias: float = 0.0) -> Weighted:
    """The same with normal weights of variance 2 / fan-in (He et al., ICCV 2015)."""
    return gaussian(layer, sqrt(2 / layer.weight[0].numel()), bias)


def _biased(layer: Weighted, value: float) -> Weighted:
    if layer.bias is not None:
        nn.init.constant_(layer.bias, value)
    return layer


class DigitsCNN(nn.Sequential):
    """(n, 1, 8, 8) images to (n, 10) scores; 151,306 parameters with 128 hidden neurons.

    No batch normalisation and no dropout, so that N workers train as one does on the union of their batches.
    """

    def __init__(self, hidden: int = 128) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 10),
        )
        for layer in self:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                he(layer)


class Cifar10Quick(nn.Sequential):
    """(n, 3, 32, 32) images to (n, 10) scores; 145,578 parameters.

    Caffe's Cifar10 "quick" CNN, after cuda-convnet (Jia et al., "Caffe: Convolutional Architecture for Fast Feature
    Embedding", MM 2014, examples/cifar10 of that project). Windows of a pooling that begin inside the image but end
    outside count (Caffe rounds up), so the sides are 32, 16, 8, 4.
    """

    def __init__(self) -> None:
        super().__init__(
            gaussian(nn.Conv2d(3, 32, 5, padding=2), 0.0001),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.ReLU(),
            gaussian(nn.Conv2d(32, 32, 5, padding=2), 0.01),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            gaussian(nn.Conv2d(32, 64, 5, padding=2), 0.01),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, ceil_mode=True),
            nn.Flatten(),
            gaussian(nn.Linear(1024, 64), 0.1),
            gaussian(nn.Linear(64, 10), 0.1),
        )


class AlexNet(nn.Sequential):
    """(n, 3, 227, 227) images to (n, 1000) scores; 60,965,224 parameters, 94 % of them in three layers.

    As Caffe ships it (bvlc_alexnet), with grouped convolutions and local response normalisation: Krizhevsky, Sutskever,
    Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", NIPS 2012. The two groups of conv2, conv4
    and conv5 are the halves that the paper kept on two GPUs.
    """

    def __init__(self) -> None:
        super().__init__(
            gaussian(nn.Conv2d(3, 96, 11, 4), 0.01),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            nn.MaxPool2d(3, 2),
            gaussian(nn.Conv2d(96, 256, 5, padding=2, groups=2), 0.01, 0.1),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75),
            nn.MaxPool2d(3, 2),
            gaussian(nn.Conv2d(256, 384, 3, padding=1), 0.01),
            nn.ReLU(inplace=True),
            gaussian(nn.Conv2d(384, 384, 3, padding=1, groups=2), 0.01, 0.1),
            nn.ReLU(inplace=True),
            gaussian(nn.Conv2d(384, 256, 3, padding=1, groups=2), 0.01, 0.1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Flatten(),
            gaussian(nn.Linear(9216, 4096), 0.005, 0.1),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            gaussian(nn.Linear(4096, 4096), 0.005, 0.1),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            gaussian(nn.Linear(4096, 1000), 0.01),
        )


AUXILIARY_WEIGHT = 0.3
"""The weight of each auxiliary classifier's loss, as in the paper."""


class GoogLeNet(nn.Module):
    """(n, 3, 224, 224) images to (n, 1000) scores; 6,998,552 parameters.

    As Caffe ships it (bvlc_googlenet), with nine inception modules and without batch normalisation: Szegedy et al.,
    "Going Deeper with Convolutions", CVPR 2015. The paper trains with two auxiliary classifiers, which are not used
    afterwards: with ``auxiliary`` there are 13,378,280 parameters, and in training mode the result is a tuple of three,
    the scores of the network and of the two auxiliary classifiers.
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
            xavier(nn.Linear(1024, 1000)),
        )

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """The scores, and in training mode the scores of the auxiliary classifiers if there are any."""
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
        xavier(nn.Linear(2048, 1024), 0.2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        xavier(nn.Linear(1024, 1000)),
    )


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0
) -> tuple[nn.Conv2d, nn.ReLU]:
    return xavier(nn.Conv2d(inputs, outputs, kernel, stride, padding), 0.2), nn.ReLU(inplace=True)


class ResNet50(nn.Sequential):
    """(n, 3, 224, 224) images to (n, 1000) scores; 25,557,032 parameters.

    Sixteen bottleneck blocks with shortcuts and batch normalisation: He, Zhang, Ren, Sun, "Deep Residual Learning for
    Image Recognition", CVPR 2016. As in the paper, a block that halves the image does so in its first 1x1 convolution
    (later variants use the 3x3; the number of parameters is the same).
    """

    def __init__(self) -> None:
        classifier = gaussian(nn.Linear(2048, 1000), 0.01)
        super().__init__(
            *_normalised(3, 64, 7, stride=2, padding=3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
            *_stage(64, 64, blocks=3, stride=1),
            *_stage(256, 128, blocks=4, stride=2),
            *_stage(512, 256, blocks=6, stride=2),
            *_stage(1024, 512, blocks=3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            classifier,
        )


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the output has four times ``width`` channels."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            *_normalised(inputs, width, 1, stride=stride),
            nn.ReLU(inplace=True),
            *_normalised(width, width, 3, padding=1),
            nn.ReLU(inplace=True),
            *_normalised(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential() if same else nn.Sequential(*_normalised(inputs, outputs, 1, stride=stride))

    def forward(self, images: Tensor) -> Tensor:
        """The residual added to the shortcut, then rectified."""
        return relu(self.residual(images) + self.shortcut(images))


def _stage(inputs: int, width: int, blocks: int, stride: int) -> list[Bottleneck]:
    return [Bottleneck(inputs, width, stride), *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1))]


def _normalised(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    return he(nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)), nn.BatchNorm2d(outputs)


IMAGENET: Final[dict[str, Callable[[], nn.Module]]] = {
    "alexnet": AlexNet,
    "googlenet": GoogLeNet,
    "googlenet_aux": partial(GoogLeNet, auxiliary=True),
    "resnet50": ResNet50,
}
"""The networks for ImageNet's images, by name."""
