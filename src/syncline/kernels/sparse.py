"""Selects the elements of a tensor to send, and writes, checks and merges them as pairs of index and value.

**Selecting** takes the largest elements, or one at random from every stratum. Comparisons use the *magnitude*: the 31
lowest bits of a float32 as a whole number. It orders like |v|, with infinities and NaNs above everything finite, so the
loops need no test for them.

The value sent for an element is ``scale * x + momentum * velocity + residual``; an empty array leaves its term out. The
value is computed again wherever it is needed, always in the same order and so with the same bits: ``select`` only
reads, and ``settle`` stores it once the whole tensor is known to be finite.

**Pairs.** An index is relative to its *stretch* of 65536 elements, so that it takes 16 bits. A payload begins with the
number of pairs in every stretch:

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
from .aot.native import bits_of_float, free, malloc, view
from .blocks import BODY, below, draw, other_key

NOT_FINITE: Final = 0x7F800000
"""The magnitude of infinity. That of a NaN is larger."""

BLOCK: Final = 2048
"""Elements whose values stay in the first-level cache. ``select`` needs room for as many more than it returns."""

_GROUP: Final = 8
"""Elements that are skipped together if none of them is large enough."""

_DIGIT: Final = 2048
_LANES: Final = 64


@inner
def magnitude(value):
    """|value| as a whole number with the same order."""
    return np.int32(np.uint32(bits_of_float(value) & BODY))


@inner
def _value(x, residual, velocity, i, momentum, scale):
    value = x[i] * scale
    if velocity.size:
        value = velocity[i] * momentum + value
    if residual.size:
        value = residual[i] + value
    return value


@inner
def _fill(x, residual, velocity, momentum, scale, room):
    """Compute the values of a block; return the largest magnitude.

    Each case has a loop of its own, because only loops without such branches are vectorised.
    """
    largest = np.int32(0)
    if velocity.size:
        for i in range(x.size):
            value = residual[i] + (velocity[i] * momentum + x[i] * scale)
            room[i] = value
            largest = max(largest, magnitude(value))
    elif residual.size:
        for i in range(x.size):
            value = residual[i] + x[i] * scale
            room[i] = value
            largest = max(largest, magnitude(value))
    else:
        for i in range(x.size):
            value = x[i] * scale
            room[i] = value
            largest = max(largest, magnitude(value))
    return largest


@inner
def _mark(values, bound, marks):
    """Set 1 for each value of a block that reaches the bound, 0 for the others."""
    for i in range(values.size):
        marks[i] = np.uint8(magnitude(values[i]) >= bound)


@inner
def _append(block, first, marks, words, groups, indices, values, found):
    """Append the marked elements of a block, which must all fit.

    Eight marks are tested as one of ``words``: most of these are 0, and ``groups`` lists the others. The inner loop
    writes every element and advances only past marked ones, since a branch on the marks could not be predicted.
    """
    some = 0
    for group in range(block.size // _GROUP):
        groups[some] = np.uint16(group)
        some += np.int64(words[group] != np.uint64(0))
    for listed in range(some):
        begin = np.int64(groups[listed]) * _GROUP
        for i in range(_GROUP):
            indices[found] = np.uint32(first + begin + i)
            values[found] = block[begin + i]
            found += np.int64(marks[begin + i])
    for i in range(block.size - block.size % _GROUP, block.size):
        indices[found] = np.uint32(first + i)
        values[found] = block[i]
        found += np.int64(marks[i])
    return found


@compiled("(float32[], float32[], float32[], float32, float32, int64, uint32[], float32[]) -> int64, int64")
def select(x, residual, velocity, momentum, scale, bound, indices, values):
    """Collect the elements whose magnitude is at least ``bound``, in order; return how many and the largest magnitude.

    The largest magnitude counts all elements. Where a block might not fit in the remaining room, ``select`` stops
    collecting but not measuring, so the result is complete if it leaves room for ``BLOCK`` more.
    """
    memory = malloc(7 * BLOCK)
    marks, words = view(memory, np.uint8(0), BLOCK), view(memory, np.uint64(0), BLOCK // _GROUP)
    groups, room = view(memory + BLOCK, np.uint16(0), BLOCK), view(memory + 3 * BLOCK, np.float32(0), BLOCK)
    found, largest = 0, np.int32(0)
    last = indices.size - BLOCK
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        block = room[: stop - start]
        most = _fill(x[start:stop], residual[start:stop], velocity[start:stop], momentum, scale, block)
        largest = max(largest, most)
        if most >= bound and found <= last:
            _mark(block, np.int32(bound), marks)
            found = _append(block, start, marks, words, groups, indices, values, found)
    free(memory)
    return found, np.int64(largest)


@compiled("(float32[], float32[], float32[], float32, float32, int64, int64, uint32[], float32[]) -> int64")
def select_exactly(x, residual, velocity, momentum, scale, bound, ties, indices, values):
    """Collect the elements above ``bound`` and the first ``ties`` that equal it; needs room for one more.

    Zeros lose their sign, like those of ``add_zeros``.
    """
    found = 0
    for i in range(x.size):
        value = _value(x, residual, velocity, i, momentum, scale)
        size = np.int64(magnitude(value))
        equal = np.int64(size == bound) & np.int64(ties > 0)
        ties -= equal
        indices[found] = np.uint32(i)
        values[found] = value + np.float32(0)
        found += np.int64(size > bound) + equal
    return found


@compiled("(float32[], float32[]) -> int32")
def largest_magnitude(x, residual):
    """The largest magnitude of ``x`` + ``residual`` (empty: none)."""
    memory = malloc(4 * BLOCK)
    room = view(memory, np.float32(0), BLOCK)
    largest = np.int32(0)
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        mine, kept = x[start:stop], residual[start:stop]
        largest = max(largest, _fill(mine, kept, x[:0], np.float32(0), np.float32(1), room[: stop - start]))
    free(memory)
    return largest


@compiled("(float32[], float32[], float32[], float32, float32, int32[])")
def magnitudes(x, residual, velocity, momentum, scale, out):
    """Write the magnitudes of all elements."""
    for i in range(x.size):
        out[i] = magnitude(_value(x, residual, velocity, i, momentum, scale))


@compiled("(float32[], float32[], float32[], float32, float32, uint32, int32[])")
def sample(x, residual, velocity, momentum, scale, seed, out):
    """Write the magnitudes of ``out.size`` elements, one at random from each of as many strata of equal size."""
    other = other_key(seed)
    for j in range(out.size):
        first, stop = j * x.size // out.size, (j + 1) * x.size // out.size
        i = first + below(draw(np.uint32(j), seed, other), stop - first)
        out[j] = magnitude(_value(x, residual, velocity, i, momentum, scale))


@inner
def _digit_of_rank(counts, rank):
    """The digit of the element with this rank, counted from the largest, and how many have larger digits."""
    larger = 0
    for back in range(counts.size):
        digit = counts.size - 1 - back
        if larger + counts[digit] >= rank:
            return digit, larger
        larger += counts[digit]
    return 0, larger


@compiled("(int32[], int64) -> int64, int64")
def rank_largest(found, rank):
    """The ``rank``-th largest of some magnitudes (1: the largest), and how many are larger than it.

    Counts digits three times, of 11, 10 and 10 bits from the highest down. This is exact, and takes linear time for any
    values.
    """
    memory = malloc(8 * _DIGIT)
    counts = view(memory, np.int64(0), _DIGIT)
    prefix, larger = 0, 0
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        counts[:] = 0
        above = shift + width
        mask = (1 << width) - 1
        for i in range(found.size):
            value = np.int64(found[i])
            if value >> above == prefix:
                counts[(value >> shift) & mask] += 1
        digit, more = _digit_of_rank(counts, rank - larger)
        prefix = (prefix << width) | digit
        larger += more
    free(memory)
    return prefix, larger


@compiled("(uint32[], float32[], int64, int64, int64) -> int64")
def keep_largest(indices, values, found, bound, ties):
    """Keep, in place, the pairs above ``bound`` and the first ``ties`` that equal it; return their number."""
    kept = 0
    for i in range(found):
        size = np.int64(magnitude(values[i]))
        equal = np.int64(size == bound) & np.int64(ties > 0)
        ties -= equal
        indices[kept] = indices[i]
        values[kept] = values[i]
        kept += np.int64(size > bound) + equal
    return kept


@compiled("(uint32[], float32[], uint32[], float32[])")
def add_zeros(indices, values, all_indices, all_values):
    """Copy the selected pairs, and fill the remaining places with zeros at the lowest other indices."""
    zeros, at, index = all_indices.size - indices.size, 0, 0
    for i in range(all_indices.size):
        if zeros and (at == indices.size or index < np.int64(indices[at])):
            all_indices[i], all_values[i] = np.uint32(index), np.float32(0)
            zeros -= 1
        else:
            index = np.int64(indices[at])
            all_indices[i], all_values[i] = indices[at], values[at]
            at += 1
        index += 1


@compiled("(uint32[], float32[], int64, int64, float32[])")
def put_others(indices, values, bound, ties, out):
    """Add to ``out`` the pairs that ``keep_largest`` with the same bound and ties drops."""
    for i in range(indices.size):
        size = np.int64(magnitude(values[i]))
        if size == bound and ties > 0:
            ties -= 1
        elif size <= bound:
            out[indices[i]] += values[i]


@inner
def _absorb(x, residual, velocity, momentum, scale):
    if velocity.size:
        for i in range(x.size):
            moved = velocity[i] * momentum + x[i] * scale
            velocity[i] = moved
            residual[i] = residual[i] + moved
    else:
        for i in range(x.size):
            residual[i] = residual[i] + x[i] * scale


@compiled("(float32[], float32[], float32[], float32, float32, uint32[], bool)")
def settle(x, residual, velocity, momentum, scale, chosen, finite):
    """Set ``residual`` to the values that ``select`` saw and ``velocity`` to its new value, both to zero where chosen.

    Does nothing unless everything was ``finite``.
    """
    if not finite:
        return
    at = 0
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        _absorb(x[start:stop], residual[start:stop], velocity[start:stop], momentum, scale)
        while at < chosen.size and np.int64(chosen[at]) < stop:
            residual[chosen[at]] = np.float32(0)
            if velocity.size:
                velocity[chosen[at]] = np.float32(0)
            at += 1


@compiled("(float32[]) -> float64")
def norm(x):
    """The Euclidean norm, summed in float64 in lanes of a fixed order. It is not finite if ``x`` is not."""
    memory = malloc(8 * _LANES)
    lanes = view(memory, np.float64(0), _LANES)
    lanes[:] = 0.0
    for start in range(0, x.size, lanes.size):
        part = x[start : start + lanes.size]
        for i in range(part.size):
            lanes[i] += np.float64(part[i]) * np.float64(part[i])
    total = 0.0
    for i in range(lanes.size):
        total += lanes[i]
    free(memory)
    return np.sqrt(total)


@compiled("(uint32, int64, uint32[])")
def strata(seed, elements, out):
    """Draw one index from each of ``out.size`` strata of equal size."""
    other = other_key(seed)
    for j in range(out.size):
        first, stop = j * elements // out.size, (j + 1) * elements // out.size
        out[j] = np.uint32(first + below(draw(np.uint32(j), seed, other), stop - first))


@compiled("(uint32[], float32[], float32[])")
def take(indices, x, out):
    """Add the elements at the indices to ``out``."""
    for j in range(indices.size):
        out[j] += x[indices[j]]


@compiled("(uint32[], float32[], float32[])")
def put(indices, values, out):
    """Add the values to ``out`` at the indices."""
    for j in range(indices.size):
        out[indices[j]] += values[j]


@compiled("(float32[], float32[], float32, uint32[])")
def fade(x, residual, decay, chosen):
    """Set ``residual`` to ``decay`` times its sum with ``x``, and to zero where chosen."""
    for i in range(x.size):
        residual[i] = (residual[i] + x[i]) * decay
    for j in range(chosen.size):
        residual[chosen[j]] = np.float32(0)


def take_strata(x, residual, decay, seed, out):
    """Write one element at random from each of ``out.size`` strata, or NaNs if an element is not finite.

    Returns whether all elements are finite. The residual, unless empty, keeps ``decay`` times the elements not taken.
    """
    values, indices = out.view(np.float32), np.empty(out.size, np.uint32)
    if largest_magnitude(x, residual) >= NOT_FINITE:
        values.fill(np.nan)
        return False
    strata(seed, x.size, indices)
    values.fill(0)
    take(indices, x, values)
    if residual.size:
        take(indices, residual, values)
        fade(x, residual, decay, indices)
    return True


def put_strata(values, seed, out):
    """Add the values at the elements that ``take_strata`` with the same seed takes."""
    indices = np.empty(values.size, np.uint32)
    strata(seed, out.size, indices)
    put(indices, values, out)


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
