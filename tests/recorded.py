"""An observer that keeps all events in memory, in the order in which they were reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from syncline.engine.trace import Kind, Span


@dataclass(frozen=True, slots=True)
class Event:
    """The begin or the end of a span, at a time of the recorder's clock."""

    at_s: float
    ends: bool
    span: Span


class Recorder:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.events: list[Event] = []
        self._clock = clock

    def begin(self, span: Span) -> None:
        self.events.append(Event(self._clock(), False, span))

    def end(self, span: Span) -> None:
        self.events.append(Event(self._clock(), True, span))

    def spans(self, *kinds: Kind) -> list[Span]:
        """The spans of these kinds, by default all, in the order of their begins."""
        return [event.span for event in self.events if not event.ends and (not kinds or event.span.kind in kinds)]
