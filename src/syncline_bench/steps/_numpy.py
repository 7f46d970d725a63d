"""Steps under NumPy: a dictionary of arrays, and a rule of one line."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import api

from .loops import LEARNING_RATE

Array = NDArray[Any]


def _sgd(weights: Array, gradient: Array, state: dict[str, Any]) -> None:  # noqa: ARG001
    gradient *= LEARNING_RATE
    weights -= gradient


class Steps:
    """As ``Loop``."""

    def __init__(self, tensors: int, elements: int) -> None:
        names = [f"tensor{number}" for number in range(tensors)]
        self._weights = [np.ones(elements, np.float32) for _ in names]
        self._gradients = {name: np.ones(elements, np.float32) for name in names}
        self._own = [np.ones(elements, np.float32) for _ in names]
        model = {name: np.ones(elements, np.float32) for name in names}
        self._model, self._trainer = api.prepare(model, _sgd)

    def bare(self) -> None:
        """The rule on every tensor."""
        for weights, gradient in zip(self._weights, self._own, strict=True):
            _sgd(weights, gradient, {})

    def step(self) -> None:
        """All gradients at once."""
        self._trainer.step(self._gradients)

    def first(self) -> float:
        """Of the first tensor."""
        return float(self._model["tensor0"][0])
