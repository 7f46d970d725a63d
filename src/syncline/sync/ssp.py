"""Stale synchronous parallel: asynchronous within a bound (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NeurIPS 2013).

The staleness of a step is how many clocks its worker is ahead of the slowest when it begins: under ``ssp(staleness=s)``
never more than s. So whoever begins a step has in its weights all that every worker had pushed up to s clocks ago,
which is what the paper's proof of convergence needs. Jitter of up to s steps costs nobody a wait; a worker that is
slower for good holds up all others once they are s steps ahead, as under ``bsp``.

With a staleness of 0 workers go in step as under ``bsp``, but each push is an update by itself.
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
    """Stale synchronous: every push is an update by itself, nobody begins a step more than so many ahead."""

    staleness: int
    rate: Rate = "shared"
    compensate: float = 0.0
    momentum: Momentum = "shared"

    def __post_init__(self) -> None:
        """Raise UsageError for a staleness that is none."""
        super().__post_init__()
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int) or self.staleness < 0:
            raise UsageError(
                f"staleness={self.staleness}: it is a number of steps, 0 or more; ssp(staleness=0) goes in step, asp"
                " waits for nobody"
            )

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Within the bound."""
        return clock - slowest <= self.staleness
