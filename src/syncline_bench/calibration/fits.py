"""Fits constants to repeated measurements: piecewise lines, confidence intervals and outliers.

Pure arithmetic; knows neither messages nor clocks. A measurement is a weighted sum of constants, one row of a matrix.
All residuals are relative, because times range from microseconds to seconds. No constant is negative.

Theory. A row counts by the median of its samples without outliers, which have a modified z-score above 3.5 (Iglewicz
and Hoaglin, "How to detect and handle outliers", 1993). The fit is by least squares; each residual is divided by
the standard error of the row's median, or by ``TOLERANCE`` if that is larger. The 95 % intervals are bootstrapped
(Efron and Tibshirani, "An introduction to the bootstrap", 1993): every row is resampled from its own samples, and the
residuals of the model are resampled from all rows. The intervals therefore cover both noise and a model that does not
fit. The number of pieces minimizes the Schwarz criterion (Annals of Statistics 6, 1978): the sum of squares, plus
ln(rows) for each parameter. Each piece after the first adds three parameters: two constants and its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TOLERANCE = 0.05
"""The relative error that a line may have at a size without a need for another piece."""

_FAR = 3.5
_NORMAL = 0.6745
"""The median distance from the median of a normal distribution, in standard deviations."""

_LEAST_SPREAD = 0.01
"""The least relative spread. In samples that agree better, a tiny difference would make an outlier."""

_FEWEST = 5
"""Fewer samples have no outliers."""

_RESAMPLES = 300
_ENDS = (2.5, 97.5)
_MOST_PIECES = 3
_SIZES_PER_PIECE = 3
_PER_PIECE = 3


@dataclass(frozen=True)
class Estimate:
    """A constant, its interval, and the numbers of samples (outliers excluded) and of outliers."""

    value: float
    low: float
    high: float
    samples: int
    outliers: int = 0


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity."""

    every: tuple[float, ...]

    @cached_property
    def kept(self) -> Floats:
        """The samples without outliers."""
        return self._split[0]

    @cached_property
    def far(self) -> Floats:
        """The outliers, which no figure counts."""
        return self._split[1]

    @cached_property
    def median(self) -> float:
        """The median of the samples without outliers."""
        return float(np.median(self.kept))

    @cached_property
    def spread(self) -> float:
        """The standard error of the median, relative to the median."""
        distance = float(np.median(np.abs(self.kept - self.median)))
        # 1.2533: the standard error of the median over that of the mean, for a normal distribution.
        return 1.2533 * distance / _NORMAL / math.sqrt(len(self.kept)) / self.median if self.median else 0.0

    def medians(self, random: np.random.Generator, count: int) -> Floats:
        """The medians of ``count`` bootstrap samples."""
        drawn = random.choice(self.kept, (count, len(self.kept)))
        found: Floats = np.median(drawn, axis=1)
        return found

    @property
    def estimate(self) -> Estimate:
        """The median with its interval."""
        low, high = np.percentile(self.medians(np.random.default_rng(0), _RESAMPLES), _ENDS)
        return Estimate(
            self.median, min(float(low), self.median), max(float(high), self.median), len(self.kept), len(self.far)
        )

    @cached_property
    def _split(self) -> tuple[Floats, Floats]:
        values = np.array(self.every, np.float64)
        middle = float(np.median(values))
        distance = np.abs(values - middle)
        spread = max(float(np.median(distance)), _LEAST_SPREAD * abs(middle))
        far = _NORMAL * distance > _FAR * spread if len(values) >= _FEWEST else np.zeros(len(values), bool)
        return values[~far], values[far]


@dataclass(frozen=True)
class Row:
    """A measurement; the model is the sum of its ``amounts`` times the constants of these names."""

    amounts: Mapping[str, float]
    samples: Samples


def fit(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Fit the constants to the rows, with intervals. Returns them by name."""
    table = _Table(rows)
    values = table.nearest(table.medians)
    expected = table.amounts @ values
    misfits = table.medians / expected - 1
    free = max(1, len(rows) - int(np.count_nonzero(values)))
    unexplained = misfits / table.worth * math.sqrt(len(rows) / free)
    random = np.random.default_rng(0)
    noise = np.stack([row.samples.medians(random, _RESAMPLES) / row.samples.median for row in rows])
    lines = 1 + random.choice(unexplained, noise.shape) * table.worth[:, None]
    again = noise * expected[:, None] * np.maximum(0.1, lines)
    ends = np.percentile(np.stack([table.nearest(column) for column in again.T]), _ENDS, axis=0)
    found = {}
    for place, name in enumerate(table.names):
        of = [row.samples for row in rows if row.amounts.get(name)]
        counts = sum(len(samples.kept) for samples in of), sum(len(samples.far) for samples in of)
        value = float(values[place])
        found[name] = Estimate(value, min(float(ends[0, place]), value), max(float(ends[1, place]), value), *counts)
    return found


def pieces(sizes: Sequence[int], rows_of: Callable[[Sequence[int]], Sequence[Row]]) -> tuple[int, ...]:
    """The sizes, ascending, at which the pieces begin; the first piece begins at 0.

    ``rows_of`` returns the measurements as sums of the constants of pieces with these starts.
    """
    return min(_starts(sizes), key=lambda starts: _criterion(rows_of(starts), len(starts)))


def _starts(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All partitions into at most ``_MOST_PIECES`` pieces of enough sizes each; the fewest pieces first."""
    for cuts in range(_MOST_PIECES):
        for places in combinations(range(len(sizes)), cuts):
            ends = (0, *places, len(sizes))
            if not cuts or all(stop - start >= _SIZES_PER_PIECE for start, stop in pairwise(ends)):
                yield (0, *(sizes[place] for place in places))


def _criterion(rows: Sequence[Row], count: int) -> float:
    table = _Table(rows)
    misfits = table.amounts @ table.nearest(table.medians) / table.medians - 1
    return float(np.square(misfits / table.worth).sum()) + _PER_PIECE * (count - 1) * math.log(len(rows))


class _Table:
    """Rows as a matrix; ``worth`` is the relative accuracy of each."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.names = list(dict.fromkeys(name for row in rows for name in row.amounts))
        table = [[row.amounts.get(name, 0.0) for name in self.names] for row in rows]
        self.amounts: Floats = np.array(table, np.float64)
        self.medians: Floats = np.array([row.samples.median for row in rows], np.float64)
        self.worth: Floats = np.array([max(TOLERANCE, row.samples.spread) for row in rows], np.float64)

    def nearest(self, times: Floats) -> Floats:
        """The least-squares constants of the rows for these times, none negative.

        A constant that noise would make negative is 0, and the others are fitted without it.
        """
        rows = self.amounts / (times * self.worth)[:, None]
        scale = np.linalg.norm(rows, axis=0)
        rows = rows / np.where(scale > 0, scale, 1.0)
        used, found = scale > 0, np.zeros(len(self.names))
        while used.any():
            found[:] = 0.0
            found[used] = np.linalg.lstsq(rows[:, used], 1 / self.worth, rcond=None)[0]
            if found.min() >= 0:
                break
            used[int(np.argmin(found))] = False
        values: Floats = np.maximum(found, 0.0) / np.where(scale > 0, scale, 1.0)
        return values
