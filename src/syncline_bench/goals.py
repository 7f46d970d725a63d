"""The performance goals of Syncline's collectives relative to peers, and their check against the rows of a benchmark.

A goal selects rows, computes one figure for each, and bounds the figure. The worst row decides whether the goal is
reached. Goals apply to ``auto``, the user's default; rows with a codec are the exception, because a codec is never a
default. Most goals are ratios within one run, because ratios carry over between machines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .report.bench import Measured, Verdict
from .report.units import decimal_size, percent, seconds, significant

Figure = Callable[[Measured, Sequence[Measured]], float | None]
"""Computes a figure of a row, given all rows of the same place and size; None if there is no row to compare with."""

_INTEL = ("intelmpi:native",)
_MPI = ("mpi:native", "openmpi:native", "mpich:native", *_INTEL)
_MPI_RING = ("mpi:ring", "openmpi:ring")
_GLOO = ("gloo:native",)
_SLACK = 1.02
"""The factor within which a time counts as no slower."""


def times_faster(*peers: str) -> Figure:
    """The figure "speed relative to the fastest of these peers"."""

    def figure(row: Measured, cell: Sequence[Measured]) -> float | None:
        found = [other.median_s for other in cell if other.contender in peers and other.median_s is not None]
        return None if row.median_s is None or not found else min(found) / row.median_s

    return figure


def times_the_cpu(*peers: str) -> Figure:
    """The figure "processor time per gigabyte relative to the most economical of these peers"."""

    def figure(row: Measured, cell: Sequence[Measured]) -> float | None:
        found = [other.cpu_s_per_gb for other in cell if other.contender in peers and other.cpu_s_per_gb is not None]
        return None if row.cpu_s_per_gb is None or not found else row.cpu_s_per_gb / min(found)

    return figure


def of_limit(row: Measured, cell: Sequence[Measured]) -> float | None:  # noqa: ARG001 - one of the figures
    """The achieved share of the limit (memory bandwidth or a link's goodput)."""
    return row.of_limit


def median(row: Measured, cell: Sequence[Measured]) -> float | None:  # noqa: ARG001 - one of the figures
    """The median time in seconds."""
    return row.median_s


def of_best_fixed(row: Measured, cell: Sequence[Measured]) -> float | None:
    """The time relative to the fastest explicitly chosen algorithm on the same transport."""
    found = [
        other.median_s
        for other in cell
        if other.transport == row.transport and other.algorithm not in ("auto", "native") and other.median_s is not None
    ]
    return None if row.median_s is None or not found else row.median_s / min(found)


@dataclass(frozen=True)
class Goal:
    """One line of the table: ``bound`` applies to ``figure`` of every row of ``contenders`` that ``holds`` selects.

    The bound is a minimum, or a maximum if ``at_most``.
    """

    where: str
    against: str
    contenders: tuple[str, ...]
    figure: Figure
    bound: float
    holds: Callable[[Measured], bool]
    at_most: bool = False
    lab: bool | None = False
    """Whether the goal is about rows in a lab; None for rows inside and outside."""
    write: Callable[[float], str] = lambda value: f"{significant(value)} x"
    per_host: int = 1

    def judge(self, rows: Sequence[Measured]) -> Verdict:
        """The verdict, from the worst of the goal's rows; open if there are none."""
        figures = [(value, row) for row in rows if self._is_about(row) for value in self._values(row, rows)]
        goal = f"{self.where}: {'at most' if self.at_most else 'at least'} {self.write(self.bound)} {self.against}"
        if not figures:
            return Verdict(goal)
        value, row = (max if self.at_most else min)(figures, key=lambda found: found[0])
        reached = value <= self.bound if self.at_most else value >= self.bound
        at = f"{row.contender}, {row.ranks} ranks, {decimal_size(row.bytes)}"
        return Verdict(goal, self.write(value), at, reached)

    def _is_about(self, row: Measured) -> bool:
        in_lab = row.lab_bit_per_s is not None
        return (
            row.contender in self.contenders
            and row.per_host == self.per_host
            and row.collective == "allreduce"
            and self.lab in (None, in_lab)
            and self.holds(row)
        )

    def _values(self, row: Measured, rows: Sequence[Measured]) -> list[float]:
        value = self.figure(row, [other for other in rows if (other.place, other.bytes) == (row.place, row.bytes)])
        return [] if value is None else [value]


def _from(nbytes: float, to: float = float("inf")) -> Callable[[Measured], bool]:
    return lambda row: nbytes <= row.bytes <= to


_SHM, _TCP = ("shm:auto",), ("tcp:auto",)
TWO_LEVELS, ONE_LEVEL = "auto:hierarchical codec=int8", "auto:direct codec=int8"
"""An int8 allreduce on two levels and on one, measured on hosts of two ranks, at ``TWO_LEVELS_BYTES``."""

TWO_LEVELS_BYTES = 33_600_000

GOALS = (
    Goal("shm, 16 MB and more", "faster than Intel MPI's allreduce", _SHM, times_faster(*_INTEL), 3.1, _from(16e6)),
    Goal("shm, 4 MB and more", "faster than the best MPI_Allreduce", _SHM, times_faster(*_MPI), 1.4, _from(4e6)),
    Goal("shm, 1 MB", "faster than the best MPI_Allreduce", _SHM, times_faster(*_MPI), 2.0, _from(1e6, 1e6)),
    Goal("shm, 4 MB and more", "faster than a ring on mpi4py", _SHM, times_faster(*_MPI_RING), 1.4, _from(4e6)),
    Goal("shm, 16 MB and more", "of the memory bandwidth", _SHM, of_limit, 0.8, _from(16e6), write=percent),
    Goal("shm, up to 64 KB", "faster than Gloo", _SHM, times_faster(*_GLOO), 25.0, _from(0, 64e3)),
    *(
        Goal(
            f"shm, 1 KB, {ranks} ranks",
            "a call",
            _SHM,
            median,
            most_s,
            lambda row, ranks=ranks: row.bytes <= 1_000 and row.ranks == ranks,  # type: ignore[misc]
            at_most=True,
            write=seconds,
        )
        for ranks, most_s in ((2, 20e-6), (4, 120e-6))
    ),
    Goal("tcp loopback, 1 MB and more", "faster than Gloo", _TCP, times_faster(*_GLOO), 2.0, _from(1e6)),
    Goal("tcp loopback, up to 64 KB", "faster than Gloo", _TCP, times_faster(*_GLOO), 6.0, _from(0, 64e3)),
    Goal("lab, 16 MB and more", "of the goodput by iperf3", _TCP, of_limit, 0.98, _from(16e6), lab=True, write=percent),
    Goal(
        "lab, every size",
        "the speed of Gloo and MPI over TCP",
        _TCP,
        times_faster(*_GLOO, *_MPI, *_MPI_RING),
        1 / _SLACK,
        _from(0),
        lab=True,
    ),
    Goal(
        "lab, 2 hosts of 2 ranks, int8 on two levels",
        "faster than on one",
        (TWO_LEVELS,),
        times_faster(ONE_LEVEL),
        1.3,
        _from(16e6),
        lab=True,
        per_host=2,
    ),
    Goal("tcp, everywhere", "Gloo's CPU s/GB", _TCP, times_the_cpu(*_GLOO), 1.0, _from(0), at_most=True, lab=None),
    Goal(
        "auto, everywhere",
        "the time of the best fixed algorithm",
        (*_SHM, *_TCP),
        of_best_fixed,
        1.1,
        _from(0),
        at_most=True,
        lab=None,
    ),
)
"""The table of goals, in print order."""


def judge(rows: Sequence[Measured]) -> tuple[Verdict, ...]:
    """The verdict on every goal, in the order of ``GOALS``."""
    return tuple(goal.judge(rows) for goal in GOALS)
