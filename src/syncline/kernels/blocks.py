"""Parts of all block codecs: reading a block, and sums in one fixed order.

A block of n elements with p codes to the 32-bit word has W = ceil(n/p) words of codes: element k*W + j is field k of
word j. Fields of one k are adjacent in memory on both sides, so packing is the same plain loop over lanes on any
processor and needs no shuffles.

Sums of floating-point numbers depend on their order, and payloads must not depend on the processor. So a sum is made in
lanes: rows are added in order, then the lanes are folded in halves.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import inner
from .aot.native import bits_of_float

TINY: Final = np.float32(2.0**-100)
"""Blocks with a smaller maximum are sent as zeros by codecs that would have to divide by the maximum."""

MAGIC: Final = np.float32(1.5 * 2.0**23)
"""Adding it rounds a float32 below 2**22 to the nearest integer, ties to even, and puts that into the lowest bits."""

NAN: Final = np.uint32(0x7FC00000)
INFINITY: Final = np.uint32(0x7F800000)
BODY: Final = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""


@inner
def gather(x, residual, values):
    """Set ``values`` to the block x + residual (empty: x alone); return the bits of the largest magnitude."""
    largest = np.int32(0)
    if residual.size:
        for i in range(x.size):
            value = x[i] + residual[i]
            values[i] = value
            largest = max(largest, np.int32(np.uint32(bits_of_float(value) & BODY)))
    else:
        for i in range(x.size):
            value = x[i]
            values[i] = value
            largest = max(largest, np.int32(np.uint32(bits_of_float(value) & BODY)))
    return np.uint32(largest)


@inner
def folded(lanes):
    """The sum of the lanes, a power of two of them. Overwrites them: lane j += lane j + half, half by half."""
    half = lanes.size // 2
    while half:
        low, high = lanes[:half], lanes[half : 2 * half]
        for j in range(low.size):
            low[j] += high[j]
        half //= 2
    return lanes[0]
