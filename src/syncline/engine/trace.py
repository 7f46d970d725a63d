"""Defines the spans that an observer of the engine receives.

Timelines, statistics and live views are observers; this module knows none of them. Without an observer (``None``, the
default) no span is created, and each action costs one test for ``None``.

An observer gets every span twice, as the same object: at its start and at its end. Spans are nested:

    work             from submission to completion
      run            a plan, a library's collective or a bucket's reducers, from its start (after gate and lane)
        segment      the plan on one segment of the array
          send  receive        from the call of the transport to the completion there
          reduce  copy         received data is added to the array or copied into it
        advance      one call of compiled code that executes a plan in mapped memory
          send  receive  reduce  copy
        compute      one turn of a reducer: encoding before its messages, decoding after them
        send  receive          a reducer's payloads
      send  receive  single messages
    wait             a thread of the script, or of an owner, is blocked
    forward          the model's forward pass, if the framework reports it
    backward         the backward pass, from the model's output on, without the waits at its end
    optimizer        the optimizer's step, including its waits for owners
    update           an owner applies gradients to its weights
    staging          a bucket is copied from a device to the host

Compiled loops report nothing. In mapped memory the number of finished operations is read before and after each call of
``advance``; the operations in between are reported after the call, without a duration of their own. There, a rank that
reads a peer's memory reports a receive and a rank that writes it a send; the peer reports nothing. An ``advance``
without nested spans found that it had to wait. A transport that adds data on arrival reports a receive without a
reduce.

Spans that a fault interrupts never end; neither do spans of tolerant work that is left unfinished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal[
    "work", "run", "segment", "send", "receive", "reduce", "copy", "advance", "compute", "wait",
    "forward", "backward", "optimizer", "update", "staging",
]  # fmt: skip


@dataclass(slots=True, eq=False)  # not frozen: that triples the cost of creation, and every message creates one
class Span:
    """Something with a start and an end. Fields that do not apply are -1 or empty."""

    observer: Observer = field(repr=False)
    kind: Kind
    label: str
    """The subject; for a bucket, its number and tensors."""
    within: Span | None = None
    key: int = -1
    """The key of a work or run; for an update, the pushing worker's step."""
    phase: str = ""
    """The plan's goal for a run, or ``reduce`` for reducers; ``encode`` or ``decode`` for their turns."""
    priority: float = 0.0
    segment: int = -1
    step: int = -1
    """The step of the plan; in mapped memory the operation of the script; for reducers the piece; for updates their
    number."""
    peer: int = -1
    nbytes: int = -1
    mark: int = field(default=0, repr=False)
    """Reserved for the observer."""

    def end(self) -> None:
        """Report the end to the observer."""
        self.observer.end(self)


class Observer(Protocol):
    """Receives spans. Called from any thread, mostly the driving one; it must neither block nor raise."""

    def begin(self, span: Span) -> None:
        """A span begins now."""
        ...

    def end(self, span: Span) -> None:
        """The span that began as this object ends now."""
        ...


def begin(observer: Observer, kind: Kind, label: str, within: Span | None = None, **what: Any) -> Span:
    """Create a span and report its start; the caller must call its ``end``."""
    span = Span(observer, kind, label, within, **what)
    observer.begin(span)
    return span
