"""Bulk synchronous parallel: every step ends with everyone's gradients averaged (Valiant, CACM 33(8), 1990).

Nobody is ever ahead by a finished step, so N workers compute what one worker computes on the union of their batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import register


@register("sync", "bsp")
@dataclass(frozen=True)
class Bsp:
    """Synchronous: a step starts when all workers have finished the one before."""

    merges: ClassVar[bool] = True

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Every step exchanges."""
        return True

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Only when the slowest worker has finished as many steps."""
        return clock <= slowest
