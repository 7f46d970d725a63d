"""The result file of ``syncline bench gradients``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``GradientResult`` and its rows; the rules of ``result_file`` hold here. Does not
know how anything was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .result_file import ResultFile, reader

BARE = "bare"
CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class GradientRow:
    """One form of an iteration's gradient exchange, for the network of one workload, among so many ranks.

    An iteration is ``zero_grad``, a backward pass that computes nothing, and, with several ranks, the exchange, until
    the mean is where the form has it. A repetition's time is that of its slowest rank; ``median_s`` and ``p99_s`` are
    over ``repetitions``. ``added_s`` is the median of what the form takes beyond ``bare``, in which no gradient is
    moved, in the same repetition; ``share = added_s / median_s``. ``passes`` is how often the form reads or writes all
    gradients beside the exchange among so many ranks, ``limit_s`` the time of that at the speed of plain copies by all
    ranks, measured in the same run, and ``of_limit = limit_s / added_s``, None where there is nothing to move; above 1
    the gradients lay in a cache, and it is no limit. ``cpu_s`` is the processor time of all ranks per iteration, which
    other work on the machine changes little, ``sent_bytes`` what a rank's transport counted. ``correct`` is of every
    element on every rank, before the timed repetitions and after the last one. ``error`` says why there are no figures.
    """

    workload: str
    form: str
    ranks: int
    tensors: int
    parameters: int
    bytes: int
    passes: int
    repetitions: int = 0
    median_s: float | None = None
    p99_s: float | None = None
    added_s: float | None = None
    share: float | None = None
    limit_s: float | None = None
    of_limit: float | None = None
    cpu_s: float | None = None
    sent_bytes: float | None = None
    correct: bool | None = None
    error: str | None = None

    @property
    def place(self) -> tuple[str, int]:
        """Rows of one place can be compared, and stand in one table and chart."""
        return self.workload, self.ranks

    @property
    def finished(self) -> bool:
        """True when it was measured without an error and every element was right."""
        return self.error is None and self.median_s is not None and self.correct is True


@dataclass(frozen=True, kw_only=True)
class GradientResult(ResultFile):
    """A whole run: where and with what it was measured, and its rows."""

    verb: ClassVar = "bench gradients"
    lists: ClassVar = {"rows": reader(GradientRow)}

    rows: tuple[GradientRow, ...] = ()


def places(rows: tuple[GradientRow, ...]) -> tuple[tuple[GradientRow, ...], ...]:
    """The rows of each place, everything in the order of the first rows."""
    found: dict[tuple[str, int], list[GradientRow]] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
    return tuple(map(tuple, found.values()))
