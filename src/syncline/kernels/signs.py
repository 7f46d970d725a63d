"""One bit per element: its sign, with two means per block, one mean, or a fixed scale.

The payload of a block of n elements is its scales (float32), then W = ceil(n/32) words of sign bits: element k*W + j of
the block is bit k of word j, the element's own sign bit. ``encode_means`` has two scales, the means of the elements
with clear and with set bits. ``encode_signs`` has one, the mean magnitude or, for votes, a fixed number.

The state kept for the next step is the residual, or for votes the momentum, whose signs are the bits.

Scales are NaN if the block, or the sum of its elements, is not finite. Means come from sums in lanes, one lane for each
word, with rows added in order.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import bits_of_float, float_of_bits, free, malloc, view
from .blocks import BODY, NAN, folded

BLOCK: Final = 16384
_BITS = 32
_LANES = BLOCK // _BITS
_SIGN_BIT = np.uint32(31)


@inner
def _sum_row(x, residual, codes, above, below, shift):
    """Put a row's sign bits into the codes and add its elements to ``above`` (bit clear) or ``below`` (bit set)."""
    for j in range(x.size):
        value = x[j] + residual[j] if residual.size else x[j]
        bit = np.uint32(bits_of_float(value) >> _SIGN_BIT)
        codes[j] = np.uint32(codes[j] | np.uint32(bit << shift))
        above[j] += np.float32(0) if bit else value
        below[j] += value if bit else np.float32(0)


@inner
def _sum_magnitudes(x, kept, decay, codes, lanes, shift):
    """Put a row's sign bits into the codes and add the magnitudes of its elements to the lanes."""
    for j in range(x.size):
        value = x[j] + decay * kept[j] if kept.size else x[j]
        bits = bits_of_float(value)
        codes[j] = np.uint32(codes[j] | np.uint32(np.uint32(bits >> _SIGN_BIT) << shift))
        lanes[j] += float_of_bits(np.uint32(bits & BODY))


@inner
def _keep(x, residual, above, below):
    """Update the residual of a whole block."""
    for j in range(residual.size):
        value = x[j] + residual[j]
        residual[j] = value - (below if np.uint32(bits_of_float(value) >> _SIGN_BIT) else above)


@inner
def _move(x, momentum, decay):
    """Update the momentum of a whole block."""
    for j in range(momentum.size):
        momentum[j] = x[j] + decay * momentum[j]


@inner
def _count(codes):
    """The number of set bits."""
    total = np.uint32(0)
    for j in range(codes.size):
        word = codes[j]
        word = np.uint32(word - np.uint32(np.uint32(word >> np.uint32(1)) & np.uint32(0x55555555)))
        pairs = np.uint32(np.uint32(word >> np.uint32(2)) & np.uint32(0x33333333))
        word = np.uint32(np.uint32(word & np.uint32(0x33333333)) + pairs)
        word = np.uint32(np.uint32(word + np.uint32(word >> np.uint32(4))) & np.uint32(0x0F0F0F0F))
        total = np.uint32(total + np.uint32(np.uint32(word * np.uint32(0x01010101)) >> np.uint32(24)))
    return np.int64(total)


@compiled("(float32[], float32[], uint32[]) -> int64")
def encode_means(x, residual, out):
    """Encode ``x`` + ``residual`` (empty: none); return the number of blocks that are not finite."""
    memory = malloc(8 * _LANES)
    lanes = view(memory, np.float32(0), 2 * _LANES)
    above, below = lanes[:_LANES], lanes[_LANES:]
    at, bad = 0, 0
    for start in range(0, x.size, BLOCK):
        n = min(BLOCK, x.size - start)
        words = (n + _BITS - 1) // _BITS
        values, kept = x[start : start + n], residual[start : start + n]
        codes = out[at + 2 : at + 2 + words]
        codes[:] = np.uint32(0)
        lanes[:] = np.float32(0)
        for k in range(_BITS):
            first, last = min(k * words, n), min((k + 1) * words, n)
            _sum_row(values[first:last], kept[first:last], codes, above, below, np.uint32(k))
        set_bits = _count(codes)
        high = folded(above) / np.float32(max(n - set_bits, 1))
        low = folded(below) / np.float32(max(set_bits, 1))
        if np.isfinite(high) and np.isfinite(low):
            out[at], out[at + 1] = bits_of_float(high), bits_of_float(low)
            _keep(values, kept, high, low)
        else:
            out[at] = out[at + 1] = NAN
            bad += 1
        at += 2 + words
    free(memory)
    return bad


@compiled("(float32[], float32[], uint32[], float32, float32) -> int64")
def encode_signs(x, kept, out, vote, decay):
    """Encode ``x`` + ``decay`` * ``kept`` (empty: none); return the number of blocks that are not finite.

    With ``vote`` of 0 the scale is the mean magnitude, and ``kept`` becomes the residual. Otherwise ``vote`` is the
    scale, and ``kept`` becomes the encoded sum itself, the momentum.
    """
    memory = malloc(4 * _LANES)
    lanes = view(memory, np.float32(0), _LANES)
    at, bad = 0, 0
    for start in range(0, x.size, BLOCK):
        n = min(BLOCK, x.size - start)
        words = (n + _BITS - 1) // _BITS
        values, mine = x[start : start + n], kept[start : start + n]
        codes = out[at + 1 : at + 1 + words]
        codes[:] = np.uint32(0)
        lanes[:] = np.float32(0)
        for k in range(_BITS):
            first, last = min(k * words, n), min((k + 1) * words, n)
            _sum_magnitudes(values[first:last], mine[first:last], decay, codes, lanes, np.uint32(k))
        mean = folded(lanes) / np.float32(n)
        if np.isfinite(mean) and vote > 0:
            out[at] = bits_of_float(vote)
            _move(values, mine, decay)
        elif np.isfinite(mean):
            out[at] = bits_of_float(mean)
            _keep(values, mine, mean, -mean)
        else:
            out[at] = NAN
            bad += 1
        at += 1 + words
    free(memory)
    return bad


@inner
def _unpack(codes, out, above, below, shift, add):
    for j in range(out.size):
        value = below if np.uint32(np.uint32(codes[j] >> shift) & np.uint32(1)) else above
        out[j] = out[j] + value if add else value


@compiled("(uint32[], float32[], int64, bool) -> int64")
def decode_bits(payload, out, scales, add):
    """Write or add the elements of a payload of the right length with 1 or 2 scales; return the words read."""
    at = 0
    for start in range(0, out.size, BLOCK):
        n = min(BLOCK, out.size - start)
        words = (n + _BITS - 1) // _BITS
        above = float_of_bits(payload[at])
        below = float_of_bits(payload[at + 1]) if scales == 2 else -above
        codes = payload[at + scales : at + scales + words]
        for k in range(_BITS):
            first, last = start + min(k * words, n), start + min((k + 1) * words, n)
            _unpack(codes, out[first:last], above, below, np.uint32(k), add)
        at += scales + words
    return at
