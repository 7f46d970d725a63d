"""Parts that codecs share: blocks and sums in a fixed order, 16-bit numbers, random numbers.

**Blocks.** A block of n elements with p codes to the 32-bit word has W = ceil(n/p) words of codes: element k*W + j is
field k of word j. Fields of one k are adjacent in memory on both sides, so packing is the same plain loop over lanes on
any processor and needs no shuffles. Sums of floating-point numbers depend on their order, and payloads must not depend
on the processor. So a sum is made in lanes: rows are added in order, then the lanes are folded in halves.

**16-bit numbers** are widened to float32, and rounded back to nearest even. Numba has no such types, so their elements
are uint16 here. ``float16`` is IEEE 754 binary16 with subnormals; ``bfloat16`` is the upper half of a float32. The
conversions have no branches, so that loops over them are vectorised. They round as NumPy and ml_dtypes do, and a NaN
stays a NaN. The conversions of float16 follow F. Giesen (https://gist.github.com/rygorous/2156668): integer addition
moves the exponents, and the rounding of a float addition produces the subnormals.

**Random numbers** are a hash of a seed and a number, such as an element's index in its tensor. They are counter-based,
as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Without a state to carry along, any part of
a tensor can be encoded alone, in any order and on any processor, with the same numbers. The hash is C. Wellons'
``lowbias32`` (https://nullprogram.com/blog/2018/07/31/) with a key before each multiplication. It takes the index
modulo 2**32, so elements 2**32 apart share their number.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import inlined, inner
from .aot.native import bits_of_float, float_of_bits

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


_SIGN = np.uint32(0x8000)
_HALF_SCALE = np.float32(2.0**-14)
_HALF_OVERFLOW = np.uint32((127 + 16) << 23)
_HALF_NORMAL = np.uint32((127 - 14) << 23)
_DENORMAL_MAGIC = np.uint32(((127 - 15) + (23 - 10) + 1) << 23)
_REBIAS = np.uint32((0x100000000 + ((15 - 127) << 23) + 0xFFF) & 0xFFFFFFFF)


@inlined
def widen_float16(half):
    """The float32 of the bits of a float16."""
    bits = np.uint32(half)
    body = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(body & np.uint32(0x0F800000))
    normal = np.uint32(body + np.uint32((127 - 15) << 23))
    special = np.uint32(normal + np.uint32((128 - 16) << 23))
    small = bits_of_float(float_of_bits(np.uint32(normal + np.uint32(1 << 23))) - _HALF_SCALE)
    chosen = special if exponent == np.uint32(0x0F800000) else (small if exponent == np.uint32(0) else normal)
    return float_of_bits(np.uint32(chosen | np.uint32((bits & _SIGN) << np.uint32(16))))


@inlined
def narrow_float16(value):
    """The bits of the float16 nearest to a float32."""
    bits = bits_of_float(value)
    sign = np.uint32((bits >> np.uint32(16)) & _SIGN)
    body = np.uint32(bits & np.uint32(0x7FFFFFFF))
    large = np.uint32(0x7E00) if body > INFINITY else np.uint32(0x7C00)
    small = np.uint32(bits_of_float(float_of_bits(body) + float_of_bits(_DENORMAL_MAGIC)) - _DENORMAL_MAGIC)
    odd = np.uint32((body >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(body + _REBIAS + odd) >> np.uint32(13))
    chosen = large if body >= _HALF_OVERFLOW else (small if body < _HALF_NORMAL else normal)
    return np.uint16(chosen | sign)


@inlined
def widen_bfloat16(half):
    """The float32 of the bits of a bfloat16."""
    return float_of_bits(np.uint32(np.uint32(half) << np.uint32(16)))


@inlined
def narrow_bfloat16(value):
    """The bits of the bfloat16 nearest to a float32."""
    bits = bits_of_float(value)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    quiet = np.uint32((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16(quiet if np.uint32(bits & np.uint32(0x7FFFFFFF)) > INFINITY else rounded)


_FIRST = np.uint32(0x7FEB352D)
_SECOND = np.uint32(0x846CA68B)
_UNIT = np.float32(2.0**-24)


@inlined
def draw(index, key, other):
    """32 random bits for an element. All arguments are uint32; ``other`` is ``other_key(key)``."""
    bits = np.uint32(index ^ key)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(16))) * _FIRST)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(15))) + other)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(13))) * _SECOND)
    return np.uint32(bits ^ np.uint32(bits >> np.uint32(16)))


@inner
def other_key(key):
    """The second key of a seed. Without it two seeds would give the same numbers in another order."""
    return draw(np.uint32(0x9E3779B9), key, np.uint32(0))


@inlined
def chance(bits):
    """A float32 in [0, 1) made of the upper 24 of 32 random bits."""
    return np.float32(np.int32(np.uint32(bits >> np.uint32(8)))) * _UNIT


@inlined
def below(bits, limit):
    """A whole number in [0, ``limit``) made of 32 random bits."""
    return np.int64(np.uint64(np.uint64(bits) * np.uint64(limit)) >> np.uint64(32))
