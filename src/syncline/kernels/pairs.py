"""Pairs of index and value as payload words: written, checked and read, merged.

An index is relative to its *stretch* of 65536 elements, so that it takes 16 bits. The payload begins with the number of
pairs in every stretch:

    words                  content
    ceil(elements/65536)   pairs in each stretch, in order
    ceil(pairs/2)          the 16-bit indices, strictly increasing within a stretch, two to a word, low half first
    pairs                  the values, float32

This takes 6 bytes for each pair and 4 bytes for every 65536 elements.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import bits_of_float

STRETCH: Final = 1 << 16
_LOW: Final = np.uint32(0xFFFF)

# Faults of a payload, as ``count_pairs`` and ``read_indices`` return them.
TOO_MANY: Final = -1
LENGTH: Final = -2
RANGE: Final = -3
ORDER: Final = -4


@inner
def _stretches(elements):
    return (elements + STRETCH - 1) // STRETCH


@compiled("(uint32[], float32[], int64, uint32[]) -> int64")
def write_pairs(indices, values, elements, out):
    """Write pairs with increasing indices as payload words; return the number of words."""
    stretches, pairs = _stretches(elements), indices.size
    out[:stretches] = np.uint32(0)
    halves = out[stretches : stretches + (pairs + 1) // 2]
    halves[:] = np.uint32(0)
    for i in range(pairs):
        index = indices[i]
        out[index >> np.uint32(16)] += np.uint32(1)
        halves[i >> 1] |= np.uint32(np.uint32(index & _LOW) << np.uint32(16 * (i & 1)))
    into = out[stretches + halves.size : stretches + halves.size + pairs]
    for i in range(pairs):
        into[i] = bits_of_float(values[i])
    return stretches + halves.size + pairs


@compiled("(uint32[], int64) -> int64")
def count_pairs(payload, elements):
    """The number of pairs in a payload for a tensor of ``elements``, or the fault of its counts or length."""
    stretches = _stretches(elements)
    if payload.size < stretches:
        return LENGTH
    pairs = 0
    for s in range(stretches):
        if np.int64(payload[s]) > min(STRETCH, elements - s * STRETCH):
            return TOO_MANY
        pairs += np.int64(payload[s])
    return pairs if payload.size == stretches + (pairs + 1) // 2 + pairs else LENGTH


@compiled("(uint32[], int64, uint32[]) -> int64")
def read_indices(payload, elements, indices):
    """Read the indices of a payload that ``count_pairs`` accepted; return their number, or the fault of one."""
    stretches = _stretches(elements)
    halves = payload[stretches:]
    at = 0
    for s in range(stretches):
        first = s * STRETCH
        stop = min(STRETCH, elements - first)
        before = -1
        for _ in range(np.int64(payload[s])):
            local = np.int64(np.uint32(halves[at >> 1] >> np.uint32(16 * (at & 1))) & _LOW)
            if local >= stop:
                return RANGE
            if local <= before:
                return ORDER
            before = local
            indices[at] = np.uint32(first + local)
            at += 1
    return at


@compiled("(uint32[], float32[], uint32[], float32[], uint32[], float32[]) -> int64")
def merge(left, lefts, right, rights, indices, values):
    """Merge two sorted lists of pairs, adding the values of equal indices; return the number of pairs."""
    i, j, at = 0, 0, 0
    while i < left.size or j < right.size:
        mine = np.int64(left[i]) if i < left.size else np.int64(1) << 32
        other = np.int64(right[j]) if j < right.size else np.int64(1) << 32
        if mine == other:
            indices[at], values[at] = left[i], lefts[i] + rights[j]
            i, j = i + 1, j + 1
        elif mine < other:
            indices[at], values[at] = left[i], lefts[i]
            i += 1
        else:
            indices[at], values[at] = right[j], rights[j]
            j += 1
        at += 1
    return at
