"""Random numbers on a GPU, equal to those of ``kernels.draws``. All numbers are uint32."""

from __future__ import annotations

import triton
import triton.language as tl

_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)
_GOLDEN = tl.constexpr(0x9E3779B9)
_UNIT = tl.constexpr(2.0**-24)


@triton.jit
def draw(index, key, other):
    """32 random bits for an element; ``other`` is ``other_key(key)``."""
    bits = index ^ key
    bits = (bits ^ (bits >> 16)) * _FIRST
    bits = (bits ^ (bits >> 15)) + other
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def other_key(key):
    """The second key of a seed."""
    return draw(tl.full([], _GOLDEN, tl.uint32), key, tl.full([], 0, tl.uint32))


@triton.jit
def chance(bits):
    """A float32 in [0, 1) made of the upper 24 of 32 random bits."""
    return (bits >> 8).to(tl.int32).to(tl.float32) * _UNIT


@triton.jit
def below(bits, limit):
    """A whole number in [0, ``limit``) made of 32 random bits; ``limit`` and the result are int64."""
    return ((bits.to(tl.uint64) * limit.to(tl.uint64)) >> 32).to(tl.int64)
