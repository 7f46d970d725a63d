"""One pass over memory that sums several arrays and writes the sum to several places, compiled.

The arrays are given by address: they lie in the memory of several processes. Addition goes from left to right, so the
result does not depend on who does it; 16-bit floating-point sums are rounded after every addition, as a chain of additions
would be. Sources and targets may be the same arrays; an element is written when all sources' elements have been read.

Least memory traffic: every source read once, every target written once. Two, three and four arrays that are sources and
targets alike keep the sum in registers; otherwise it is made block by block in the first target, while it is in the
first-level cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import carray, njit

from .halves import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16
from .native import pointer

CODES: Final = {
    **{np.dtype(name).str: code for code, name in enumerate(("float32", "float64", "int32", "int64", "int16", "int8"))},
    **{np.dtype(name).str: code for code, name in enumerate(("uint32", "uint64", "uint16", "uint8"), start=2)},
    "<f2": 6,
    "bfloat16": 7,
}
"""Element types by numpy's type string (bfloat16 by name); sums of unsigned numbers have the bits of signed ones."""

_BLOCK = 1024
"""Elements made at a time where the sum does not stay in registers."""


@njit(nogil=True, cache=True)
def _sum2(a, b, n):
    for i in range(n):
        total = a[i] + b[i]
        a[i] = total
        b[i] = total


@njit(nogil=True, cache=True)
def _sum3(a, b, c, n):
    for i in range(n):
        total = a[i] + b[i] + c[i]
        a[i] = total
        b[i] = total
        c[i] = total


@njit(nogil=True, cache=True)
def _sum4(a, b, c, d, n):
    for i in range(n):
        total = a[i] + b[i] + c[i] + d[i]
        a[i] = total
        b[i] = total
        c[i] = total
        d[i] = total


@njit(nogil=True, cache=True)
def _copy(into, source, n):
    for i in range(n):
        into[i] = source[i]


@njit(nogil=True, cache=True)
def _add(into, source, n):
    for i in range(n):
        into[i] += source[i]


@njit(nogil=True, cache=True)
def _add_float16(into, source, n):
    for i in range(n):
        into[i] = narrow_float16(widen_float16(into[i]) + widen_float16(source[i]))


@njit(nogil=True, cache=True)
def _add_bfloat16(into, source, n):
    for i in range(n):
        into[i] = narrow_bfloat16(widen_bfloat16(into[i]) + widen_bfloat16(source[i]))


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def _typed(sources, targets, n, zero, size):
    """The pass over ``n`` elements of the type of ``zero``, of ``size`` bytes each."""
    k = sources.size
    if 2 <= k <= 4 and _alike(sources, targets):
        a = carray(pointer(sources[0], zero), n)
        b = carray(pointer(sources[1], zero), n)
        if k == 2:
            _sum2(a, b, n)
            return
        c = carray(pointer(sources[2], zero), n)
        if k == 3:
            _sum3(a, b, c, n)
            return
        _sum4(a, b, c, carray(pointer(sources[3], zero), n), n)
        return
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        into = carray(pointer(targets[0] + start * size, zero), length)
        if sources[0] != targets[0]:
            _copy(into, carray(pointer(sources[0] + start * size, zero), length), length)
        for j in range(1, k):
            _add(into, carray(pointer(sources[j] + start * size, zero), length), length)
        for j in range(1, targets.size):
            _copy(carray(pointer(targets[j] + start * size, zero), length), into, length)


@njit(nogil=True, cache=True)
def _halves(sources, targets, n, brain):
    """The pass over ``n`` float16, or bfloat16 (``brain``)."""
    zero = np.uint16(0)
    for start in range(0, n, _BLOCK):
        length = min(_BLOCK, n - start)
        into = carray(pointer(targets[0] + start * 2, zero), length)
        if sources[0] != targets[0]:
            _copy(into, carray(pointer(sources[0] + start * 2, zero), length), length)
        for j in range(1, sources.size):
            other = carray(pointer(sources[j] + start * 2, zero), length)
            if brain:
                _add_bfloat16(into, other, length)
            else:
                _add_float16(into, other, length)
        for j in range(1, targets.size):
            _copy(carray(pointer(targets[j] + start * 2, zero), length), into, length)


@njit(nogil=True, cache=True)
def sum_pass(code, sources, targets, n):
    """``targets[...] = sources[0] + sources[1] + ...`` over ``n`` elements of the type with that code; addresses.

    The first target must be the first source or no source at all.
    """
    if code == 0:
        _typed(sources, targets, n, np.float32(0), 4)
    elif code == 1:
        _typed(sources, targets, n, np.float64(0), 8)
    elif code == 2:
        _typed(sources, targets, n, np.int32(0), 4)
    elif code == 3:
        _typed(sources, targets, n, np.int64(0), 8)
    elif code == 4:
        _typed(sources, targets, n, np.int16(0), 2)
    elif code == 5:
        _typed(sources, targets, n, np.int8(0), 1)
    else:
        _halves(sources, targets, n, code == 7)
