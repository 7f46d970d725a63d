"""Bulk synchronous parallel: every step averages the gradients of all workers (Valiant, CACM 33(8), 1990).

No worker is ever ahead by a finished step, so N workers compute what one worker computes on the union of their batches.

With ``backup=k`` updates do not wait for the last k of N workers (Chen et al., "Revisiting Distributed Synchronous
SGD", ICLR workshop 2016): owners of the weights update once N - k workers have pushed their gradients of a step. A late
worker gets the new weights at once, and its push becomes part of the next update, whereas the paper drops it. Every
gradient counts once, with a share of 1/N, so none is lost and some are late. A permanently slow worker contributes one
update late; occasional stalls of single workers delay no one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..registry import register


@register("sync", "bsp", examples=("bsp", "bsp(backup=1)"))
@dataclass(frozen=True)
class Bsp:
    """Synchronous: a step starts when all workers, or all but ``backup``, have finished the one before."""

    backup: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid number of backup workers."""
        if isinstance(self.backup, bool) or not isinstance(self.backup, int) or self.backup < 0:
            raise UsageError(
                f"backup={self.backup}: the number of workers that updates do not wait for must be 0 or more"
            )

    @property
    def merges(self) -> bool:
        return self.backup == 0

    def due(self, step: int) -> bool:  # noqa: ARG002
        return True

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Only when the slowest worker, backups aside, has finished as many steps."""
        return clock <= slowest
