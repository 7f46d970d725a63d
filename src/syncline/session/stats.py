"""The counts of one worker in a run: totals for scripts and monitors, and the counters behind them.

The training thread counts; any thread may read. A counter of two numbers is one tuple, which is replaced as a whole.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..strategy.choice import Choice


@dataclass(frozen=True)
class Stats:
    """Totals since the start of the session.

    ``strategy`` is the resolved strategy. ``blocked_s`` is the time the training thread was blocked in Syncline. Bytes
    are per peer process, counted at the transport with all headers. ``transport`` names the transports of this
    process's messages (``shm+tcp`` with peers on this host and others). If ``architecture=auto`` was measured,
    ``algorithms`` maps sizes in bytes to the algorithms used from that size on. ``exchange`` says how gradients become
    one average; ``reason`` explains the choices of ``codec=auto``, ``schedule=auto`` and ``momentum=auto``, or the
    absence of compression.

    ``staleness`` counts this worker's steps by its lead over the slowest worker at their start. ``version_lag`` counts
    its pushes by the number of updates that owners had made since they sent the push's weights. ``waited_s`` is the
    time that it waited before steps, by the rank that it waited for.

    ``steps`` is the number of finished steps, including those before a resumed checkpoint; with several models that of
    the model with the most. ``step_s`` is the time from the end of the step before to the end of the last one, and
    ``timed_s`` the sum of these times over ``timed_steps`` steps. ``samples`` is the sum of the weights of this
    worker's batches, None if ``prepare`` got no ``weight`` of batches. ``compression_error`` is the norm of this
    worker's residuals divided by the norm of its gradients, None unless it was asked for. ``at_s`` is the time of these
    totals, by ``time.perf_counter``. A run of one worker counts no steps.

    ``members`` has the numbers of the run's workers by rank. In an elastic run a worker keeps its number, and ``view``
    counts the groups of members so far, which change by losses and new workers. ``repairs`` counts the lost workers
    without which the run has gone on.
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
    at_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    timed_steps: int = 0
    timed_s: float = 0.0
    samples: float | None = None
    compression_error: float | None = None
    members: tuple[int, ...] = ()
    view: int = 1
    repairs: int = 0

    @property
    def chosen(self) -> str:
        """The strategy and the measured choices, for result rows."""
        by_size = f", by size: {Choice(tuple(self.algorithms.items()))}" if self.algorithms else ""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.strategy}{by_size}{why}"

    def since(self, before: Stats) -> dict[str, float]:
        """Means and rates since an earlier call of ``stats``, by name, for a plot; without values that nobody counted.

        ``step_ms`` is the mean time of a step, ``exposed_percent`` the share of time in which the training thread was
        blocked, and ``staleness`` the mean lead over the slowest worker, where workers may run ahead.
        """
        passed_s, steps = self.at_s - before.at_s, self.timed_steps - before.timed_steps
        found: dict[str, float] = {}
        if steps > 0:
            found["step_ms"] = 1e3 * (self.timed_s - before.timed_s) / steps
        if passed_s > 0:
            found["exposed_percent"] = 100 * (self.blocked_s - before.blocked_s) / passed_s
            for name, now, then in (
                ("sent_mb_per_s", self.bytes_sent, before.bytes_sent),
                ("received_mb_per_s", self.bytes_received, before.bytes_received),
            ):
                found[name] = (sum(now.values()) - sum(then.values())) / passed_s / 1e6
            if self.samples is not None:
                found["samples_per_s"] = (self.samples - (before.samples or 0.0)) / passed_s
        begun = sum(self.staleness.values()) - sum(before.staleness.values())
        if self.version_lag and begun > 0:
            found["staleness"] = (total_of(self.staleness) - total_of(before.staleness)) / begun
        if self.compression_error is not None:
            found["compression_error"] = self.compression_error
        return found


def total_of(counts: Mapping[int, int]) -> int:
    """The sum of all values that were counted."""
    return sum(value * count for value, count in counts.items())


class Coordination:
    """The counts of one worker that ``Stats`` describes. For the training thread."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.version_lag: Counter[int] = Counter()
        self.waited_s: defaultdict[int, float] = defaultdict(float)

    def begun(self, ahead: int = 0) -> None:
        """Count a step that began with this lead over the slowest worker."""
        self.staleness[ahead] += 1

    def pushed(self, lag: int, waited_s: float, held_by: int) -> None:
        """Count a push with its version lag, and the time that a rank then made the worker wait."""
        self.version_lag[lag] += 1
        if waited_s > 0:
            self.waited_s[held_by] += waited_s


Squares = tuple[float, float]
"""The squared norms of a bucket's gradients and of their residuals."""


class Pace:
    """The steps of one model on this worker."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = 0
        """The number of finished steps."""
        self.timed = 0, 0.0, 0.0
        """The number of timed steps, their total time and the time of the last one, in seconds."""
        self.apart = 0
        """The steps since an exchange gave all workers the same weights, if workers make steps alone; else 0."""
        self.samples: Callable[[], float | None] = lambda: None
        """Returns the sum of the weights of batches, if batches have weights."""
        self.errors: Mapping[int, Squares] = {}
        """The last measured error of the codec, by bucket."""
        self._clock, self._ended_s = clock, 0.0

    def stepped(self, steps: int) -> None:
        """A step has ended; ``steps`` have ended now."""
        now_s = self._clock()
        if self._ended_s:
            count, total_s, _ = self.timed
            self.timed = count + 1, total_s + now_s - self._ended_s, now_s - self._ended_s
        self._ended_s, self.steps = now_s, steps


def error_of(paces: Iterable[Pace]) -> float | None:
    """The norm of all residuals divided by the norm of all gradients; None if it was not measured."""
    squares = [one for pace in paces for one in list(pace.errors.values())]
    gradient, residual = (sum(part) for part in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return math.sqrt(residual / gradient) if gradient > 0 else None
