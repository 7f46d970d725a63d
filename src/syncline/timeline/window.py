"""Extracts one iteration of a recorded run: between two ends of rank 0's optimizer step, on all processes.

Receives are posted long before data arrive. Here a receive begins when its message's send begins, and it is left out if
that is unknown. Without optimizer steps, as under frameworks that do not report them, or without one that all processes
have recorded, there is no iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.trace import Kind
from .chrome import RecordedRun, is_moment, messages_of, name_of, times_of
from .clocks import offset_of
from .spans import ProcessSpans

_SHOWN: frozenset[Kind] = frozenset(
    {"forward", "backward", "optimizer", "wait", "update", "compute", "reduce", "copy", "advance", "send", "receive"}
)


@dataclass(frozen=True)
class Bar:
    """A bar of a process, in seconds since the iteration's begin. ``kind`` is that of its span."""

    begin_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True)
class Iteration:
    """The ``number``-th of ``count`` iterations of a run, in process order. ``error_s`` bounds the clock error."""

    title: str
    number: int
    count: int
    length_s: float
    processes: tuple[tuple[str, tuple[Bar, ...]], ...]
    error_s: float = 0.0


def middle(run: RecordedRun) -> Iteration | None:
    """An iteration in the middle of a run; None if there is none."""
    if not run.processes:
        return None
    times = [times_of(process) for process in run.processes]
    known_s = min((max(begins, default=0.0) for begins, _ in times), default=0.0)
    first, (_, ends) = run.processes[0], times[0]
    steps = [end for span, end in zip(first.spans, ends, strict=True) if span.kind == "optimizer" and span.end_s]
    steps = [end for end in sorted(steps) if end <= known_s or not any(one.left_out for one in run.processes)]
    if len(steps) < 2:
        return None
    number = len(steps) // 2
    start, stop = steps[number - 1], steps[number]
    coming = _coming(run, [begins for begins, _ in times])
    shown = tuple(
        (name_of(process), _bars(process, begins, ends, start, stop))
        for process, begins, (_, ends) in zip(run.processes, coming, times, strict=True)
    )
    error_s = max(offset_of(process.notes).error_s for process in run.processes)
    return Iteration(run.title, number + 1, len(steps), stop - start, shown, error_s)


def _coming(run: RecordedRun, begins: Sequence[Sequence[float]]) -> list[list[float]]:
    """The begins of spans; for a receive, the begin of its message's send."""
    found = [
        [math.inf if span.kind == "receive" else begin for span, begin in zip(process.spans, times, strict=True)]
        for process, times in zip(run.processes, begins, strict=True)
    ]
    for (sender, send), (receiver, receive) in messages_of(run):
        found[receiver][receive] = max(begins[receiver][receive], begins[sender][send])
    return found


def _bars(
    process: ProcessSpans, begins: Sequence[float], ends: Sequence[float], start: float, stop: float
) -> tuple[Bar, ...]:
    """The bars of a process between two times, clipped to them."""
    return tuple(
        Bar(max(begin, start) - start, min(end, stop) - start, span.kind)
        for span, begin, end in zip(process.spans, begins, ends, strict=True)
        if span.kind in _SHOWN and begin < stop and end > max(start, begin) and not is_moment(process.spans, span)
    )
