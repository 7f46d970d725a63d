"""A small CNN for 8x8 digits: two convolutions, one pooling, two fully connected layers.

No batch normalisation and no dropout, so that training on N workers equals training on one with the union of their
batches. Initialisation after He et al., "Delving Deep into Rectifiers", ICCV 2015.
"""

from __future__ import annotations

from torch import nn

from .fillers import he


class DigitsCNN(nn.Sequential):
    """(n, 1, 8, 8) images to (n, 10) scores; 151,306 parameters with 128 hidden neurons."""

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
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                he(layer)
