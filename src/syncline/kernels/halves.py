"""The 16-bit floating-point types in kernels: widened to float32, and rounded back to nearest even.

Numba has no such types, so their elements are uint16 here. ``float16`` is IEEE 754 binary16 with subnormals;
``bfloat16`` is the upper half of a float32. The conversions have no branches, so that loops over them are vectorised.
They round as NumPy and ml_dtypes do, and a NaN stays a NaN.

Those of float16 follow F. Giesen (https://gist.github.com/rygorous/2156668): integer addition moves the exponents, and
the rounding of a float addition produces the subnormals.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import inlined
from .aot.native import bits_of_float, float_of_bits

_SIGN = np.uint32(0x8000)
_HALF_SCALE = np.float32(2.0**-14)
_INFINITY = np.uint32(255 << 23)
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
    large = np.uint32(0x7E00) if body > _INFINITY else np.uint32(0x7C00)
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
    return np.uint16(quiet if np.uint32(bits & np.uint32(0x7FFFFFFF)) > _INFINITY else rounded)
