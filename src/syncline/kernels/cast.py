"""Rounding to 16-bit and 8-bit floating-point numbers.

The 16-bit types are those of ``blocks``, and a payload is a plain array of them. E4M3 is the 8-bit type of the OCP
8-bit Floating Point Specification: 4 bits of exponent with bias 7, 3 of mantissa, subnormals, no infinity, largest
number 448. A block of them is one word with its scale (float32), then its codes as ``blocks`` lays them out, four to
the word. A block is zero when its maximum is below ``TINY``. The scale is NaN if the block has an infinity or NaN.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import compiled, inlined, inner
from .aot.native import bits_of_float, float_of_bits, free, malloc, view
from .blocks import BODY, INFINITY, NAN, TINY, gather, narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16
from .linear import step_of

_LARGEST_FLOAT16 = np.uint32(0x477FE000)
_LARGEST_BFLOAT16 = np.uint32(0x7F7F0000)
_LARGEST_E4M3 = np.float32(448)

_SMALLEST_NORMAL = np.float32(2.0**-6)
_SMALLEST_NORMAL_BITS = np.uint32((127 - 6) << 23)
_SUBNORMAL_MAGIC = np.float32(2.0**14)
_SUBNORMAL_MAGIC_BITS = np.uint32((127 + 14) << 23)
_E4M3_BIAS = np.uint32((127 - 7) << 23)
_E4M3_ROUND = np.uint32((0x100000000 - ((127 - 7) << 23) + 0x7FFFF) & 0xFFFFFFFF)


@inlined
def _saturated(bits, largest):
    """The float32 of these bits, with finite magnitudes above ``largest``, also bits, clipped to it."""
    body = np.uint32(bits & BODY)
    kept = largest if body > largest and body < INFINITY else body
    return float_of_bits(np.uint32(kept | np.uint32(bits & np.uint32(0x80000000))))


@compiled("(float32[], float32[], uint16[]) -> bool")
def encode_float16(x, residual, out):
    """Round ``x`` + ``residual`` (empty: none) to float16; return whether all elements were finite."""
    largest = np.int32(0)
    for i in range(x.size):
        value = x[i] + residual[i] if residual.size else x[i]
        bits = bits_of_float(value)
        half = narrow_float16(_saturated(bits, _LARGEST_FLOAT16))
        out[i] = half
        body = np.int32(np.uint32(bits & BODY))
        largest = max(largest, body)
        if residual.size:
            residual[i] = value - widen_float16(half) if body < np.int32(INFINITY) else residual[i]
    return np.uint32(largest) < INFINITY


@compiled("(float32[], float32[], uint16[]) -> bool")
def encode_bfloat16(x, residual, out):
    """Round ``x`` + ``residual`` (empty: none) to bfloat16; return whether all elements were finite."""
    largest = np.int32(0)
    for i in range(x.size):
        value = x[i] + residual[i] if residual.size else x[i]
        bits = bits_of_float(value)
        half = narrow_bfloat16(_saturated(bits, _LARGEST_BFLOAT16))
        out[i] = half
        body = np.int32(np.uint32(bits & BODY))
        largest = max(largest, body)
        if residual.size:
            residual[i] = value - widen_bfloat16(half) if body < np.int32(INFINITY) else residual[i]
    return np.uint32(largest) < INFINITY


@compiled("(uint16[], float32[], bool) -> int64")
def decode_float16(halves, out, add):
    """Write or add the elements of a float16 payload; return their number."""
    for i in range(out.size):
        value = widen_float16(halves[i])
        out[i] = out[i] + value if add else value
    return out.size


@compiled("(uint16[], float32[], bool) -> int64")
def decode_bfloat16(halves, out, add):
    """Write or add the elements of a bfloat16 payload; return their number."""
    for i in range(out.size):
        value = widen_bfloat16(halves[i])
        out[i] = out[i] + value if add else value
    return out.size


@inlined
def narrow_e4m3(value):
    """The 8 bits of the E4M3 number nearest to a float32 of at most 448, ties to even, as a uint32."""
    bits = bits_of_float(value)
    body = np.uint32(bits & BODY)
    small = np.uint32(bits_of_float(float_of_bits(body) + _SUBNORMAL_MAGIC) - _SUBNORMAL_MAGIC_BITS)
    odd = np.uint32(np.uint32(body >> np.uint32(20)) & np.uint32(1))
    normal = np.uint32(np.uint32(np.uint32(body + _E4M3_ROUND) + odd) >> np.uint32(20))
    chosen = small if body < _SMALLEST_NORMAL_BITS else normal
    return np.uint32(chosen | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@inlined
def widen_e4m3(code):
    """The float32 of the 8 bits of an E4M3 number in a uint32. The NaN of E4M3, which is never sent, becomes 480."""
    body = np.uint32(np.uint32(code & np.uint32(0x7F)) << np.uint32(20))
    normal = np.uint32(body + _E4M3_BIAS)
    small = bits_of_float(float_of_bits(np.uint32(normal + np.uint32(1 << 23))) - _SMALLEST_NORMAL)
    chosen = small if body < np.uint32(1 << 23) else normal
    return float_of_bits(np.uint32(chosen | np.uint32(np.uint32(code & np.uint32(0x80)) << np.uint32(24))))


@inner
def _pack(values, residual, codes, inverse, scale, shift):
    for j in range(values.size):
        value = values[j]
        code = narrow_e4m3(value * inverse)
        codes[j] = np.uint32(codes[j] | np.uint32(code << shift))
        if residual.size:
            residual[j] = value - widen_e4m3(code) * scale


@compiled("(float32[], float32[], uint32[], int64) -> int64")
def encode_e4m3(x, residual, out, block):
    """Encode ``x`` + ``residual`` (empty: none); return the number of blocks that are not finite."""
    memory = malloc(4 * block)
    room = view(memory, np.float32(0), block)
    at, bad = 0, 0
    for start in range(0, x.size, max(block, 1)):
        n = min(block, x.size - start)
        words = (n + 3) // 4
        values = room[:n]
        kept = residual[start : start + n]
        largest = gather(x[start : start + n], kept, values)
        maximum = float_of_bits(largest)
        codes = out[at + 1 : at + 1 + words]
        codes[:] = np.uint32(0)
        if largest >= INFINITY:
            out[at] = NAN
            bad += 1
        else:
            some = maximum >= TINY
            scale = step_of(maximum, _LARGEST_E4M3) if some else np.float32(0)
            inverse = _LARGEST_E4M3 / maximum if some else np.float32(0)
            out[at] = bits_of_float(scale)
            for k in range(4):
                first, last = min(k * words, n), min((k + 1) * words, n)
                _pack(values[first:last], kept[first:last], codes, inverse, scale, np.uint32(8 * k))
        at += 1 + words
    free(memory)
    return bad


@inner
def _unpack(codes, out, scale, shift, add):
    for j in range(out.size):
        value = widen_e4m3(np.uint32(codes[j] >> shift)) * scale
        out[j] = out[j] + value if add else value


@compiled("(uint32[], float32[], int64, bool) -> int64")
def decode_e4m3(payload, out, block, add):
    """Write or add the elements that a payload of the right length encodes; return the words read."""
    at = 0
    for start in range(0, out.size, max(block, 1)):
        n = min(block, out.size - start)
        words = (n + 3) // 4
        codes = payload[at + 1 : at + 1 + words]
        for k in range(4):
            first, last = start + min(k * words, n), start + min((k + 1) * words, n)
            _unpack(codes, out[first:last], float_of_bits(payload[at]), np.uint32(8 * k), add)
        at += 1 + words
    return at
