"""Selects the elements of a tensor to send and writes them as pairs on a GPU, like ``kernels.sparse``.

**Selecting.** Three counts of digits of the magnitudes (11, 10 and 10 bits, from the highest down) give the k-th
largest magnitude for any values. Then every block counts its larger and its equal elements, sums over these counts say
where each block's pairs begin, and the pairs are written in the order of their indices. All counts are integers, so the
result does not depend on the order of the programs, and the host does not wait. Bytes of memory traffic per element,
with error feedback and (without):

    choose_exactly    8 (4) for each of five readings: three counts of digits, one count per block, one that collects
    choose_reaching   8 (4) for each of two readings: one counts, one collects; waits for the device once
    settle            12 (0): reads x and residual, writes the residual
    randomk           28 (4): one reading to find elements that are not finite, ``settle``, the decay of the residual,
                      and accesses to the random elements

Momentum correction adds 4 to each reading, and 8 to ``settle``. Where memory is the limit, 12 (4) is the minimum.

In kernels that read whole tensors Triton specialises on the length: if 16 divides it, four elements are loaded at once.

An element's value is computed in the same order as on the host. NaNs may differ from the host's, and so may the choice
if there are more NaNs than elements to send.

**Pairs.**

    writing   14 bytes for each pair: 8 of index and value read, 6 of payload written, and the counts of stretches
    reading   6 bytes for each pair: the 16-bit indices are read and 32-bit ones written; values stay in the payload

A payload from another process is checked before any of it is used, so reading waits for the device once. If a payload
has several faults, the one reported may differ from the host's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..sparse import BLOCK, LENGTH, NOT_FINITE, ORDER, RANGE, STRETCH, TOO_MANY
from .blocks import BODY, NAN, below, blocks_of, draw, launch, other_key, signed

_WARPS = 4
_ROWS = 32
"""Blocks whose digits one program counts."""

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of the digits of a magnitude, the same as on the host."""

_TILE = 1024
"""Pairs or strata that one program handles."""


@triton.jit
def _magnitude(value):
    """|value| as a whole number with the same order."""
    return value.to(tl.int32, bitcast=True) & BODY


@triton.jit
def _no_sign_of_zero(value):
    """The value with the sign of a zero removed."""
    return tl.where(value == 0.0, 0.0, value)


@triton.jit
def _moved(x, velocity, momentum, scale, at, here, MOVED: tl.constexpr):
    """The addend of the residual."""
    value = tl.load(x + at, mask=here, other=0.0) * scale
    if MOVED:
        value = tl.load(velocity + at, mask=here, other=0.0) * momentum + value
    return value


@triton.jit
def _values(x, residual, velocity, momentum, scale, at, here, KEPT: tl.constexpr, MOVED: tl.constexpr):
    """The values to select from; zeros outside ``here``."""
    value = _moved(x, velocity, momentum, scale, at, here, MOVED)
    if KEPT:
        value = tl.load(residual + at, mask=here, other=0.0) + value
    return value


