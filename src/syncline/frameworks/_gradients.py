"""Tracks the gradients of the present step, writes them to their places in the buckets, and refuses wrong ones.

It knows which tensors the step still waits for, and makes the errors that name them. It does not know when buckets are
sent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from ..kernels.passes import CODES, put_share
from ..nouns import Spec
from ._weights import Array

_NAMED = 8
"""The maximum number of tensor names in an error."""
_HELD_BYTES = 64 * 1024
"""Gradients up to this size are multiplied while holding the interpreter lock, which takes some microseconds."""
_HELD_TYPES = ("float16", "float32", "float64")


class GradientPlace:
    """The place of one tensor's gradient in its bucket, in the tensor's shape. One thread at a time writes to it.

    NumPy releases the interpreter lock while it multiplies more than 500 numbers. The engine's thread then takes the
    lock, and the thread that delivers gradients waits far longer than a small gradient takes. Compiled code, which
    keeps the lock, therefore multiplies small gradients. Its rounding is the same, except that a factor for float16 is
    first rounded to float32, which changes three of the factors 1/N up to N = 70000.
    """

    def __init__(self, array: Array) -> None:
        self.array, self._type = array, array.dtype
        self._held = array.nbytes <= _HELD_BYTES and str(array.dtype) in _HELD_TYPES
        code = CODES[str(array.dtype)] if self._held else 0
        self._words = (ctypes.c_int64 * 5)(code, array.ctypes.data, 0, array.size, 0)
        self._share, self._address = ctypes.c_double.from_buffer(self._words, 32), ctypes.addressof(self._words)

    def put(self, gradient: Array, share: float) -> None:
        """Write a gradient of this shape, multiplied by ``share``."""
        flags = gradient.flags
        if self._held and gradient.dtype == self._type and flags.c_contiguous and flags.aligned:
            self._words[2], self._share.value = gradient.ctypes.data, share
            put_share.held(self._address)
        else:
            np.multiply(gradient, share, out=self.array)


class Coming:
    """The gradients of the tensors ``specs`` in the present step. ``flat`` are their elements in the buckets."""

    def __init__(self, specs: Sequence[Spec], flat: Sequence[Array]) -> None:
        self.names = [spec.name for spec in specs]
        self.places = [GradientPlace(array.reshape(spec.shape)) for array, spec in zip(flat, specs, strict=True)]
        """The places of the gradients, whose memory is fixed."""
        self._left: dict[int, None] | None = None  # tensors that the present step waits for; None before it begins

    @property
    def begun(self) -> bool:
        """Whether the present step has begun."""
        return self._left is not None

    def begin(self) -> None:
        """Begin a step, or restart it after an abandoned pass."""
        self._left = dict.fromkeys(range(len(self.names)))

    def end(self) -> None:
        """End the step."""
        self._left = None

    def came(self, tensor: int) -> None:
        """Note that a tensor's gradient has arrived."""
        assert self._left is not None
        del self._left[tensor]

    def all_came(self) -> None:
        """Expect no gradients in this step: they stay with the framework."""
        self._left = {}

    def fits(self, tensor: int, gradient: Array) -> bool:
        """Whether this is a valid gradient of that tensor, and the step still waits for it."""
        place, left = self.places[tensor].array, self._left
        return gradient.shape == place.shape and fits(gradient, place) and left is not None and tensor in left

    def wrong(self, tensor: int, gradient: Array, step: int) -> str:
        """The error text for a gradient for which ``fits`` returned False."""
        name = self.names[tensor]
        if self._left is None or tensor not in self._left:
            return (
                f"the gradient of {name!r} was given twice in step {step}: call step() after each pass; after an"
                " abandoned pass call drop(), or, if a bucket was sent already, restart the run from a checkpoint"
            )
        return unfit(name, gradient, self.places[tensor].array)

    @property
    def missing(self) -> list[int]:
        """The tensors whose gradients have not arrived in the present step, in order."""
        return list(range(len(self.names)) if self._left is None else self._left)

    def names_of_missing(self) -> str:
        """The names of the missing gradients, for errors."""
        found = [repr(self.names[tensor]) for tensor in self.missing]
        return ", ".join(found if len(found) <= _NAMED else [*found[:_NAMED], f"{len(found) - _NAMED} more"])


def fits(gradient: Array, place: Array) -> bool:
    """Whether the gradient has real numbers, or the exact type of its place."""
    return gradient.dtype.kind in "fiu" or gradient.dtype == place.dtype


def unfit(name: str, gradient: Array, place: Array) -> str:
    """The error text for a gradient that does not match its weights."""
    if gradient.shape != place.shape:
        return f"the gradients have {name!r} of shape {gradient.shape} for weights of shape {place.shape}"
    return f"the gradient of {name!r} has type {gradient.dtype}, but its weights have {place.dtype}"
