"""Arrays multiplied by a number on their way to another place, in the type of each, compiled."""

from __future__ import annotations

import numpy as np

from .compiled import compiled, inner
from .halves import narrow_float16, widen_float16
from .native import view


@inner
def multiply(code, into, source, n, share):
    """``n`` elements of ``passes.CODES`` at an address, times ``share`` in their type, to another."""
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
    """The same, for Python."""
    multiply(code, into, source, n, share)
