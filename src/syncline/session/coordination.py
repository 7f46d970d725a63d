"""How this worker's steps went beside those of the others: counts that ``stats()`` tells.

Fed by whoever coordinates steps, who knows the clocks; this file knows neither owners nor modes.
"""

from __future__ import annotations

from collections import Counter, defaultdict


class Coordination:
    """Counts of one worker, as ``Stats`` describes them; used by the thread that trains."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.version_lag: Counter[int] = Counter()
        self.waited_s: defaultdict[int, float] = defaultdict(float)

    def begun(self, ahead: int = 0) -> None:
        """A step has begun, so many clocks ahead of the slowest worker."""
        self.staleness[ahead] += 1

    def pushed(self, lag: int, waited_s: float, held_by: int) -> None:
        """Its push was applied so many updates late; then the worker was held up by that rank, if for any time."""
        self.version_lag[lag] += 1
        if waited_s > 0:
            self.waited_s[held_by] += waited_s
