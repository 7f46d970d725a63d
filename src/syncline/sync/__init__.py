"""Sync modes: when a worker may go on, what is exchanged, and what is agreed on.

A clock counts a worker's finished steps, from 0. Nothing here does I/O, waits or knows a framework: the caller asks,
and acts on the answer.
"""

from __future__ import annotations

from typing import Literal, Protocol


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
