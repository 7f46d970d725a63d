"""Which of a model's variables gradients are of, and whether they are all there; in graphs and in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from ...errors import GradientError
from ...nouns import Spec
from ._variables import resource

Unused = Literal["error", "zeros"]
_MOST_NAMES = 8


class Matching:
    """Of ``variables``, of which ``specs`` has names and shapes; ``unused`` is as for ``syncline.prepare``."""

    def __init__(self, variables: Sequence[Any], specs: Sequence[Spec], unused: Unused) -> None:
        self.variables, self._specs, self._unused = list(variables), specs, unused
        self._numbers = {id(one): number for number, given in enumerate(variables) for one in (given, resource(given))}
        self.fault: Callable[[str], Exception] = GradientError
        """Makes an error; in a run of several workers one that ends it for all."""

    def number(self, variable: Any) -> int:
        """Which of the model's a variable is; raises where it is none of them."""
        found = self._numbers.get(id(variable))
        if found is None:
            raise self.fault(
                f"a gradient is of {variable.name!r}, which was not among the variables that were prepared: prepare the"
                " model when all is built and trainable that shall be"
            )
        return found

    def matched(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients in the order of the model's variables; raises where they are others."""
        found: dict[int, Any] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            number = self.number(variable)
            if gradient is not None:
                found[number] = self._checked(number, gradient)
        missing = [number for number in range(len(self._specs)) if number not in found]
        if missing and self._unused == "error":
            names = ", ".join(repr(self._specs[one].name) for one in missing[:_MOST_NAMES])
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise self.fault(
                f"there is no gradient of {names}{more}: the loss does not depend on it, or it was frozen after"
                " prepare(); set trainable=False before prepare(), or say prepare(..., unused='zeros')"
            )
        return [
            found[number] if number in found else tf.zeros(spec.shape, spec.dtype)
            for number, spec in enumerate(self._specs)
        ]

    def _checked(self, number: int, gradient: Any) -> Any:
        """Of embeddings, whose gradients are rows, the whole."""
        spec, dense = self._specs[number], tf.convert_to_tensor(gradient)
        if not dense.shape.is_compatible_with(spec.shape) or dense.dtype.name != spec.dtype:
            raise self.fault(
                f"the gradient of {spec.name!r} is of shape {tuple(dense.shape)} and type {dense.dtype.name}, for a"
                f" variable of shape {spec.shape} and type {spec.dtype}"
            )
        return dense
