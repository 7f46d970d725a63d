"""What can be observed of a run: everything that begins and ends, told to one observer.

Owns the seam and what is told through it. Does not know who listens: a timeline, statistics or a live view are
observers. Where there is none (``None``, the default) nothing is called and nothing is made: each action then costs one
test for ``None``.

A span is told twice, as the same object, when it begins and when it ends, and lies within another one, which begins
before it and ends after it:

    work             from being handed over to being done, whatever it stands for
      run            a plan, a library's collective or a bucket's reducers, from the start, after gate and lane
        segment      the plan on one segment of the array
          send  receive        from being handed to the transport to being complete there
          reduce  copy         what has come is added, or takes the place of what was there
        advance      one call of compiled code that carries out a plan in mapped memory
          send  receive  reduce  copy
        compute      a turn of a reducer: it encodes before its messages, and decodes after them
        send  receive          a reducer's payloads
      send  receive  single messages
    wait             a thread of the script, or of an owner, is blocked
    forward          the model computes, as far as the framework tells it
    backward         from where the pass enters the model's output; the waits at its end come after it
    optimizer        the optimizer's step, with what waits for owners in it
    update           an owner applies gradients to its weights
    staging          a bucket is copied down from a device

Compiled loops tell nothing. In mapped memory it is seen before and after each call of ``advance`` how many operations
of the script are done; those done in between are told at the end of the call, with no time of their own. There the rank
that reads a peer's memory receives, one that writes it sends, and the other one does nothing. A call without anything
in it has found that it has to wait. What a transport adds while it comes in is a receive, and no reduction beside it.

What a fault leaves unfinished has no end, and neither has what nobody waits for (a tolerant work).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal[
    "work", "run", "segment", "send", "receive", "reduce", "copy", "advance", "compute", "wait",
    "forward", "backward", "optimizer", "update", "staging",
]  # fmt: skip


@dataclass(slots=True, eq=False)  # frozen ones take three times as long to make, and there is one for everything
class Span:
    """Something that begins and ends; what does not apply to it is -1, or empty."""

    observer: Observer = field(repr=False)
    kind: Kind
    label: str
    """What it is for: of a bucket its number and tensors."""
    within: Span | None = None
    key: int = -1
    """Of works and runs: what tells it from others under way. Of updates the step of the worker that has pushed."""
    phase: str = ""
    """Of runs: the plan's goal, or ``reduce`` for reducers; of their turns ``encode`` or ``decode``."""
    priority: float = 0.0
    segment: int = -1
    step: int = -1
    """The step of the plan, in mapped memory the operation of the script, of reducers the number of the piece.

    Of updates their number.
    """
    peer: int = -1
    nbytes: int = -1
    mark: int = field(default=0, repr=False)
    """The observer's own."""

    def end(self) -> None:
        """Tell the observer that it has ended."""
        self.observer.end(self)


class Observer(Protocol):
    """Who is told. Called from any thread, most from the one that drives; it must not block or raise."""

    def begin(self, span: Span) -> None:
        """It begins now."""
        ...

    def end(self, span: Span) -> None:
        """What began with the same object has ended now."""
        ...


def begin(observer: Observer, kind: Kind, label: str, within: Span | None = None, **what: Any) -> Span:
    """Tell the observer that something begins; the span is to be told when it ends."""
    span = Span(observer, kind, label, within, **what)
    observer.begin(span)
    return span


@dataclass(frozen=True, slots=True)
class Event:
    """A span that began, or ended, at that time of the recorder's clock."""

    at_s: float
    ends: bool
    span: Span


class Recorder:
    """Keeps all events in memory, in the order in which they were told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.events: list[Event] = []
        self._clock = clock

    def begin(self, span: Span) -> None:
        """Note when it began."""
        self.events.append(Event(self._clock(), False, span))

    def end(self, span: Span) -> None:
        """Note when it ended."""
        self.events.append(Event(self._clock(), True, span))

    def spans(self, *kinds: Kind) -> list[Span]:
        """Those of these kinds, or all, in the order in which they began."""
        return [event.span for event in self.events if not event.ends and (not kinds or event.span.kind in kinds)]
