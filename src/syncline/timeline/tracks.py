"""Assigns spans to the lines of a timeline: one per thread, and lines in which spans of one kind alternate.

The spans of a thread are nested. Exchanges and messages in flight are not: such a line has one of them at a time, with
its nested spans, and there are as many lines as are in flight at once. Whichever thread drives the exchange does its
work, one at a time, on a line of its own. If that is the training thread, the latter's own line shows a wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.trace import Kind
from .spans import TRAINING, TimedSpan

_COMPUTE: frozenset[Kind] = frozenset({"forward", "backward", "optimizer"})
_DRIVEN: frozenset[Kind] = frozenset({"reduce", "copy", "advance", "compute"})
_NAMES: dict[Kind, tuple[int, str]] = {
    "work": (3, "exchanges"),
    "run": (3, "exchanges"),
    "staging": (4, "copies from the device"),
    "send": (5, "sends"),
    "receive": (6, "receives"),
}


@dataclass(frozen=True, order=True)
class Line:
    """A line of a process: its position, its name, and its number among lines of that name."""

    order: int
    name: str
    number: int = 0

    @property
    def title(self) -> str:
        """The title in a viewer."""
        return self.name if not self.number else f"{self.name} ({self.number + 1})"


def lines_of(spans: Sequence[TimedSpan], ends: Sequence[float]) -> list[Line | None]:
    """The line of each span, whose end is given separately; None for spans that are not shown.

    Spans of one line are nested or disjoint.
    """
    found: list[Line | None] = [None] * len(spans)
    open_in: dict[Line, list[int]] = {}  # per line, the open spans
    for place in sorted(range(len(spans)), key=lambda place: (spans[place].begin_s, -ends[place], place)):
        span, first = spans[place], _first_line(spans, place)
        if first is None:
            continue
        around = found[span.within] if span.within >= 0 else None
        tried = [around] if around is not None and around.name == first.name else []
        tried += [line for line in open_in if line.name == first.name and line not in tried]
        line = next((line for line in tried if _fits(open_in[line], spans, ends, place)), None)
        if line is None:
            line = Line(first.order, first.name, sum(known.name == first.name for known in open_in))
        open_in.setdefault(line, []).append(place)
        found[place] = line
    return found


def _first_line(spans: Sequence[TimedSpan], place: int) -> Line | None:
    span = spans[place]
    if span.kind == "work" and span.key < 0:
        return None  # a message, which is shown, or a mere order
    if span.kind in ("send", "receive") and is_moment(spans, span):
        return Line(2, "memory")
    if span.kind in _NAMES:
        return Line(*_NAMES[span.kind])
    if span.kind in _DRIVEN:
        return Line(2, "memory")
    return Line(0, TRAINING) if span.kind in _COMPUTE or span.thread == TRAINING else Line(1, span.thread)


def is_moment(spans: Sequence[TimedSpan], span: TimedSpan) -> bool:
    """Whether a span has no duration: work of compiled code, which is reported after the call."""
    return span.within >= 0 and spans[span.within].kind == "advance"


def _fits(open_here: list[int], spans: Sequence[TimedSpan], ends: Sequence[float], place: int) -> bool:
    """Whether a span fits a line: the line must be empty there, or inside an enclosing span."""
    while open_here and ends[open_here[-1]] <= spans[place].begin_s:
        open_here.pop()
    if not open_here:
        return True
    around = open_here[-1]
    if ends[place] > ends[around]:
        return False
    return spans[place].kind not in _NAMES or around == spans[place].within
