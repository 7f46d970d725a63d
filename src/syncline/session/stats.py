"""What a session tells of itself: totals, and what was chosen for it.

A value for scripts and result rows; who counts is the engine and the transport.
"""

from __future__ import annotations

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
    """

    strategy: str
    blocked_s: float = 0.0
    bytes_sent: Mapping[int, int] = field(default_factory=dict)
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    transport: str = ""
    algorithms: Mapping[int, str] = field(default_factory=dict)
    exchange: str = ""
    reason: str = ""

    @property
    def chosen(self) -> str:
        """The strategy with what was chosen by measuring beside it, for result rows."""
        by_size = f", by size: {Choice(tuple(self.algorithms.items()))}" if self.algorithms else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.strategy}{by_size}{why}"
