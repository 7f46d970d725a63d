"""ResNet-50: sixteen bottleneck blocks with shortcuts and batch normalisation.

He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016. As in the paper, a block that halves
the image does so in its first 1x1 convolution (later variants use the 3x3; the number of parameters is the same).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu

from .fillers import gaussian, he


class ResNet50(nn.Sequential):
    """(n, 3, 224, 224) images to (n, 1000) scores; 25,557,032 parameters."""

    def __init__(self) -> None:
        classifier = nn.Linear(2048, 1000)
        gaussian(classifier, 0.01)
        super().__init__(
            *_convolution(3, 64, 7, stride=2, padding=3),
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
            *_convolution(inputs, width, 1, stride=stride),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, padding=1),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Sequential() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride=stride))

    def forward(self, images: Tensor) -> Tensor:
        """The residual added to the shortcut, then rectified."""
        return relu(self.residual(images) + self.shortcut(images))


def _stage(inputs: int, width: int, blocks: int, stride: int) -> list[Bottleneck]:
    return [Bottleneck(inputs, width, stride), *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1))]


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    he(layer)
    return layer, nn.BatchNorm2d(outputs)
