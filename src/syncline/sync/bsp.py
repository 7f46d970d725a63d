"""Bulk synchronous parallel: every step ends with everyone's gradients averaged (Valiant, CACM 33(8), 1990).

Nobody is ever ahead by a finished step, so N workers compute what one worker computes on the union of their batches.

With ``backup=k`` nobody waits for the last k of N (Chen et al., "Revisiting Distributed Synchronous SGD", ICLR workshop
2016): owners of the weights update when N - k have pushed their gradients of a step. Who comes later has the new
weights at once; what it pushed comes back with the next update, where the paper drops it, and every gradient counts
once with a share of 1/N. So nothing is lost, and some gradients are late. A worker that is slow for good contributes
what it computes, an update late; stalls that hit one worker or another cost nobody a wait.
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
        """Raise UsageError for a number that is none."""
        if isinstance(self.backup, bool) or not isinstance(self.backup, int) or self.backup < 0:
            raise UsageError(f"backup={self.backup}: it is a number of workers that updates do not wait for, 0 or more")

    @property
    def merges(self) -> bool:
        """Without backup workers."""
        return self.backup == 0

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Every step exchanges."""
        return True

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Only when the slowest worker, of those that are waited for, has finished as many steps."""
        return clock <= slowest
