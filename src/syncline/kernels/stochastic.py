"""Stochastic rounding to equal steps of a block's norm, and to powers of two.

Payloads are laid out as in ``blocks``, with one word before the codes of a block. ``qsgd``: that word is the step, the
codes are numbers in two's complement, and ``linear`` decodes them. ``natural``: that word is a power of two U; a code
is a sign (bit 7) and an exponent e, and means 2**(e - 127) * U, or 0 if e = 0. In both the word is NaN if the block is
not finite.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import compiled, inlined, inner
from .aot.native import bits_of_float, float_of_bits, free, malloc, view
from .blocks import BODY, INFINITY, NAN, TINY, chance, draw, folded, gather, other_key

_LANES = 256
_LARGEST_NORM = np.float32(2.0**127)
_MANTISSA_BITS = np.uint32(23)


@inner
def _norm(values, maximum, lanes):
    """The L2 norm. Dividing the values by the maximum first keeps their squares from overflow and underflow."""
    unit = np.float32(1) / maximum
    lanes[:] = np.float32(0)
    for first in range(0, values.size, _LANES):
        row = values[first : first + _LANES]
        for j in range(row.size):
            value = row[j] * unit
            lanes[j] += value * value
    return maximum * np.sqrt(folded(lanes))


@inner
def _pack_steps(values, residual, codes, inverse, step, levels, first, key, other, shift, mask):
    for j in range(values.size):
        value = values[j]
        size = min(np.float32(abs(value) * inverse), levels)
        level = np.int32(size)
        uniform = chance(draw(np.uint32(first + np.uint32(j)), key, other))
        level = np.int32(level + np.int32(1)) if uniform < size - np.float32(level) else level
        signed = np.int32(-level) if value < np.float32(0) else level
        codes[j] = np.uint32(codes[j] | np.uint32(np.uint32(np.uint32(signed) & mask) << shift))
        if residual.size:
            residual[j] = value - np.float32(signed) * step


@compiled("(float32[], float32[], uint32[], int64, int64, int64, int64, int64) -> int64")
def encode_steps(x, residual, out, bits, levels, block, seed, index):
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite."""
    fields = 32 // bits
    mask = np.uint32((1 << bits) - 1)
    key = np.uint32(seed)
    other = other_key(key)
    memory = malloc(4 * (_LANES + block))
    lanes, room = view(memory, np.float32(0), _LANES), view(memory + 4 * _LANES, np.float32(0), block)
    at, bad = 0, 0
    for start in range(0, x.size, max(block, 1)):
        n = min(block, x.size - start)
        words = (n + fields - 1) // fields
        values = room[:n]
        kept = residual[start : start + n]
        largest = gather(x[start : start + n], kept, values)
        maximum = float_of_bits(largest)
        some = maximum >= TINY
        norm = _norm(values, maximum, lanes) if some else np.float32(0)
        codes = out[at + 1 : at + 1 + words]
        codes[:] = np.uint32(0)
        if largest >= INFINITY or norm >= _LARGEST_NORM:
            out[at] = NAN
            bad += 1
        else:
            step = norm / np.float32(levels)
            inverse = np.float32(levels) / norm if some else np.float32(0)
            out[at] = bits_of_float(step)
            for k in range(fields):
                first, last = min(k * words, n), min((k + 1) * words, n)
                _pack_steps(
                    values[first:last],
                    kept[first:last],
                    codes,
                    inverse,
                    step,
                    np.float32(levels),
                    np.uint32(index + start + first),
                    key,
                    other,
                    np.uint32(k * bits),
                    mask,
                )
        at += 1 + words
    free(memory)
    return bad


@inner
def _pack_powers(values, residual, codes, scale, unit, first, key, other, shift):
    for j in range(values.size):
        value = values[j]
        bits = bits_of_float(value * scale)
        random = np.uint32(draw(np.uint32(first + np.uint32(j)), key, other) >> np.uint32(9))
        exponent = np.uint32(np.uint32(np.uint32(bits & BODY) + random) >> _MANTISSA_BITS)
        exponent = min(np.int32(exponent), np.int32(127))
        code = np.uint32(np.uint32(exponent) | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))
        codes[j] = np.uint32(codes[j] | np.uint32(code << shift))
        if residual.size:
            residual[j] = value - _power(code) * unit


@inlined
def _power(code):
    """2**(e - 127) with the sign of the code, 0 for e = 0."""
    sign = np.uint32(np.uint32(code & np.uint32(0x80)) << np.uint32(24))
    return float_of_bits(np.uint32(np.uint32(np.uint32(code & np.uint32(0x7F)) << _MANTISSA_BITS) | sign))


@compiled("(float32[], float32[], uint32[], int64, int64, int64) -> int64")
def encode_powers(x, residual, out, block, seed, index):
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite.

    Adding a random number below 2**23 to the bits of a float32 carries into its exponent with exactly the probability
    of stochastic rounding to a power of two, also for subnormals. Values are first scaled by a power of two, hence
    exactly, so that the largest is rounded to at most 2**0. Values 126 powers below that are then subnormal.
    """
    key = np.uint32(seed)
    other = other_key(key)
    memory = malloc(4 * block)
    room = view(memory, np.float32(0), block)
    at, bad = 0, 0
    for start in range(0, x.size, max(block, 1)):
        n = min(block, x.size - start)
        words = (n + 3) // 4
        values = room[:n]
        kept = residual[start : start + n]
        largest = gather(x[start : start + n], kept, values)
        codes = out[at + 1 : at + 1 + words]
        codes[:] = np.uint32(0)
        if largest >= INFINITY:
            out[at] = NAN
            bad += 1
        else:
            above = min(np.int64(largest >> _MANTISSA_BITS) + 1, 254)
            unit = float_of_bits(np.uint32(above << 23))
            scale = np.float32(1) / unit
            out[at] = bits_of_float(unit)
            for k in range(4):
                first, last = min(k * words, n), min((k + 1) * words, n)
                _pack_powers(
                    values[first:last],
                    kept[first:last],
                    codes,
                    scale,
                    unit,
                    np.uint32(index + start + first),
                    key,
                    other,
                    np.uint32(8 * k),
                )
        at += 1 + words
    free(memory)
    return bad


@inner
def _unpack_powers(codes, out, unit, shift, add):
    for j in range(out.size):
        value = _power(np.uint32(codes[j] >> shift)) * unit
        out[j] = out[j] + value if add else value


@compiled("(uint32[], float32[], int64, bool) -> int64")
def decode_powers(payload, out, block, add):
    """Write or add the elements that a payload of the right length encodes; return the words read."""
    at = 0
    for start in range(0, out.size, max(block, 1)):
        n = min(block, out.size - start)
        words = (n + 3) // 4
        codes = payload[at + 1 : at + 1 + words]
        for k in range(4):
            first, last = start + min(k * words, n), start + min((k + 1) * words, n)
            _unpack_powers(codes, out[first:last], float_of_bits(payload[at]), np.uint32(8 * k), add)
        at += 1 + words
    return at
