"""Rounding to -1, 0 or 1 times the largest magnitude of a block, 20 values to a 32-bit word.

The payload of a block of n elements is one word with its largest magnitude (float32), then W = ceil(n/20) words of
trits: element k*W + j of the block is digit k, with weight 3**k, of word j; the digit is the trit plus 1. The maximum
is NaN if the block is not finite.

Clipping a block means giving it a smaller maximum: larger elements are then rounded to that maximum with certainty. The
limit is a number of standard deviations about zero, from squares summed in lanes, one for each word, with rows added in
order.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import compiled, inlined, inner
from .aot.native import bits_of_float, float_of_bits, free, malloc, view
from .blocks import INFINITY, NAN, chance, draw, folded, gather, other_key

_TRITS = 20
_HALF_TRITS = 10
_HALF_WEIGHT = np.uint32(3**_HALF_TRITS)
_LANES = 512
_EXPONENT_BITS = np.uint32(23)


@inner
def _add_squares(values, unit, lanes):
    for j in range(values.size):
        value = values[j] * unit
        lanes[j] += value * value


@inner
def _clipped(values, largest, clip, words, lanes):
    """The maximum, or ``clip`` standard deviations if these are smaller.

    Values are multiplied by a power of two before they are squared, so that squares neither overflow nor underflow.
    """
    exponent = min(max(np.int32(largest >> _EXPONENT_BITS), np.int32(1)), np.int32(253))
    unit = float_of_bits(np.uint32(np.uint32(np.int32(254) - exponent) << _EXPONENT_BITS))
    lanes[:] = np.float32(0)
    for k in range(_TRITS):
        _add_squares(values[min(k * words, values.size) : min((k + 1) * words, values.size)], unit, lanes)
    limit = clip * np.sqrt(folded(lanes) / np.float32(values.size))
    return min(float_of_bits(largest) * unit, limit) / unit


@inlined
def _put(value, threshold, maximum, weight, codes, residual, j):
    some = np.float32(abs(value)) > threshold
    trit = (np.int32(-1) if value < np.float32(0) else np.int32(1)) if some else np.int32(0)
    codes[j] = np.uint32(codes[j] + np.uint32(np.uint32(trit + np.int32(1)) * weight))
    if residual.size:
        residual[j] = value - np.float32(trit) * maximum


@inner
def _pack_nearest(values, residual, codes, maximum, weight):
    threshold = np.float32(0.5) * maximum
    for j in range(values.size):
        _put(values[j], threshold, maximum, weight, codes, residual, j)


@inner
def _pack_stochastic(values, residual, codes, maximum, weight, first, key, other):
    for j in range(values.size):
        uniform = chance(draw(np.uint32(first + np.uint32(j)), key, other))
        _put(values[j], uniform * maximum, maximum, weight, codes, residual, j)


@compiled("(float32[], float32[], uint32[], int64, bool, float32, int64, int64) -> int64")
def encode_trits(x, residual, out, block, stochastic, clip, seed, index):
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite.

    A block has at most 512 words. It is clipped at ``clip`` standard deviations unless ``clip`` is 0.
    """
    key = np.uint32(seed)
    other = other_key(key)
    memory = malloc(4 * (_LANES + block))
    lanes, room = view(memory, np.float32(0), _LANES), view(memory + 4 * _LANES, np.float32(0), block)
    at, bad = 0, 0
    for start in range(0, x.size, max(block, 1)):
        n = min(block, x.size - start)
        words = (n + _TRITS - 1) // _TRITS
        values = room[:n]
        kept = residual[start : start + n]
        largest = gather(x[start : start + n], kept, values)
        codes = out[at + 1 : at + 1 + words]
        codes[:] = np.uint32(0)
        if largest >= INFINITY:
            out[at] = NAN
            bad += 1
        else:
            maximum = _clipped(values, largest, clip, words, lanes) if clip > 0 else float_of_bits(largest)
            out[at] = bits_of_float(maximum)
            weight = np.uint32(1)
            for k in range(_TRITS):
                first, last = min(k * words, n), min((k + 1) * words, n)
                row, rest = values[first:last], kept[first:last]
                if stochastic:
                    _pack_stochastic(row, rest, codes, maximum, weight, np.uint32(index + start + first), key, other)
                else:
                    _pack_nearest(row, rest, codes, maximum, weight)
                weight = np.uint32(weight * np.uint32(3))
        at += 1 + words
    free(memory)
    return bad


@inner
def _unpack(codes, out, maximum, add):
    """Write or add the elements of the lowest digits, and remove these digits from the codes, all below 2**16."""
    for j in range(out.size):
        code = codes[j]
        rest = np.uint32(np.uint32(code * np.uint32(43691)) >> np.uint32(17))  # code // 3
        codes[j] = rest
        digit = np.int32(np.uint32(code - np.uint32(rest * np.uint32(3))))
        value = np.float32(np.int32(digit - np.int32(1))) * maximum
        out[j] = out[j] + value if add else value


@inner
def _halve(codes, low, high):
    """Split each code into two of ten digits, which 32-bit arithmetic can divide; drop digits beyond the 20th."""
    for j in range(codes.size):
        code = codes[j]
        upper = np.uint32(np.uint64(code) // np.uint64(_HALF_WEIGHT))
        low[j] = np.uint32(code - np.uint32(upper * _HALF_WEIGHT))
        high[j] = np.uint32(upper & np.uint32(0xFFFF))


@compiled("(uint32[], float32[], int64, bool) -> int64")
def decode_trits(payload, out, block, add):
    """Write or add the elements that a payload of the right length encodes; return the words read."""
    most = (block + _TRITS - 1) // _TRITS
    memory = malloc(8 * most)
    lower, upper = view(memory, np.uint32(0), most), view(memory + 4 * most, np.uint32(0), most)
    at = 0
    for start in range(0, out.size, max(block, 1)):
        n = min(block, out.size - start)
        words = (n + _TRITS - 1) // _TRITS
        maximum = float_of_bits(np.uint32(payload[at]))
        low, high = lower[:words], upper[:words]
        _halve(payload[at + 1 : at + 1 + words], low, high)
        for k in range(_TRITS):
            first, last = start + min(k * words, n), start + min((k + 1) * words, n)
            _unpack(low if k < _HALF_TRITS else high, out[first:last], maximum, add)
        at += 1 + words
    free(memory)
    return at
