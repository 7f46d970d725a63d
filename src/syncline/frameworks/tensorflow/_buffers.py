"""Variables that a step changes by itself, such as moving means: rank 0's on all ranks, after every exchange.

Where workers exchange weights it is the mean of those that are floating-point numbers. They travel packed, at the end
of the step's last call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...nouns import Spec
from ...session.session import Session
from ._variables import resource

Array = NDArray[Any]


class Buffers:
    """Those of one model; where nobody goes in step, each worker's stay its own."""

    def __init__(self, session: Session, variables: Sequence[Any]) -> None:
        self._session = session
        together = session.strategy.sync_mode().merges
        self.variables = [resource(one) for one in variables] if together else []
        self.specs = [Spec("", tuple(one.shape), tf.as_dtype(one.dtype).name) for one in self.variables]

    def values(self) -> list[Any]:
        """As they are at this point of a graph."""
        return [one.read_value() for one in self.variables]

    def assign(self, values: Sequence[Any]) -> None:
        """The other way round."""
        for variable, one in zip(self.variables, values, strict=True):
            variable.assign(one)

    def of_first(self, arrays: Sequence[Array]) -> list[Array]:
        """Rank 0's; all workers call it."""
        if not arrays:
            return []
        packed = np.concatenate([np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in arrays])
        self._session.broadcast(packed)
        ends = np.cumsum([one.nbytes for one in arrays])[:-1]
        parts = np.split(packed, ends)
        return [
            np.frombuffer(part.tobytes(), one.dtype).reshape(one.shape) for part, one in zip(parts, arrays, strict=True)
        ]

    def mean(self, arrays: Sequence[Array]) -> list[Array]:
        """The workers' mean of floating-point numbers, rank 0's of all else; all workers call it."""
        numbers = [one for one in arrays if one.dtype.kind == "f"]
        others = iter(self.of_first([one for one in arrays if one.dtype.kind != "f"]))
        packed = np.concatenate([one.reshape(-1).astype(np.float64) for one in numbers] or [np.empty(0)])
        if packed.size:
            self._session.allreduce(packed)
        ends = np.cumsum([one.size for one in numbers], dtype=int)[:-1]
        means = iter(np.split(packed, ends))
        return [
            next(means).astype(one.dtype).reshape(one.shape) if one.dtype.kind == "f" else next(others)
            for one in arrays
        ]


def moving(model: Any) -> list[Any]:
    """The variables of a model that its steps change: of layers that are trained, those that are none to train."""
    if not isinstance(model, keras.Layer):
        return list(model.non_trainable_variables) if isinstance(model, tf.Module) else []
    layers = [one for one in model._flatten_layers() if one.trainable]
    own = {id(variable) for layer in layers for variable in layer._non_trainable_variables}
    return [one for one in model.non_trainable_weights if id(one) in own]
