"""Steps under PyTorch: a network whose backward pass hands out gradients that are there."""

from __future__ import annotations

from typing import Any

import torch

from syncline import api

from ..gradients.scattered import Scattered
from .loops import LEARNING_RATE


class Steps:
    """As ``Loop``."""

    def __init__(self, tensors: int, elements: int) -> None:
        torch.set_num_threads(1)
        self._bare = _made(tensors, elements)
        model, optimizer = _made(tensors, elements)
        self._model, self._optimizer = api.prepare(model, optimizer)

    def bare(self) -> None:
        """Without Syncline."""
        _step(*self._bare)

    def step(self) -> None:
        """As a user writes it."""
        _step(self._model, self._optimizer)

    def first(self) -> float:
        """Of the first tensor."""
        return float(next(iter(self._model.parameters())).detach()[0])


def _made(tensors: int, elements: int) -> tuple[Any, Any]:
    gradients, weights = ([torch.ones(elements) for _ in range(tensors)] for _ in range(2))
    model = Scattered(gradients, weights)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()
