"""What kernels of block codecs have in common: reading a block, and sums of it in one fixed order, compiled.

A block of n elements with p codes to the 32-bit word has W = ceil(n/p) words of codes: element k*W + j is field k of
word j. Fields of one k lie side by side in memory on both sides, so that packing is the same plain loop over lanes on
any processor, and nothing is shuffled.

Sums of floating-point numbers depend on their order, and payloads shall not depend on the processor: a sum is made in
lanes, rows added in order, and the lanes are then folded in halves.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .compiled import inner
from .native import bits_of_float

TINY: Final = np.float32(2.0**-100)
"""A block's maximum below which nothing is sent of it, by codecs that would have to divide by it."""

MAGIC: Final = np.float32(1.5 * 2.0**23)
"""Adding it rounds a float32 below 2**22 to nearest even, and the sum's lowest bits are the number."""

NAN: Final = np.uint32(0x7FC00000)
INFINITY: Final = np.uint32(0x7F800000)
BODY: Final = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign."""


@inner
def gather(x, residual, values):
    """``values`` = x + residual (where there is one) of a block; the bits of the largest magnitude."""
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
    """The sum of the lanes, a power of two of them: lane j += lane j + half, half by half. They are overwritten."""
    half = lanes.size // 2
    while half:
        low, high = lanes[:half], lanes[half : 2 * half]
        for j in range(low.size):
            low[j] += high[j]
        half //= 2
    return lanes[0]
