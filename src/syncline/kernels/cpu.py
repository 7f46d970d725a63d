"""Hot loops on the CPU, over one-dimensional contiguous numpy arrays.

Every function releases the interpreter lock for arrays of useful size (numpy's ufuncs do). Large arrays are walked in
blocks that fit the cache, so that an operation with several operands reads memory once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_BYTES = 256 * 1024
"""Bytes per operand and block: two blocks fit a core's second-level cache on common machines."""


def add_into(into: Array, other: Array) -> None:
    """``into += other``, both of one shape and element type; 16-bit floats round once per addition."""
    np.add(into, other, out=into)


def copy_into(into: Array, other: Array) -> None:
    """``into[:] = other``, both of one shape and element type."""
    np.copyto(into, other)


def scale(array: Array, factor: float) -> None:
    """``array *= factor`` in place, the factor rounded to the array's element type first."""
    if factor != 1.0:
        np.multiply(array, array.dtype.type(factor), out=array)
