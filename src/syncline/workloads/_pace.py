"""The clock of a replay: simulates work of a given duration by sleeping, without drift.

A sleep always ends slightly late, and much later if the core is shared. Sleeping each stretch's duration from the real
end of the last one would accumulate this. Fixed deadlines for a whole iteration would let work elapse while the process
was in fact waiting for others. Each stretch therefore has an *ideal* end, and three rules define the ideal begin of the
next:

* **Lateness is made up for.** The next stretch begins at the ideal end of the last one, and its sleep is shorter. Time
  spent inside a stretch (writing gradients) is part of it.
* **A wait counts in full.** A pause between two stretches in which the thread did something else (blocked
  communication, an optimizer's step) moves the ideal clock by as much: a layer cannot compute while it waits for its
  weights.
* **The interpreter's share does not count.** Between two layers Python and autograd take some tens of microseconds,
  which an accelerator hides by running behind its host. Pauses of up to ``INTERPRETER_S`` are taken for that.

At the start of a forward pass lateness beyond ``CARRIED_S`` is dropped: a delayed process makes one iteration longer
and no later one shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

INTERPRETER_S = 0.5e-3
"""The longest pause between two stretches that counts as the interpreter's own time, in seconds."""

CARRIED_S = 1e-3
"""The most lateness that is carried over to the next iteration, in seconds."""


class Pacer:
    """Stretches of simulated work in sequence: ``begin``, do the real work, ``finish(duration)``.

    ``now`` is a monotonic clock in seconds and ``sleep`` sleeps on it. All durations are multiplied by ``stretch``.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._now, self._sleep = now, sleep
        self.stretch = 1.0
        self._start = 0.0
        self._ended = -math.inf
        self._late_s = 0.0

    def new_iteration(self) -> None:
        """Forget lateness beyond ``CARRIED_S``."""
        self._late_s = min(self._late_s, CARRIED_S)

    def begin(self) -> None:
        """Start a stretch now, or ideally slightly earlier."""
        now = self._now()
        pause_s = now - self._ended
        self._start = now - self._late_s - (pause_s if pause_s <= INTERPRETER_S else 0.0)

    def finish(self, duration_s: float) -> None:
        """Sleep until ``duration_s``, stretched, has passed since the stretch's ideal begin. Returns at once if it
        has.
        """
        due = self._start + duration_s * self.stretch
        left_s = due - self._now()
        if left_s > 0:
            self._sleep(left_s)
        self._ended = self._now()
        self._late_s = max(0.0, self._ended - due)
