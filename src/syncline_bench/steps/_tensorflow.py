"""Steps under TensorFlow: one ``tf.function``, with an optimizer of Keras."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what it says of itself would stand between rows

import keras
import tensorflow as tf

from syncline import tensorflow as ours

from .loops import LEARNING_RATE


class Steps:
    """As ``Loop``."""

    def __init__(self, tensors: int, elements: int) -> None:
        self._bare, _ = _traced(tensors, elements, lambda variables, optimizer: (variables, optimizer))
        self._shared, self._variables = _traced(tensors, elements, ours.prepare)

    def bare(self) -> None:
        """With the optimizer as it is."""
        self._bare()

    def step(self) -> None:
        """With Syncline in it."""
        self._shared()

    def first(self) -> float:
        """Of the first tensor."""
        return float(self._variables[0][0])


def _traced(tensors: int, elements: int, prepared: Callable[[Any, Any], Any]) -> tuple[Callable[[], None], Any]:
    gradients = [tf.ones(elements) for _ in range(tensors)]
    variables, optimizer = prepared(
        [tf.Variable(tf.ones(elements)) for _ in range(tensors)], keras.optimizers.SGD(LEARNING_RATE)
    )
    optimizer.build(variables)

    def update(gradients: Any) -> Any:
        optimizer.apply(gradients, variables)
        return variables[-1][0]

    step = tf.function(update)
    return lambda: step(gradients).numpy(), variables
