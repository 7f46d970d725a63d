"""Hot loops on the CPU, over one-dimensional contiguous numpy arrays.

Every function releases the interpreter lock for arrays of useful size (numpy's ufuncs do). Large arrays are walked in
blocks that fit the cache, so that an operation with several operands reads memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_BYTES = 256 * 1024
"""Bytes per operand and block: two blocks fit a core's second-level cache on common machines."""


def add_all_into(into: Array, others: Sequence[Array]) -> None:
    """``into += others[0] + others[1] + ...`` from left to right, reading and writing ``into`` in memory once."""
    step = max(1, BLOCK_BYTES // into.itemsize)
    for start in range(0, into.size, step):
        block = into[start : start + step]
        for other in others:
            np.add(block, other[start : start + step], out=block)


def scale(array: Array, factor: float) -> None:
    """``array *= factor`` in place, the factor rounded to the array's element type first."""
    if factor != 1.0:
        np.multiply(array, array.dtype.type(factor), out=array)
