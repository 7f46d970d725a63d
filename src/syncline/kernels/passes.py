"""One pass over memory that sums several arrays and writes the sum to several places, compiled.

The arrays are given by address: they lie in the memory of several processes. Addition goes from left to right, so the
result does not depend on who does it; 16-bit floating-point sums are rounded after every addition, as a chain of
additions would be. Sources and targets may be the same arrays; an element is written when all sources' elements have
been read.

Least memory traffic: every source read once, every target written once. Two and four arrays of float32 that are sources
and targets alike keep the sum in registers; otherwise it is made block by block in the first target, while it is in
the first-level cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .compiled import compiled, inner
from .halves import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16
from .native import memcpy, view

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
"""Element types that can be summed, by name; sums of unsigned numbers have the bits of signed ones."""

_BLOCK = 1024
"""Elements made at a time where the sum does not stay in registers."""


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
    """Two or four arrays of float32 that are sources and targets alike."""
    zero = np.float32(0)
    a, b = view(sources[0], zero, n), view(sources[1], zero, n)
    if sources.size == 2:
        _sum2(a, b, n)
    else:
        _sum4(a, b, view(sources[2], zero, n), view(sources[3], zero, n), n)


@inner
def add_block(code, into, source, n):
    """Add ``n`` elements at one address to those at another."""
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
    """``targets[...] = sources[0] + sources[1] + ...`` over ``n`` elements of ``size`` bytes; addresses.

    The first target must be the first source or no source at all. With one source the type does not matter.
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
    """``sum_pass``, for Python."""
    sum_pass(code, size, sources, targets, n)
