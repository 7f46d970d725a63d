"""Passes over memory: sums of several arrays written to several places, and products with a number.

Arrays are given by address, because they may be in the memory of several processes. Addition goes from left to right,
so the result does not depend on which rank adds; 16-bit floats are rounded after every addition, as a chain of
additions would. Sources and targets may be the same arrays: a sum reads an element of all sources before it writes that
element to any target.

A pass has the least memory traffic: it reads every source once and writes every target once. Two or four float32 arrays
that are both sources and targets keep the sum in registers. Otherwise the first target holds the sum, block by block,
while the block is in the first-level cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import memcpy, view
from .blocks import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16

CODES: Final = {
    "float32": 0,
    "float64": 1,
    "int32": 2,
    "uint32": 2,
    "int64": 3,
    "uint64": 3,
    "float16": 4,
    "bfloat16": 5,
}
"""The numbers of the element types, by name. Signed and unsigned integers share one: their sums have the same bits."""

_BLOCK = 1024
"""Elements summed at a time, where the sum is not kept in registers."""


@inner
def _sum2(a, b, n):
    for i in range(n):
        total = a[i] + b[i]
        a[i] = total
        b[i] = total


@inner
def _sum4(a, b, c, d, n):
    for i in range(n):
        total = a[i] + b[i] + c[i] + d[i]
        a[i] = total
        b[i] = total
        c[i] = total
        d[i] = total


@inner
def _add(into, source, n):
    for i in range(n):
        into[i] += source[i]


@inner
def _add_float16(into, source, n):
    for i in range(n):
        into[i] = narrow_float16(widen_float16(into[i]) + widen_float16(source[i]))


@inner
def _add_bfloat16(into, source, n):
    for i in range(n):
        into[i] = narrow_bfloat16(widen_bfloat16(into[i]) + widen_bfloat16(source[i]))


@inner
def _alike(sources, targets):
    if sources.size != targets.size:
        return False
    for source in sources:
        found = False
        for target in targets:
            found = found or source == target
        if not found:
            return False
    return True


@inner
def _in_registers(sources, n):
    """``sum_pass`` for two or four float32 arrays that are both sources and targets."""
    zero = np.float32(0)
    a, b = view(sources[0], zero, n), view(sources[1], zero, n)
    if sources.size == 2:
        _sum2(a, b, n)
    else:
        _sum4(a, b, view(sources[2], zero, n), view(sources[3], zero, n), n)


@inner
def add_block(code, into, source, n):
    """Add ``n`` elements at address ``source`` to those at ``into``."""
    if code == 0:
        _add(view(into, np.float32(0), n), view(source, np.float32(0), n), n)
    elif code == 1:
        _add(view(into, np.float64(0), n), view(source, np.float64(0), n), n)
    elif code == 2:
        _add(view(into, np.int32(0), n), view(source, np.int32(0), n), n)
    elif code == 3:
        _add(view(into, np.int64(0), n), view(source, np.int64(0), n), n)
    elif code == 4:
        _add_float16(view(into, np.uint16(0), n), view(source, np.uint16(0), n), n)
    else:
        _add_bfloat16(view(into, np.uint16(0), n), view(source, np.uint16(0), n), n)


@inner
def sum_pass(code, size, sources, targets, n):
    """``targets[...] = sources[0] + sources[1] + ...`` over ``n`` elements of ``size`` bytes; both are addresses.

    The first target must be the first source or no source at all. A single source is copied, so ``code`` does not
    matter.
    """
    if code == 0 and (sources.size == 2 or sources.size == 4) and _alike(sources, targets):
        _in_registers(sources, n)
        return
    block = max(n, 1) if sources.size == 1 else _BLOCK
    for start in range(0, n, block):
        length, offset = min(block, n - start), start * size
        into = targets[0] + offset
        if sources[0] != targets[0]:
            memcpy(into, sources[0] + offset, length * size)
        for j in range(1, sources.size):
            add_block(code, into, sources[j] + offset, length)
        for j in range(1, targets.size):
            memcpy(targets[j] + offset, into, length * size)


@compiled("(int64, int64, int64[], int64[], int64)")
def sum_arrays(code, size, sources, targets, n):
    """``sum_pass`` for callers in Python."""
    sum_pass(code, size, sources, targets, n)


@inner
def multiply(code, into, source, n, share):
    """Write ``n`` elements at ``source`` times ``share``, a product in their own type, to ``into``."""
    if code == 0:
        single, factor = view(source, np.float32(0), n), np.float32(share)
        places = view(into, np.float32(0), n)
        for i in range(n):
            places[i] = single[i] * factor
    elif code == 1:
        double = view(source, np.float64(0), n)
        wide = view(into, np.float64(0), n)
        for i in range(n):
            wide[i] = double[i] * share
    else:
        half, factor = view(source, np.uint16(0), n), widen_float16(narrow_float16(np.float32(share)))
        halves = view(into, np.uint16(0), n)
        for i in range(n):
            halves[i] = narrow_float16(widen_float16(half[i]) * factor)


@compiled("(int64, int64, int64, int64, float64)")
def put_share(code, into, source, n, share):
    """``multiply`` for callers in Python."""
    multiply(code, into, source, n, share)
