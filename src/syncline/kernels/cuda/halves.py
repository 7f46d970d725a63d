"""The 16-bit floating-point types on a GPU, bit for bit like ``kernels.halves``.

The code uses integer arithmetic instead of the GPU's conversions, because Triton's interpreter has to give the same
bits; a codec is limited by memory anyway. Halves are uint32 whose upper half is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import BODY, INFINITY, bits_of_float, float_of_bits

_HALF_SCALE = tl.constexpr(2.0**-14)
_HALF_OVERFLOW = tl.constexpr((127 + 16) << 23)
_HALF_NORMAL = tl.constexpr((127 - 14) << 23)
_DENORMAL_MAGIC = tl.constexpr(0.5)
_DENORMAL_MAGIC_BITS = tl.constexpr(126 << 23)
_REBIAS = tl.constexpr((1 << 32) - ((127 - 15) << 23) + 0xFFF)


@triton.jit
def widen_float16(half):
    """The float32 of the bits of a float16."""
    body = (half & 0x7FFF) << 13
    exponent = body & 0x0F800000
    normal = body + ((127 - 15) << 23)
    special = normal + ((128 - 16) << 23)
    small = bits_of_float(float_of_bits(normal + (1 << 23)) - _HALF_SCALE)
    chosen = tl.where(exponent == 0x0F800000, special, tl.where(exponent == 0, small, normal))
    return float_of_bits(chosen | ((half & 0x8000) << 16))


@triton.jit
def narrow_float16(bits):
    """The bits of the float16 nearest to the float32 with these bits."""
    body = bits & BODY
    large = tl.where(body > INFINITY, 0x7E00, 0x7C00).to(tl.uint32)
    small = bits_of_float(float_of_bits(body) + _DENORMAL_MAGIC) - _DENORMAL_MAGIC_BITS
    normal = (body + _REBIAS + ((body >> 13) & 1)) >> 13
    chosen = tl.where(body >= _HALF_OVERFLOW, large, tl.where(body < _HALF_NORMAL, small, normal))
    return chosen | ((bits >> 16) & 0x8000)


@triton.jit
def widen_bfloat16(half):
    """The float32 of the bits of a bfloat16."""
    return float_of_bits(half << 16)


@triton.jit
def narrow_bfloat16(bits):
    """The bits of the bfloat16 nearest to the float32 with these bits."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & BODY) > INFINITY, quiet, rounded)
