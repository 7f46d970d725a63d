"""Pairs of index and value as payload words on a GPU, like ``kernels.pairs``.

    writing   14 bytes for each pair: 8 of index and value read, 6 of payload written, and the counts of stretches
    reading   6 bytes for each pair: the 16-bit indices are read and 32-bit ones written; values stay in the payload

A payload from another process is checked before any of it is used, so reading waits for the device once. If a payload
has several faults, the one reported may differ from the host's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pairs import LENGTH, ORDER, RANGE, STRETCH, TOO_MANY
from .launch import blocks_of, launch

_TILE = 1024
_WARPS = 4
_FAULTS = (TOO_MANY, LENGTH, RANGE, ORDER)


@triton.jit(do_not_specialize=["pairs"])
def _write(indices, values, heads, halves, words, pairs, TILE: tl.constexpr):
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
        _write, blocks_of(pairs, _TILE), _WARPS, indices, values, out, out[stretches:first].view(torch.int16),
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
def _read(heads, begins, halves, indices, faults, elements, pairs, STRETCH: tl.constexpr, TILE: tl.constexpr):
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
        _read, stretches, _WARPS, heads, heads.cumsum(0) - heads,
        payload[stretches : stretches + (pairs + 1) // 2].view(torch.int16), indices, faults, elements, pairs,
        STRETCH=STRETCH, TILE=_TILE,
    )  # fmt: skip
    faults[1:2] = heads.sum() != pairs
    for found, fault in zip(faults.tolist(), _FAULTS, strict=True):
        if found:
            return fault
    return pairs
