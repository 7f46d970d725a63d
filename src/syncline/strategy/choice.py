"""Selects the algorithm for each array size, from measured times.

It defines ``Choice``, the table that ``architecture=auto`` runs, and ``choose``, which computes it. Both are pure:
``tuning`` measures, broadcasts and stores.

Theory. For one algorithm and group time(n) = A + B n (``costs.plans``), so of two algorithms one is faster below some
size and the other above it: few messages suit small arrays, few bytes suit large ones. Real transports add jumps (a
message that no longer fits a frame, a full cache), so the table follows measured points. Between two sizes, time is
interpolated linearly on logarithmic axes, which is exact where either A or B n dominates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import UsageError
from ..nouns import Size
from .grammar import write_value

MARGIN = 0.08
"""How much slower than the fastest a preferred algorithm may be, so that noise does not decide."""

MARGIN_LARGE = 0.25
LARGE_BYTES = 512 * 1024
"""The margin for large arrays, where algorithms with equal bytes differ by noise and by the buffers of links."""

BEYOND = 1.5
"""How much slower the first algorithm may be at the largest size and still be chosen from twice that size on."""

_GRAIN_BYTES = 1024
_PER_OCTAVE = 8


@dataclass(frozen=True)
class Choice:
    """A table from sizes to algorithms: (first size in bytes, name), sizes ascending from 0.

    Raises UsageError for an invalid table, as it may come from a file.
    """

    table: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.table]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise UsageError(f"a table of algorithms begins at size 0 and its sizes ascend, got sizes {starts}")

    @classmethod
    def read(cls, table: Any) -> Choice:
        """Parse ``[[0, "tree"], [65536, "ring"]]``, as JSON returns it. Raises UsageError for anything else."""
        try:
            rows = tuple((start, name) for start, name in table)
        except (TypeError, ValueError):
            raise UsageError(f"a table of algorithms has rows of a size and a name, got {table!r}") from None
        if not all(type(start) is int and isinstance(name, str) for start, name in rows):
            raise UsageError(f"a table of algorithms has rows of a size and a name, got {table!r}")
        return cls(rows)

    def at(self, nbytes: int) -> str:
        """The algorithm for an array of that size."""
        return self.table[bisect_right(self.table, nbytes, key=lambda row: row[0]) - 1][1]

    def until(self, nbytes: int, name: str) -> Choice:
        """The same table below ``nbytes``, and the algorithm ``name`` from that size on."""
        kept = tuple(row for row in self.table if row[0] < nbytes)
        return Choice(kept if kept[-1][1] == name else (*kept, (nbytes, name)))

    @property
    def names(self) -> frozenset[str]:
        """All algorithms in the table."""
        return frozenset(name for _, name in self.table)

    def __str__(self) -> str:
        """In words: ``tree below 64KiB, ring``."""
        ranges = [f"{name} below {write_value(end, Size)}" for (_, name), (end, _) in pairwise(self.table)]
        return ", ".join([*ranges, self.table[-1][1]])


def time_at(sizes: Sequence[int], times_s: Sequence[float], nbytes: float) -> float:
    """The seconds at ``nbytes``, interpolated between measured points; outside of them, the nearest point's.

    Outside only the ratio between algorithms matters, and there the winner of the nearest point stays.
    """
    return math.exp(float(np.interp(math.log(nbytes), np.log(sizes), np.log(times_s))))


def choose(
    sizes: Sequence[int],
    times_s: Mapping[str, Sequence[float]],
    margins: tuple[float, float] = (MARGIN, MARGIN_LARGE),
) -> Choice:
    """The table that selects the fastest algorithm at every size, within a margin (one for small, one for large).

    ``sizes`` ascend; ``times_s`` has one time per size and algorithm. Among algorithms within the margin of the
    fastest, the first one of all wins, then the winner of the next smaller size, then any other. The first one is known
    to be good on such machines and stays unless measurements clearly favour another. It also stays for arrays far
    larger than measured ones unless it loses clearly: those will no longer fit the cache.
    """
    first = next(iter(times_s))
    table: list[tuple[int, str]] = []
    for nbytes in _grid(sizes):
        now = {name: time_at(sizes, found, nbytes) for name, found in times_s.items()}
        best = min(now, key=now.__getitem__)
        preferred = [first, *(name for _, name in table[-1:]), best]
        margin = margins[nbytes >= LARGE_BYTES]
        chosen = next(name for name in preferred if now[name] <= now[best] * (1 + margin))
        if not table or chosen != table[-1][1]:
            table.append((nbytes if table else 0, chosen))
    winner = table[-1][1]
    if winner != first and times_s[first][-1] <= times_s[winner][-1] * BEYOND:
        table.append((2 * sizes[-1], first))
    return Choice(tuple(table))


def _grid(sizes: Sequence[int]) -> list[int]:
    """Sizes at which the algorithm may change: the measured ones, and some in between, in whole KiB where large."""
    octaves = math.log2(sizes[-1] / sizes[0])
    between = np.geomspace(sizes[0], sizes[-1], max(2, round(octaves * _PER_OCTAVE) + 1))
    rounded = {_GRAIN_BYTES * round(nbytes / _GRAIN_BYTES) for nbytes in between.tolist()}
    return sorted({*sizes, *(nbytes for nbytes in rounded if sizes[0] < nbytes < sizes[-1])})
