"""Which gradients of the present step have come, where they go in the buckets, and what none of them may be.

Owns which tensors the present step waits for, and the errors that name them. Does not know when buckets go.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ..kernels.passes import CODES, put_share
from ..nouns import Spec
from ._weights import Array

_NAMED = 8
"""So many names of tensors are in an error."""
_HELD_BYTES = 64 * 1024
"""Gradients up to this size, which take some microseconds, are multiplied with the interpreter lock held."""
_HELD_TYPES = ("float16", "float32", "float64")


class GradientPlace:
    """The place of one tensor's gradient in its bucket, in the tensor's shape; one thread at a time writes it.

    NumPy gives the interpreter lock back while it multiplies more than 500 numbers. The engine's thread then takes it,
    and the thread that hands gradients over waits for it, longer by far than a small gradient takes. So compiled code,
    which keeps the lock, multiplies these, with the same roundings, but that a share of float16 is rounded to float32
    first: another number for three of the shares 1/N up to N = 70000.
    """

    def __init__(self, array: Array) -> None:
        self.array, self._type = array, array.dtype
        self._held = array.nbytes <= _HELD_BYTES and str(array.dtype) in _HELD_TYPES
        code = CODES[str(array.dtype)] if self._held else 0
        self._words = (ctypes.c_int64 * 5)(code, array.ctypes.data, 0, array.size, 0)
        self._share, self._address = ctypes.c_double.from_buffer(self._words, 32), ctypes.addressof(self._words)

    def put(self, gradient: Array, share: float) -> None:
        """Write a gradient of this shape times ``share`` here."""
        flags = gradient.flags
        if self._held and gradient.dtype == self._type and flags.c_contiguous and flags.aligned:
            self._words[2], self._share.value = gradient.ctypes.data, share
            put_share.held(self._address)
        else:
            np.multiply(gradient, share, out=self.array)


class Coming:
    """The gradients of the tensors ``specs``, whose elements lie in the buckets as ``flat`` arrays."""

    def __init__(self, specs: Sequence[Spec], flat: Sequence[Array]) -> None:
        self.names = [spec.name for spec in specs]
        self.places = [GradientPlace(array.reshape(spec.shape)) for array, spec in zip(flat, specs, strict=True)]
        """Where they go, which stays where it is."""
        self._left: dict[int, None] | None = None  # tensors that the present step waits for, once it has begun

    @property
    def begun(self) -> bool:
        """Whether the present step has begun."""
        return self._left is not None

    def begin(self) -> None:
        """Begin a step, or begin it again after a pass that the script gave up."""
        self._left = dict.fromkeys(range(len(self.names)))

    def end(self) -> None:
        """End the step."""
        self._left = None

    def came(self, tensor: int) -> None:
        """Note the first gradient of a tensor in this step."""
        assert self._left is not None
        del self._left[tensor]

    def all_came(self) -> None:
        """Wait for no gradient of this step: they stay with the framework."""
        self._left = {}

    def fits(self, tensor: int, gradient: Array) -> bool:
        """Whether this is a gradient of that tensor that the step still waits for."""
        place, left = self.places[tensor].array, self._left
        return gradient.shape == place.shape and fits(gradient, place) and left is not None and tensor in left

    def wrong(self, tensor: int, gradient: Array, step: int) -> str:
        """Why ``fits`` says no."""
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
        """The names of missing gradients, for errors."""
        found = [repr(self.names[tensor]) for tensor in self.missing]
        return ", ".join(found if len(found) <= _NAMED else [*found[:_NAMED], f"{len(found) - _NAMED} more"])


def fits(gradient: Array, place: Array) -> bool:
    """Whether the gradient has real numbers, or the very type of its place."""
    return gradient.dtype.kind in "fiu" or gradient.dtype == place.dtype


def unfit(name: str, gradient: Array, place: Array) -> str:
    """Why something is no gradient of these weights."""
    if gradient.shape != place.shape:
        return f"the gradients have {name!r} of shape {gradient.shape} for weights of shape {place.shape}"
    return f"the gradient of {name!r} is of {gradient.dtype}, for weights of {place.dtype}"
