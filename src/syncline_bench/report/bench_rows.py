"""The result file of ``syncline bench``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``BenchResult`` and its rows. Does not know how they were measured or how they are
shown. The rules of ``result_file`` hold here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from .result_file import ResultFile, reader


@dataclass(frozen=True)
class Measured:
    """One contender at one size among so many ranks.

    ``transport`` and ``algorithm`` are the words asked for; ``chosen`` is what ran where they left that open, or the
    library and its version. ``bytes`` is the whole array. A repetition's time is that of its slowest rank; ``median_s``
    and ``p99_s`` are over ``repetitions``. ``algbw`` and ``busbw`` are as in nccl-tests, from the median.
    ``cpu_s_per_gb`` counts the processor time of all ranks, user and kernel, per 10^9 bytes of the array.
    ``limit_s`` is the least time that the limit named by ``limit`` (``memory`` or ``link``) allows, measured in the
    same run, and ``of_limit = limit_s / median_s``. ``correct`` is of every element on every rank, before and after the
    timed repetitions. ``memory_bytes`` is the growth of a rank's proportional set size, array included, measured at
    the greatest size in processes that run nothing else. ``lab_bit_per_s`` is the rate of the lab's links, None on the
    machine itself; a host of the lab has ``per_host`` of the ranks. ``error`` says why there are no figures.
    """

    transport: str
    algorithm: str
    ranks: int
    bytes: int
    collective: str = "allreduce"
    lab_bit_per_s: float | None = None
    per_host: int = 1
    chosen: str | None = None
    repetitions: int = 0
    median_s: float | None = None
    p99_s: float | None = None
    algbw_bytes_per_s: float | None = None
    busbw_bytes_per_s: float | None = None
    cpu_s_per_gb: float | None = None
    limit: str | None = None
    limit_s: float | None = None
    of_limit: float | None = None
    correct: bool | None = None
    memory_bytes: int | None = None
    missing: bool = False
    """True when its library is not installed here: then it has an error and is no failure."""
    error: str | None = None

    @property
    def contender(self) -> str:
        """The name by which it was asked for."""
        return f"{self.transport}:{self.algorithm}"

    @property
    def place(self) -> tuple[str, float | None, int, int]:
        """Rows of one place (collective, lab, ranks and those of a host) can be compared: one table and chart each."""
        return self.collective, self.lab_bit_per_s, self.ranks, self.per_host

    @property
    def key(self) -> tuple[str, float | None, int, int, int, str]:
        """What makes two rows the same measurement."""
        return (*self.place, self.bytes, self.contender)

    @property
    def finished(self) -> bool:
        """True when it was measured without an error and every element was right."""
        return self.error is None and self.median_s is not None and self.correct is True


@dataclass(frozen=True, kw_only=True)
class BenchResult(ResultFile):
    """A whole bench."""

    verb: ClassVar = "bench"
    lists: ClassVar = {"rows": reader(Measured)}

    rows: tuple[Measured, ...] = field(default=())

    def with_rows(self, rows: tuple[Measured, ...]) -> BenchResult:
        """This result with more rows; those that measure the same are replaced."""
        fresh = {row.key for row in rows}
        return dataclasses.replace(self, rows=(*(row for row in self.rows if row.key not in fresh), *rows))

    def same_origin(self, other: BenchResult) -> bool:
        """Whether both are of the same machine, versions and code."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("machine", "cores", "versions", "commit", "source_sha256")
        )


def places(rows: tuple[Measured, ...]) -> tuple[tuple[Measured, ...], ...]:
    """The rows of each place, places and contenders in the order of their first row, sizes rising."""
    found: dict[tuple[str, float | None, int, int], list[Measured]] = {}
    order: dict[str, int] = {}
    for row in rows:
        found.setdefault(row.place, []).append(row)
        order.setdefault(row.contender, len(order))
    return tuple(tuple(sorted(part, key=lambda row: (row.bytes, order[row.contender]))) for part in found.values())
