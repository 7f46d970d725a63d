"""The four collectives: bandwidth factors, least traffic, inputs and expected results.

Pure; knows neither contenders nor processes. Sizes are as in nccl-tests: ``bytes`` is the whole array, with which a
reduce-scatter begins and an all-gather ends on every rank. ``algbw = bytes / time``, and ``busbw = algbw x factor`` is
the least rate at which a link has to carry data, so it can be compared with the hardware.

Least traffic, N ranks and n bytes. *Link*: every rank sends and receives ``2(N-1)/N n`` in an allreduce and half of it
in its halves; in a broadcast every rank but the root receives n. *Memory*, when all ranks can read and write each
other's arrays: an allreduce in one pass reads N arrays and writes N, ``2Nn``; a reduce-scatter reads the same and
writes one array in all, ``(N+1)n``; an all-gather and a broadcast read one array in all and write N-1, ``Nn``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

Array = NDArray[np.float32]

ITEM_BYTES: Final = 4
_PERIOD: Final = 65537
"""The length after which inputs repeat: a prime, so that no part of a power of two looks like its neighbour."""
_BLOCK: Final = 16 * _PERIOD


@dataclass(frozen=True)
class Collective:
    """A collective and its arithmetic. ``equal_parts``: its input or its result is one part of the array per rank."""

    name: str
    equal_parts: bool

    def bus_factor(self, ranks: int) -> float:
        """The ratio of ``busbw`` to ``algbw``."""
        if self.name == "broadcast":
            return 1.0
        half = (ranks - 1) / ranks
        return half if self.equal_parts else 2 * half

    def link_bytes(self, ranks: int, nbytes: int) -> float:
        """The bytes that the busiest rank has to send or receive at least."""
        return self.bus_factor(ranks) * nbytes

    def memory_bytes(self, ranks: int, nbytes: int) -> int:
        """The bytes that all ranks together have to read and write at least, in each other's memory."""
        return {"allreduce": 2 * ranks, "reduce-scatter": ranks + 1}.get(self.name, ranks) * nbytes

    def elements(self, ranks: int, nbytes: int) -> int:
        """The number of elements in an array of ``nbytes``, rounded up to equal parts if the collective needs them.

        Some libraries accept only equal parts, so every contender gets the same rounded array.
        """
        count = nbytes // ITEM_BYTES
        return -(-count // ranks) * ranks if self.equal_parts else count

    def fill(self, array: Array, rank: int, ranks: int, seed: int) -> None:
        """Write this rank's input: integers that differ by element, rank and seed, with exact sums."""
        if self.name == "all-gather":
            array.fill(-1.0)
            part = array.size // ranks
            _write(array[rank * part : (rank + 1) * part], rank * part, seed + rank)
        else:
            _write(array, 0, seed + rank)

    def is_right(self, result: Array, rank: int, ranks: int, seed: int) -> bool:
        """Whether every element of this rank's result is right."""
        if self.name == "broadcast":
            return _equals(result, 0, 1, seed)
        if self.name == "all-gather":
            part = result.size // ranks
            parts = (result[peer * part : (peer + 1) * part] for peer in range(ranks))
            return all(_equals(mine, peer * part, 1, seed + peer) for peer, mine in enumerate(parts))
        first = rank * result.size if self.name == "reduce-scatter" else 0
        return _equals(result, first, ranks, ranks * seed + ranks * (ranks - 1) // 2)


COLLECTIVES: Final = {
    kind.name: kind
    for kind in (
        Collective("allreduce", equal_parts=False),
        Collective("reduce-scatter", equal_parts=True),
        Collective("all-gather", equal_parts=True),
        Collective("broadcast", equal_parts=False),
    )
}


def collective(name: str) -> Collective:
    """The collective with this name. Raises UsageError with the nearest known name."""
    if name not in COLLECTIVES:
        hint = nearest(name, COLLECTIVES) or "; there are " + ", ".join(COLLECTIVES)
        raise UsageError(f"unknown collective {name!r}{hint}")
    return COLLECTIVES[name]


def _write(array: Array, first: int, shift: int) -> None:
    """Set ``array[i] = pattern(first + i) + shift``, block by block, without a second array."""
    for at, base in _blocks(array.size, first):
        np.add(base, np.float32(shift), out=array[at : at + base.size])


def _equals(array: Array, first: int, factor: int, shift: int) -> bool:
    """Whether ``array[i] == factor * pattern(first + i) + shift`` everywhere. Exact while the values are below 2^24."""
    return all(
        np.array_equal(array[at : at + base.size], base * np.float32(factor) + np.float32(shift))
        for at, base in _blocks(array.size, first)
    )


def _blocks(size: int, first: int) -> list[tuple[int, Array]]:
    base = _pattern()
    found = []
    at = 0
    while at < size:
        start = (first + at) % _BLOCK
        block = base[start : start + min(size - at, _BLOCK - start)]
        found.append((at, block))
        at += block.size
    return found


def _pattern() -> Array:
    global _base
    if not _base.size:
        _base = (np.arange(_BLOCK, dtype=np.int64) * 7919 % _PERIOD).astype(np.float32)
    return _base


_base: Array = np.empty(0, np.float32)
