"""What a framework without hooks has to do for one model: its side of the steps of flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ..serving.records import State
from ..serving.shard import Groups

Array = NDArray[Any]


class Weights(Protocol):
    """A framework's side of one model; flat arrays are in the order of its tensors, and contiguous."""

    def read(self, into: Sequence[Array]) -> None:
        """Copy the framework's weights into flat arrays."""
        ...

    def write(self, values: Sequence[Array]) -> None:
        """Let the framework's weights be these."""
        ...

    def update(self, gradients: Sequence[Array]) -> None:
        """Update the framework's weights with these gradients, by its optimizer, which may overwrite them."""
        ...

    def values(self) -> Groups:
        """What the optimizer is set to, as owners of weights are told it."""
        ...

    def kept(self) -> list[State]:
        """What the optimizer keeps of each tensor, elements flat, which may be its own memory."""
        ...

    def keep(self, states: Sequence[State]) -> None:
        """Replace that."""
        ...
