"""What an optimizer of Keras keeps, by the tensor that it is of.

Keras' optimizers keep lists of variables, one for each that they train, as attributes: such a list is told under the
attribute's name, tensor by tensor. What has no dimensions, such as a count of steps, is everyone's; all else is told
with the first tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ._variables import assign, names_of, resource, value

Array = NDArray[Any]
RATE = "lr"
"""The value of an optimizer's group that owners of weights are told."""


class Slots:
    """Those of an optimizer that is built, for variables in the model's order."""

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        order = {id(resource(one)): number for number, one in enumerate(innermost(optimizer)._trainable_variables)}
        self._order = [order[id(resource(one))] for one in variables]
        self._of: list[dict[str, Any]] = [{} for _ in variables]
        self.elementwise: set[int] = set()
        """The ids of those that have the shape of the variable that they are of."""
        seen: set[int] = set()
        for key, listed in _lists(innermost(optimizer), len(order)).items():
            for number, place in enumerate(self._order):
                slot = listed[place]
                if slot is not None:
                    self._of[number][key] = slot
                    seen.add(id(slot))
                    if tuple(slot.shape) == tuple(variables[number].shape):
                        self.elementwise.add(id(slot))
        rest = [one for one in optimizer.variables if id(one) not in seen]
        for name, slot in zip(names_of(rest, parts=1), rest, strict=True):
            for state in self._of[:1] if len(slot.shape) else self._of:
                state[name] = slot

    def read(self) -> list[dict[str, Array]]:
        """Copies, flat but for what has no dimensions."""
        return [{key: _flat(value(slot)) for key, slot in state.items()} for state in self._of]

    def write(self, states: Sequence[Mapping[str, Array]]) -> None:
        """The other way round; what is not told stays as it is."""
        for mine, told in zip(self._of, states, strict=True):
            for key, slot in mine.items():
                found = told.get(key)
                if found is not None and found.size == np.prod(slot.shape, dtype=int):
                    assign(slot, found)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates the variables, within one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _lists(optimizer: Any, count: int) -> dict[str, Sequence[Any]]:
    """Attributes that hold a variable of the optimizer's for each that it trains."""
    mine = {id(one) for one in optimizer.variables}
    found: dict[str, Sequence[Any]] = {}
    for name, listed in vars(optimizer).items():
        if isinstance(listed, list) and len(listed) == count and name != "_variables":  # which are all that it has
            slots = [one for one in listed if one is not None]
            if slots and all(isinstance(one, keras.Variable) and id(one) in mine for one in slots):
                found[name.strip("_")] = listed
    return found


def _flat(array: Array) -> Array:
    return array.reshape(-1) if array.ndim else array
