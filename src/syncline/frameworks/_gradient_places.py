"""Where gradients go in the buckets, multiplied by the workers' share on the way.

NumPy gives the interpreter lock back while it multiplies more than 500 numbers. The engine's thread then takes it, and
whoever hands gradients over waits for it, longer by far than a small gradient takes. So these are multiplied by
compiled code that keeps the lock, with the same roundings, but that a share of float16 is rounded to float32 first,
which is another number for three of the shares 1/N up to N = 70000. A place is written by one thread at a time.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ..kernels.passes import CODES
from ..kernels.shares import put_share
from ._weights import Array

_HELD_BYTES = 64 * 1024
"""Up to this size, which takes some microseconds, the lock is kept."""

_TYPES = ("float16", "float32", "float64")


class GradientPlace:
    """The place of one tensor's gradient, in its shape."""

    def __init__(self, array: Array) -> None:
        self.array, self._type = array, array.dtype
        self._held = array.nbytes <= _HELD_BYTES and str(array.dtype) in _TYPES
        code = CODES[str(array.dtype)] if self._held else 0
        self._words = (ctypes.c_int64 * 5)(code, array.ctypes.data, 0, array.size, 0)
        self._share, self._address = ctypes.c_double.from_buffer(self._words, 32), ctypes.addressof(self._words)

    def put(self, gradient: Array, share: float) -> None:
        """Let it be a gradient of this shape times ``share``."""
        flags = gradient.flags
        if self._held and gradient.dtype == self._type and flags.c_contiguous and flags.aligned:
            self._words[2], self._share.value = gradient.ctypes.data, share
            put_share.held(self._address)
        else:
            np.multiply(gradient, share, out=self.array)
