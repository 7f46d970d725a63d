"""Which gradients of the present step have come, as arrays of the host, and what none of them may be.

Owns which tensors the present step waits for, and the errors that name them. Does not know when buckets go.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..nouns import Spec
from ._gradient_places import GradientPlace
from ._weights import Array


class Coming:
    """The gradients of the tensors ``specs``, whose elements lie in the buckets as ``flat`` arrays."""

    def __init__(self, specs: Sequence[Spec], flat: Sequence[Array]) -> None:
        self.names = [spec.name for spec in specs]
        self.places = [GradientPlace(array.reshape(spec.shape)) for array, spec in zip(flat, specs, strict=True)]
        """Where they go, which stays where it is."""
        self._left: dict[int, None] | None = None  # tensors that the present step waits for, once it has begun

    @property
    def begun(self) -> bool:
        """Whether the present step has."""
        return self._left is not None

    def begin(self) -> None:
        """A step begins, or one anew whose pass was given up."""
        self._left = dict.fromkeys(range(len(self.names)))

    def end(self) -> None:
        """The step is made, or none has begun."""
        self._left = None

    def came(self, tensor: int) -> None:
        """One has, for the first time in this step."""
        assert self._left is not None
        del self._left[tensor]

    def all_came(self) -> None:
        """Nothing is waited for in this step any more, whose gradients stay with the framework."""
        self._left = {}

    def fits(self, tensor: int, gradient: Array) -> bool:
        """Whether this is a gradient of that tensor, and one that is waited for."""
        place, left = self.places[tensor].array, self._left
        return gradient.shape == place.shape and fits(gradient, place) and left is not None and tensor in left

    def wrong(self, tensor: int, gradient: Array, step: int) -> str:
        """Why not."""
        name = self.names[tensor]
        if self._left is None or tensor not in self._left:
            return (
                f"the gradient of {name!r} was given twice in step {step}: call step() between two; where a pass"
                " was given up, say drop() before the next one, if no bucket has gone, or begin the run again from a"
                " checkpoint"
            )
        return unfit(name, gradient, self.places[tensor].array)

    @property
    def missing(self) -> list[int]:
        """The tensors whose gradients have not come in the present step, in their order."""
        return list(range(len(self.names)) if self._left is None else self._left)

    def names_of_missing(self) -> str:
        """For messages."""
        found = [repr(self.names[tensor]) for tensor in self.missing]
        return ", ".join(found if len(found) <= _NAMED else [*found[:_NAMED], f"{len(found) - _NAMED} more"])


_NAMED = 8
"""So many names of tensors are in an error."""


def fits(gradient: Array, place: Array) -> bool:
    """Whether these are real numbers of any type, or of the very one."""
    return gradient.dtype.kind in "fiu" or gradient.dtype == place.dtype


def unfit(name: str, gradient: Array, place: Array) -> str:
    """Why something is no gradient of these weights."""
    if gradient.shape != place.shape:
        return f"the gradients have {name!r} of shape {gradient.shape} for weights of shape {place.shape}"
    return f"the gradient of {name!r} is of {gradient.dtype}, for weights of {place.dtype}"
