"""TensorFlow's side of a model as the steps of flat arrays ask for it.

Between steps the variables are what counts. While the computation of a step waits for a call they are its own, and the
weights are what the call was given, or hands back (``within``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...serving.records import Elements, State
from ...serving.shard import Groups
from ._slots import RATE, Slots
from ._variables import assign, value

Array = NDArray[Any]


class VariableWeights:
    """The trained variables of one model; ``slots`` is what its optimizer keeps, where that is the worker's."""

    def __init__(self, variables: Sequence[Any], slots: Slots | None) -> None:
        self._variables, self.slots = list(variables), slots
        self.within = False
        """Whether a call is being made."""
        self.now: Sequence[Array] = []
        self.after: Sequence[Array] = []
        """What the present step has made of them, where the worker has made it by itself."""
        self.rate = 1.0

    def read(self, into: Sequence[Array]) -> None:
        """Element by element."""
        found = self.now if self.within else [value(one) for one in self._variables]
        for array, flat in zip(found, into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        """In a call they are handed back by who has asked."""
        if self.within:
            self.now = values
            return
        for variable, flat in zip(self._variables, values, strict=True):
            assign(variable, flat)

    def update(self, gradients: Sequence[Array]) -> None:  # noqa: ARG002 - the computation has updated them, or will
        """Only of a worker's own step something is known here."""
        if self.after:
            self.now, self.after = self.after, []

    def values(self) -> Groups:
        """The learning rate of the present step: all else of an optimizer stays as it was."""
        return [{RATE: self.rate}]

    def kept(self) -> list[State]:
        """In memory of its own."""
        if self.slots is None:
            return [{} for _ in self._variables]
        return [{key: Elements.of(array) for key, array in state.items()} for state in self.slots.read()]

    def keep(self, states: Sequence[State]) -> None:
        """What is not told stays as it is."""
        if self.slots is not None:
            self.slots.write(
                [{key: one.array for key, one in state.items() if isinstance(one, Elements)} for state in states]
            )
