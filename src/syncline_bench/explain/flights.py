"""Explains a flight record: who is to blame for its end, and which rank came late to the operations before.

A record has the begins and ends of whole operations and no stages, so a rank that is late may compute or load longer.
Clocks of several hosts are not compared: there only the end is explained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, median_low

from syncline.timeline.flight import FlightRecord, ProcessFlight, load
from syncline.wire.meeting import printable

from ..report import units
from ..report.explanation import Cause, Explanation
from .causes import LEAST

_LEAST_STEPS = 3


def explain_flight(path: Path) -> Explanation:
    """The explanation of a flight record. Raises UsageError for a damaged file, or another version's."""
    record = load(path)
    steps = _begins(record)
    step_s = median(after - before for before, after in pairwise(_firsts(steps))) if len(steps) > 1 else None
    late = () if step_s is None else sorted(_late(record, steps, step_s), key=lambda cause: -cause.seconds)
    return Explanation(
        file=path.name,
        kind="flight record",
        iteration_s=step_s,
        iterations=max(0, len(steps) - 1),
        workers=record.workers,
        causes=(_end(record), *late),
        remarks=tuple(map(_line, record.unread)),
    )


def _line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _end(record: FlightRecord) -> Cause:
    """The verdict on the end of the run."""
    fault = next((part.fault for part in record.parts if part.process in record.culprits), None)
    where = f"look at {_line(fault.place)}" if fault is not None and fault.place else "look at the log of that process"
    return Cause(
        "failure", 0.0,
        rank=record.culprits[0] if record.culprits else None,
        said=_line(record.verdict).rstrip("."),
        remedy=f"{where}; syncline flight shows all processes",
    )  # fmt: skip


Begins = list[list[float]]
"""When each worker began the operations of a step, on the wall clock: a row for each operation."""


def _begins(record: FlightRecord) -> list[Begins]:
    """The operations of each step that all workers have begun; none if the workers are on several hosts."""
    workers = [part for part in record.parts if part.process < record.workers]
    if len(workers) < max(2, record.workers) or len({_host(part) for part in workers}) > 1:
        return []
    begun: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for part in workers:
        for one in part.operations:
            if one.step >= 0:
                begun[one.step, one.key, one.turn][part.process] = one.begin_s + part.wall_s
    found: dict[int, Begins] = defaultdict(list)
    for (step, *_), times in sorted(begun.items()):
        if len(times) == len(workers):
            found[step].append([times[part.process] for part in workers])
    return [found[step] for step in sorted(found)]


def _host(part: ProcessFlight) -> str:
    return part.name.partition("(")[2].partition(",")[0].rstrip(")")


def _firsts(steps: Sequence[Begins]) -> list[float]:
    return [min(min(row) for row in rows) for rows in steps]


def _late(record: FlightRecord, steps: Sequence[Begins], step_s: float) -> Iterator[Cause]:
    """The ranks that begin some operation of the median step late."""
    for place in range(record.workers if len(steps) >= _LEAST_STEPS else 0):
        late_s = median(max(row[place] - median_low(row) for row in rows) for rows in steps)
        if late_s >= LEAST * step_s:
            yield Cause(
                "slow_rank", late_s, rank=place,
                said=f"rank {place} begins its exchanges {units.seconds(late_s)} after the median rank",
                remedy=f"record a timeline (--trace), which tells what rank {place} does before",
            )  # fmt: skip
