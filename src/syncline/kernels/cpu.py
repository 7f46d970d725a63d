"""Loops that NumPy runs on the CPU, over one-dimensional contiguous arrays.

For arrays of useful size NumPy's ufuncs release the interpreter lock. Large arrays are walked in blocks that fit the
cache, so that an operation with several operands reads memory once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BLOCK_BYTES = 256 * 1024
"""Bytes per operand and block: two blocks fit a core's second-level cache on common machines."""

_HALVES = ("float16", "bfloat16")

_COMPILED_BYTES = 8192
"""Bytes from which on a compiled kernel is faster in spite of its call."""


def add_all_into(into: Array, others: Sequence[Array]) -> None:
    """``into += others[0] + others[1] + ...`` from left to right; reads and writes ``into`` in memory once."""
    if into.dtype.name in _HALVES and into.dtype.isnative and into.nbytes >= _COMPILED_BYTES:
        _add_halves(into, others)
        return
    step = max(1, BLOCK_BYTES // into.itemsize)
    for start in range(0, into.size, step):
        block = into[start : start + step]
        for other in others:
            np.add(block, other[start : start + step], out=block)


def add_in_order(into: Array, before: Sequence[Array], after: Sequence[Array]) -> None:
    """``into = before[0] + ... + into + after[0] + ...`` from left to right; reads each array in memory once."""
    if len(before) < 2:  # the sum of two numbers does not depend on their order
        add_all_into(into, (*before, *after))
        return
    step = max(1, BLOCK_BYTES // into.itemsize)
    room = np.empty(min(step, into.size), into.dtype)
    for start in range(0, into.size, step):
        block = into[start : start + step]
        total = room[: block.size]
        np.copyto(total, before[0][start : start + step])
        others = [other[start : start + step] for other in (*before[1:], into, *after)]
        add_all_into(total, others)
        np.copyto(block, total)


def _add_halves(into: Array, others: Sequence[Array]) -> None:
    """``add_all_into`` by a kernel, because NumPy converts 16-bit floats one by one."""
    from .passes import CODES, sum_arrays  # loads compiled code, so import it on first use

    target = into.ctypes.data
    sources = np.array([target, *(other.ctypes.data for other in others)], np.int64)
    sum_arrays(CODES[into.dtype.name], into.itemsize, sources, sources[:1], into.size)


def difference(x: Array, y: Array, out: Array) -> None:
    """``out = x - y`` in float32, computed in the wider of float32 and the arrays' common type."""
    if x.dtype == np.float32:
        np.subtract(x, y, out=out)
    else:
        np.subtract(x, y, out=out, dtype=np.result_type(np.float32, x.dtype), casting="same_kind")


def add_difference(array: Array, change: Array) -> None:
    """``array += change`` for a float32 ``change``, computed in the wider of both types and rounded once."""
    np.add(array, change, out=array, dtype=np.result_type(np.float32, array.dtype), casting="same_kind")


def weigh(array: Array, share: float) -> None:
    """``array *= share`` in place. A share of 0 sets all to 0, NaNs too: a mean over no samples may be NaN."""
    if share > 0:
        scale(array, share)
    else:
        array[...] = 0


def scale(array: Array, factor: float) -> None:
    """``array *= factor`` in place, with the factor first rounded to the array's element type."""
    if factor != 1.0:
        np.multiply(array, array.dtype.type(factor), out=array)
