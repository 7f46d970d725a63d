"""Sync modes: when a worker may go on, what is exchanged, and what is agreed on.

A clock counts a worker's finished steps, from 0. Nothing here does I/O, waits or knows a framework: the caller asks,
and acts on the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

Rate = Literal["shared", "own"]
"""The learning rate of a push that is an update by itself: the optimizer's divided among the workers, or all of it."""


class SyncMode(Protocol):
    """The rules of one way to coordinate workers; what no engine does is refused when the strategy is built."""

    @property
    def exchanges(self) -> Literal["gradients", "parameters"]:
        """What travels: gradients before the update, or parameters after it."""
        ...

    @property
    def merges(self) -> bool:
        """True when what all workers push for a step is one update, to which they come together and agree.

        Otherwise every worker's push is an update by itself, and nothing is agreed on.
        """
        ...

    def due(self, step: int) -> bool:
        """True when the workers exchange in that step (steps count from 0)."""
        ...

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """True when a worker that has finished ``clock`` steps may start the next, the slowest being at ``slowest``."""
        ...


@runtime_checkable
class Applies(Protocol):
    """A mode whose pushes are updates by themselves and that says how one is applied; others do as ``Applied`` does."""

    @property
    def rate(self) -> Rate:
        """With which learning rate."""
        ...

    @property
    def compensate(self) -> float:
        """The lambda of delay compensation, 0 for none."""
        ...


@dataclass(frozen=True)
class Applied:
    """How a push that is an update by itself is applied where the mode says nothing of it."""

    rate: Rate = "shared"
    compensate: float = 0.0


def application_of(mode: SyncMode) -> Applies:
    """How the mode's pushes are applied."""
    return mode if isinstance(mode, Applies) else Applied()
