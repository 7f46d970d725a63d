"""Which algorithm for which size: a table, and how it follows from measured times.

Owns ``Choice``, what ``architecture=auto`` runs, and ``choose``. Pure: who measures, tells and keeps it is ``tuning``'s
business.

Theory. For one algorithm and group time(n) = A + B n (``costs.network``), so that of two algorithms one is faster
below some size and the other above it; one with few messages is for small arrays, one with few bytes for large ones.
The times of real transports have steps in addition (a message that no longer fits into a frame, a cache that is full),
therefore the table follows measured points. Between two sizes, time is a straight line on logarithmic axes: exact where
either A or B n decides alone.
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
"""How much slower than the fastest a preferred algorithm may be: noise shall not choose."""

MARGIN_LARGE = 0.25
LARGE_BYTES = 512 * 1024
"""The same from this size on: there algorithms that move the same bytes differ by noise and by what links buffer."""

BEYOND = 1.5
"""How much slower at the greatest size the first algorithm may be and still be taken for twice that size and more."""

_GRAIN_BYTES = 1024
_PER_OCTAVE = 8


@dataclass(frozen=True)
class Choice:
    """A table from sizes to algorithms: (first size in bytes, name), sizes ascending from 0.

    Raises UsageError for a table that is none: it may come from a file.
    """

    table: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.table]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise UsageError(f"a table of algorithms begins at size 0 and its sizes ascend, got sizes {starts}")

    @classmethod
    def read(cls, table: Any) -> Choice:
        """From ``[[0, "tree"], [65536, "ring"]]``, as JSON gives it back; raises UsageError for anything else."""
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
        """The same table below ``nbytes``, and the algorithm ``name`` from there on."""
        kept = tuple(row for row in self.table if row[0] < nbytes)
        return Choice(kept if kept[-1][1] == name else (*kept, (nbytes, name)))

    @property
    def names(self) -> frozenset[str]:
        """All algorithms in it."""
        return frozenset(name for _, name in self.table)

    def __str__(self) -> str:
        """In words: ``tree below 64KiB, ring``."""
        ranges = [f"{name} below {write_value(end, Size)}" for (_, name), (end, _) in pairwise(self.table)]
        return ", ".join([*ranges, self.table[-1][1]])


def time_at(sizes: Sequence[int], times_s: Sequence[float], nbytes: float) -> float:
    """Seconds at ``nbytes`` between measured points; outside of them, those of the nearest.

    Only ratios between algorithms matter outside, and there the winner of the nearest point stays.
    """
    return math.exp(float(np.interp(math.log(nbytes), np.log(sizes), np.log(times_s))))


def choose(
    sizes: Sequence[int],
    times_s: Mapping[str, Sequence[float]],
    margins: tuple[float, float] = (MARGIN, MARGIN_LARGE),
) -> Choice:
    """The table that takes the fastest algorithm at every size, give or take a margin (for small and large arrays).

    ``sizes`` ascend, ``times_s`` has one time per size and algorithm. Where several are within the margin of the
    fastest, the first of all goes before that of the next smaller size, and that before the others: the first is what
    is known to be good on such machines, so let it stand where measuring says nothing else clearly. For arrays that are
    much larger than what was measured that takes more than for others: what fitted the cache will not.
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
    """Sizes at which another algorithm may begin: the measured ones, and some between them, whole KiB where larger."""
    octaves = math.log2(sizes[-1] / sizes[0])
    between = np.geomspace(sizes[0], sizes[-1], max(2, round(octaves * _PER_OCTAVE) + 1))
    rounded = {_GRAIN_BYTES * round(nbytes / _GRAIN_BYTES) for nbytes in between.tolist()}
    return sorted({*sizes, *(nbytes for nbytes in rounded if sizes[0] < nbytes < sizes[-1])})
