"""Stale synchronous parallel: asynchronous within a bound (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NeurIPS 2013).

The staleness of a step is the number of clocks by which its worker is ahead of the slowest when the step starts; under
``ssp(staleness=s)`` it never exceeds s. A worker that starts a step therefore has all pushes that are more than s
clocks old, as the paper's proof of convergence requires. Jitter of up to s steps delays no worker. A permanently slow
worker holds up all others once they are s steps ahead, as under ``bsp``.

With a staleness of 0 workers proceed in step as under ``bsp``, but each push is an update of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..registry import register
from . import Momentum, Rate
from ._apart import Apart


@register("sync", "ssp", examples=("ssp(staleness=0)", "ssp(staleness=3)", "ssp(staleness=1, momentum=dana)"))
@dataclass(frozen=True)
class Ssp(Apart):
    """Stale synchronous: every push is an update by itself, and no step begins more than ``staleness`` ahead."""

    staleness: int
    rate: Rate = "shared"
    compensate: float = 0.0
    momentum: Momentum = "auto"

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid staleness."""
        super().__post_init__()
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int) or self.staleness < 0:
            raise UsageError(
                f"staleness={self.staleness}: the number of steps must be 0 or more; ssp(staleness=0) keeps workers"
                " in step, and asp never waits"
            )

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock - slowest <= self.staleness
