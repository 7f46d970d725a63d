"""Quantisation to equal steps between -max and max of a block, rounded to nearest.

The payload of a block is one word with its step (float32), then its codes as ``blocks`` lays them out, 32/bits to the
word, in two's complement. A block is zero when its maximum is below ``TINY``. The step is NaN if the block has an
infinity or NaN.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import bits_of_float, float_of_bits, free, malloc, view
from .blocks import INFINITY, MAGIC, NAN, TINY, gather


@inner
def step_of(maximum, levels):
    """The step that makes the maximum ``levels`` steps, one bit smaller if their product would overflow float32."""
    step = maximum / levels
    if not np.isfinite(step * levels):
        step = float_of_bits(np.uint32(bits_of_float(step) - np.uint32(1)))
    return step


@inner
def _pack(values, residual, codes, inverse, step, shift, mask):
    for j in range(values.size):
        value = values[j]
        shifted = value * inverse + MAGIC
        codes[j] = np.uint32(codes[j] | np.uint32(np.uint32(bits_of_float(shifted) & mask) << shift))
        if residual.size:
            residual[j] = value - (shifted - MAGIC) * step


@compiled("(float32[], float32[], uint32[], int64, int64) -> int64")
def encode_linear(x, residual, out, bits, block):
    """Encode ``x`` + ``residual`` (empty: none); return the number of blocks that are not finite."""
    fields = 32 // bits
    levels = np.float32((1 << (bits - 1)) - 1)
    mask = np.uint32((1 << bits) - 1)
    memory = malloc(4 * block)
    room = view(memory, np.float32(0), block)
    at, bad = 0, 0
    for start in range(0, x.size, max(block, 1)):
        n = min(block, x.size - start)
        words = (n + fields - 1) // fields
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
            step = step_of(maximum, levels) if some else np.float32(0)
            inverse = levels / maximum if some else np.float32(0)
            out[at] = bits_of_float(step)
            for k in range(fields):
                first, last = k * words, min((k + 1) * words, n)
                _pack(values[first:last], kept[first:last], codes, inverse, step, np.uint32(k * bits), mask)
        at += 1 + words
    free(memory)
    return bad


@inner
def _unpack(codes, out, step, left, right, add):
    for j in range(out.size):
        value = np.float32(np.int32(np.int32(np.uint32(codes[j] << left)) >> right)) * step
        out[j] = out[j] + value if add else value


@compiled("(uint32[], float32[], int64, int64, bool) -> int64")
def decode_linear(payload, out, bits, block, add):
    """Write or add the elements that a payload of the right length encodes; return the words read."""
    fields = 32 // bits
    at = 0
    for start in range(0, out.size, max(block, 1)):
        n = min(block, out.size - start)
        words = (n + fields - 1) // fields
        step = float_of_bits(payload[at])
        codes = payload[at + 1 : at + 1 + words]
        for k in range(fields):
            first, last = start + k * words, start + min((k + 1) * words, n)
            _unpack(codes, out[first:last], step, np.uint32(32 - bits * (k + 1)), np.int32(32 - bits), add)
        at += 1 + words
    return at