@triton.jit
def _histogram(
    x, residual, velocity, momentum, scale, counts, found, n,
    KEPT: tl.constexpr, MOVED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count each digit among the magnitudes that begin with the digits found so far."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROWS)
    prefix = tl.load(found)
    mine = tl.zeros([1 << WIDTH], tl.int32)
    for row in range(tl.minimum((n - first + BLOCK - 1) // BLOCK, ROWS).to(tl.int32)):
        at = first + row * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        size = _magnitude(_values(x, residual, velocity, momentum, scale, at, here, KEPT, MOVED))
        counted = here & ((size.to(tl.int64) >> (SHIFT + WIDTH)) == prefix)
        mine += tl.histogram((size >> SHIFT) & ((1 << WIDTH) - 1), 1 << WIDTH, counted)
    tl.atomic_add(counts + tl.arange(0, 1 << WIDTH), mine, mask=mine > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rank"])
def _descend(counts, found, rank, WIDTH: tl.constexpr):
    """Append the digit of the element with this rank, and add the number of elements with larger digits."""
    digit = (1 << WIDTH) - 1 - tl.arange(0, 1 << WIDTH)
    count = tl.load(counts + digit).to(tl.int64)
    prefix, larger = tl.load(found), tl.load(found + 1)
    before = larger + tl.cumsum(count, 0) - count
    reached = (before < rank) & (before + count >= rank)
    tl.store(found, (prefix << WIDTH) | tl.sum(tl.where(reached, digit, 0).to(tl.int64), 0))
    tl.store(found + 1, tl.sum(tl.where(reached, before, 0), 0))


@triton.jit
def _count(
    x, residual, velocity, momentum, scale, bound, larger, equal, most, n,
    KEPT: tl.constexpr, MOVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number of a block's elements above the bound and equal to it, and its largest magnitude."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    size = _magnitude(_values(x, residual, velocity, momentum, scale, at, here, KEPT, MOVED))
    limit = tl.load(bound)
    tl.store(larger + block, tl.sum((here & (size > limit)).to(tl.int32), 0))
    tl.store(equal + block, tl.sum((here & (size == limit)).to(tl.int32), 0))
    tl.store(most + block, tl.max(size, 0))


@triton.jit(do_not_specialize=["room"])
def _collect(
    x, residual, velocity, momentum, scale, bound, ties, equals, places, indices, values, n, room,
    KEPT: tl.constexpr, MOVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a block's chosen pairs from its place on, if that is in the room.

    ``equals`` has the number of elements in earlier blocks that equal the bound.
    """
    block = tl.program_id(0).to(tl.int64)
    place = tl.load(places + block)
    if place <= room:
        at = block * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        value = _values(x, residual, velocity, momentum, scale, at, here, KEPT, MOVED)
        size, limit = _magnitude(value), tl.load(bound)
        equal = here & (size == limit)
        rank = tl.load(equals + block) + tl.cumsum(equal.to(tl.int32), 0)
        chosen = (here & (size > limit)) | (equal & (rank <= tl.load(ties)))
        to = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(indices + to, at.to(tl.int32), mask=chosen)
        tl.store(values + to, _no_sign_of_zero(value), mask=chosen)


@triton.jit
def _settle(
    x, residual, velocity, momentum, scale, finite, n, MOVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(finite) != 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        moved = _moved(x, velocity, momentum, scale, at, here, MOVED)
        if MOVED:
            tl.store(velocity + at, moved, mask=here)
        tl.store(residual + at, tl.load(residual + at, mask=here, other=0.0) + moved, mask=here)


@triton.jit
def _fade(residual, decay, finite, n, BLOCK: tl.constexpr):
    if tl.load(finite) != 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        here = at < n
        tl.store(residual + at, tl.load(residual + at, mask=here, other=0.0) * decay, mask=here)


@triton.jit(do_not_specialize=["pairs"])
def _clear(array, chosen, finite, pairs, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = (at < pairs) & (tl.load(finite) != 0)
    index = tl.load(chosen + at, mask=here, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(array + index, tl.zeros([TILE], tl.float32), mask=here)


@triton.jit(do_not_specialize=["pairs"])
def _put(indices, values, out, pairs, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = at < pairs
    index = tl.load(indices + at, mask=here, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    value = tl.load(out + index, mask=here, other=0.0) + tl.load(values + at, mask=here, other=0.0)
    tl.store(out + index, value, mask=here)


@triton.jit
def _drawn(n, k, seed, TILE: tl.constexpr):
    """The strata of a program, and the index drawn from each."""
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    seed = seed.to(tl.uint32, bitcast=True)
    first = j * n // k
    return j, first + below(draw(j.to(tl.uint32), seed, other_key(seed)), (j + 1) * n // k - first)


@triton.jit(do_not_specialize=["n", "k", "seed"])
def _sample(
    x, residual, velocity, momentum, scale, out, n, k, seed, KEPT: tl.constexpr, MOVED: tl.constexpr, TILE: tl.constexpr
):
    j, at = _drawn(n, k, seed, TILE)
    tl.store(out + j, _values(x, residual, velocity, momentum, scale, at, j < k, KEPT, MOVED), mask=j < k)


@triton.jit(do_not_specialize=["n", "k", "seed"])
def _take(source, out, finite, n, k, seed, CLEAR: tl.constexpr, TILE: tl.constexpr):
    """Write one element of every stratum, or NaN unless all are finite; with ``CLEAR`` zero it in the source."""
    j, at = _drawn(n, k, seed, TILE)
    right = tl.load(finite) != 0
    value = _no_sign_of_zero(tl.load(source + at, mask=j < k, other=0.0))
    tl.store(out + j, tl.where(right, value.to(tl.int32, bitcast=True), NAN), mask=j < k)
    if CLEAR:
        tl.store(source + at, tl.zeros([TILE], tl.float32), mask=(j < k) & right)


@triton.jit(do_not_specialize=["n", "k", "seed"])
def _spread(values, out, n, k, seed, TILE: tl.constexpr):
    j, at = _drawn(n, k, seed, TILE)
    value = tl.load(out + at, mask=j < k, other=0.0) + tl.load(values + j, mask=j < k, other=0.0)
    tl.store(out + at, value, mask=j < k)


class _Source(NamedTuple):
    """The terms of the values, as kernels take them; a missing array is represented by another one."""

    arrays: tuple[Any, ...]
    elements: int
    which: dict[str, bool]


class _Counts(NamedTuple):
    """Counts of every block: elements above the bound, elements equal to it, and the largest magnitude."""

    larger: torch.Tensor
    equal: torch.Tensor
    most: torch.Tensor

    def finite(self) -> torch.Tensor:
        """Whether all values are finite, as a tensor of one element."""
        return self.most.amax(0, keepdim=True) < NOT_FINITE

    def before(self, ties: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """For each block, the earlier elements that equal the bound, and the earlier ones chosen; both int64.

        ``ties`` limits how many of those that equal the bound are chosen; without it all are.
        """
        equals = self.equal.cumsum(0) - self.equal
        taken = equals if ties is None else torch.minimum(equals, ties)
        return equals, self.larger.cumsum(0) - self.larger + taken


def _source(x: Any, residual: Any = (), velocity: Any = (), momentum: float = 0.0, scale: float = 1.0) -> _Source:
    kept, moved = len(residual) > 0, len(velocity) > 0
    arrays = (x, residual if kept else x, velocity if moved else x, float(momentum), float(scale))
    return _Source(arrays, len(x), {"KEPT": kept, "MOVED": moved})


def _words(like: torch.Tensor, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=like.device)


def _rank_largest(source: _Source, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``rank``-th largest magnitude (1: the largest), and how many are larger: int64 tensors of one element."""
    device = source.arrays[0].device
    found = torch.zeros(2, dtype=torch.int64, device=device)
    for shift, width in _DIGITS:
        counts = torch.zeros(1 << width, dtype=torch.int32, device=device)
        launch(
            _histogram, blocks_of(source.elements, BLOCK * _ROWS), _WARPS, *source.arrays, counts, found,
            source.elements, **source.which, BLOCK=BLOCK, ROWS=_ROWS, SHIFT=shift, WIDTH=width,
        )  # fmt: skip
        launch(_descend, 1, _WARPS, counts, found, rank, WIDTH=width)
    return found[:1], found[1:]


def _counts(source: _Source, bound: torch.Tensor) -> _Counts:
    """The counts of all blocks, at least one."""
    blocks = max(1, blocks_of(source.elements, BLOCK))
    larger, equal, most = (_words(bound, blocks) for _ in range(3))
    launch(
        _count, blocks, _WARPS, *source.arrays, bound, larger, equal, most, source.elements,
        **source.which, BLOCK=BLOCK,
    )  # fmt: skip
    return _Counts(larger, equal, most)


def _collected(
    source: _Source, bound: torch.Tensor, ties: torch.Tensor, before: tuple[torch.Tensor, torch.Tensor],
    size: int, room: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The ``size`` indices and values above ``bound``, with the first ``ties`` that equal it, in order.

    Blocks whose place is beyond the room are left out.
    """
    indices, values = _words(bound, size), _words(bound, size, torch.float32)
    launch(
        _collect, len(before[0]), _WARPS, *source.arrays, bound, ties, *before, indices, values,
        source.elements, room, **source.which, BLOCK=BLOCK,
    )  # fmt: skip
    return indices, values


def choose_exactly(
    x: torch.Tensor, residual: Any, velocity: Any, momentum: float, scale: float, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices and values of the ``k`` largest, and whether all are finite, as a tensor of one element."""
    source = _source(x, residual, velocity, momentum, scale)
    bound, larger = _rank_largest(source, k)
    counts, ties = _counts(source, bound), k - larger
    return *_collected(source, bound, ties, counts.before(ties), k, k), counts.finite()


def choose_reaching(
    x: torch.Tensor, residual: Any, velocity: Any, momentum: float, scale: float, k: int,
    drawn: int, rank: int, room: int, seed: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Like ``choose_exactly`` for the elements that reach the ``rank``-th largest of ``drawn`` random ones.

    With ``drawn`` of 0 these are all elements that are not zero. Returns fewer than ``k`` if fewer reach it. Collects
    from the tensor's start while there is room. Waits for the device.
    """
    source = _source(x, residual, velocity, momentum, scale)
    bound = torch.ones(1, dtype=torch.int64, device=x.device)
    if drawn:
        sampled = _words(x, drawn, torch.float32)
        launch(
            _sample, blocks_of(drawn, _TILE), _WARPS, *source.arrays, sampled, len(x), drawn, signed(seed),
            **source.which, TILE=_TILE,
        )  # fmt: skip
        bound = _rank_largest(_source(sampled), rank)[0].clamp(min=1)
    counts = _counts(source, bound)
    before, finite = counts.before(), counts.finite()
    collected = torch.where(before[1] <= room, counts.larger + counts.equal, 0).sum(0, keepdim=True)
    found, right = torch.cat([collected, finite]).tolist()
    if found > room and not right:
        return choose_exactly(x, residual, velocity, momentum, scale, k)
    all_ties = torch.full_like(bound, len(x))
    indices, values = _collected(source, bound, all_ties, before, found, room)
    if found > k:
        places, values, _ = choose_exactly(values, (), (), 0.0, 1.0, k)
        indices = indices.index_select(0, places)
    return indices, values, finite


def settle(
    x: torch.Tensor, residual: Any, velocity: Any, momentum: float, scale: float, chosen: torch.Tensor, finite: Any
) -> None:
    """Set ``residual`` to the values and ``velocity`` to its new value, both to zero where chosen.

    Does nothing unless ``finite``, a tensor of one element, is true.
    """
    source = _source(x, residual, velocity, momentum, scale)
    moved = source.which["MOVED"]
    launch(_settle, blocks_of(len(x), BLOCK), _WARPS, *source.arrays, finite, len(x), MOVED=moved, BLOCK=BLOCK)
    for array in (residual, velocity) if moved else (residual,):
        launch(_clear, blocks_of(len(chosen), _TILE), _WARPS, array, chosen, finite, len(chosen), TILE=_TILE)


def put(indices: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
    """Add the values to ``out`` at the indices, which must be distinct."""
    launch(_put, blocks_of(len(indices), _TILE), _WARPS, indices, values, out, len(indices), TILE=_TILE)


def take_strata(x: torch.Tensor, residual: Any, decay: float, seed: int, out: torch.Tensor) -> torch.Tensor:
    """Write one element at random from each of ``len(out)`` strata, or NaNs if an element is not finite.

    Returns whether all elements are finite, as a tensor of one element. The residual, unless empty, keeps ``decay``
    times the elements not taken.
    """
    source = _source(x, residual)
    finite = _counts(source, torch.zeros(1, dtype=torch.int64, device=x.device)).finite()
    kept = source.which["KEPT"]
    if kept:
        settle(x, residual, (), 0.0, 1.0, _words(x, 0), finite)
    launch(
        _take, blocks_of(len(out), _TILE), _WARPS, residual if kept else x, out, finite, len(x), len(out), signed(seed),
        CLEAR=kept, TILE=_TILE,
    )  # fmt: skip
    if kept:
        launch(_fade, blocks_of(len(x), BLOCK), _WARPS, residual, decay, finite, len(x), BLOCK=BLOCK)
    return finite


def put_strata(values: torch.Tensor, seed: int, out: torch.Tensor) -> None:
    """Add the values at the elements that ``take_strata`` with the same seed takes."""
    launch(_spread, blocks_of(len(values), _TILE), _WARPS, values, out, len(out), len(values), signed(seed), TILE=_TILE)


_FAULTS = (TOO_MANY, LENGTH, RANGE, ORDER)


@triton.jit(do_not_specialize=["pairs"])
def _write_pairs(indices, values, heads, halves, words, pairs, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = at < pairs
    index = tl.load(indices + at, mask=here, other=0).to(tl.uint32, bitcast=True)
    tl.store(halves + at, (index & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=here)
    tl.store(words + at, tl.load(values + at, mask=here, other=0).to(tl.int32, bitcast=True), mask=here)
    tl.atomic_add(heads + (index >> 16).to(tl.int64), 1, mask=here, sem="relaxed")


def write_pairs(indices: torch.Tensor, values: torch.Tensor, elements: int, out: torch.Tensor) -> int:
    """Write pairs with increasing indices as payload words; return the number of words."""
    stretches, pairs = blocks_of(elements, STRETCH), len(indices)
    first = stretches + (pairs + 1) // 2
    out[:stretches].zero_()
    out[stretches + pairs // 2 : first].zero_()  # the last word of indices, which may have an unused half
    launch(
        _write_pairs, blocks_of(pairs, _TILE), _WARPS, indices, values, out, out[stretches:first].view(torch.int16),
        out[first : first + pairs], pairs, TILE=_TILE,
    )  # fmt: skip
    return first + pairs


def count_pairs(payload: torch.Tensor, elements: int) -> int:
    """The number of pairs that the length of a payload allows, or LENGTH if it allows none; does not wait."""
    rest = len(payload) - blocks_of(elements, STRETCH)
    if rest < 0 or rest % 3 == 1:
        return LENGTH
    return 2 * (rest // 3) + rest % 3 // 2


@triton.jit
def _local(halves, at, here):
    return tl.load(halves + at, mask=here, other=0).to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["elements", "pairs"])
def _read_stretch(heads, begins, halves, indices, faults, elements, pairs, STRETCH: tl.constexpr, TILE: tl.constexpr):
    """Write the indices of a stretch, and a 1 for each fault in the order of ``_FAULTS``."""
    first = tl.program_id(0).to(tl.int64) * STRETCH
    count, begin = tl.load(heads + tl.program_id(0)), tl.load(begins + tl.program_id(0))
    stop = tl.minimum(elements - first, STRETCH)
    if count > stop:
        tl.store(faults, 1)
    rows = ((tl.minimum(count, stop) + TILE - 1) // TILE).to(tl.int32)
    for row in range(rows):
        place = row * TILE + tl.arange(0, TILE)
        at = begin + place
        here = (place < count) & (at < pairs)
        local = _local(halves, at, here)
        before = tl.where(place > 0, _local(halves, at - 1, here & (place > 0)), -1)
        if tl.max((here & (local >= stop)).to(tl.int32), 0) > 0:
            tl.store(faults + 2, 1)
        if tl.max((here & (local <= before)).to(tl.int32), 0) > 0:
            tl.store(faults + 3, 1)
        tl.store(indices + at, (first + local).to(tl.int32), mask=here)


def read_indices(payload: torch.Tensor, elements: int, indices: torch.Tensor) -> int:
    """Read the indices of a payload that ``count_pairs`` accepted; return their number, or a fault.

    Waits for the device.
    """
    stretches, pairs = blocks_of(elements, STRETCH), len(indices)
    heads = payload[:stretches].to(torch.int64) & 0xFFFFFFFF
    faults = torch.zeros(len(_FAULTS), dtype=torch.int32, device=payload.device)
    launch(
        _read_stretch, stretches, _WARPS, heads, heads.cumsum(0) - heads,
        payload[stretches : stretches + (pairs + 1) // 2].view(torch.int16), indices, faults, elements, pairs,
        STRETCH=STRETCH, TILE=_TILE,
    )  # fmt: skip
    faults[1:2] = heads.sum() != pairs
    for found, fault in zip(faults.tolist(), _FAULTS, strict=True):
        if found:
            return fault
    return pairs
