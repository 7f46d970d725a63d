"""What a session tells of itself: totals, what was chosen for it, and how its steps went beside those of the others.

``Stats`` is a value for scripts and result rows. The engine and the transport count its totals; ``Coordination`` is fed
by whoever coordinates steps, who knows the clocks. This file knows neither owners nor modes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..strategy.choice import Choice


@dataclass(frozen=True)
class Stats:
    """Totals since the start of the session.

    ``blocked_s`` is the time the training thread was blocked in Syncline; bytes are per peer process, counted at the
    transport with all headers; ``strategy`` is what really runs, ``transport`` what carries this process's messages
    (``shm+tcp`` where some peers are on its host and others are not). Under ``architecture=auto`` that was measured,
    ``algorithms`` gives what runs from which size in bytes on; it is empty where the strategy names the algorithm.
    ``exchange`` says in words how gradients become one average, ``reason`` why ``codec=auto`` took its codec, or why
    nothing is compressed, and why ``schedule=auto`` took its schedule, which may change between two steps.

    How this worker was coordinated with the others: ``staleness`` counts its steps by how many clocks it was ahead of
    the slowest worker when they began; ``version_lag`` counts its pushes by how many updates the owners had made to the
    weights since those on which they were computed; ``waited_s`` is the time that it was held up before steps, by the
    rank that it waited for.
    """

    strategy: str
    blocked_s: float = 0.0
    bytes_sent: Mapping[int, int] = field(default_factory=dict)
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    transport: str = ""
    algorithms: Mapping[int, str] = field(default_factory=dict)
    exchange: str = ""
    reason: str = ""
    staleness: Mapping[int, int] = field(default_factory=dict)
    version_lag: Mapping[int, int] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def chosen(self) -> str:
        """The strategy with what was chosen by measuring beside it, for result rows."""
        by_size = f", by size: {Choice(tuple(self.algorithms.items()))}" if self.algorithms else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.strategy}{by_size}{why}"


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
