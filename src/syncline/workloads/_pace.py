"""The clock of a replay: work of a given duration, done by sleeping, without drift.

Owns when a stretch of work is over; does not know what is replayed. A sleep always ends a little late, and a process
that shares its core with others a lot. Sleeping each stretch's duration from where the last one really ended would add
all that up; deadlines fixed once for a whole iteration would let work be done while the process in fact waited for
others. So there is an *ideal* end of each stretch, and three rules for where the next one ideally begins:

* **Lateness is made up for.** The next stretch begins at the ideal end of the last, not at the real one, and its sleep
  is the shorter. Time spent inside a stretch (writing gradients) is part of it.
* **A wait counts in full.** A pause between two stretches in which others had the thread (blocked communication, an
  optimizer's step) moves the ideal clock by as much: a layer's time is a duration of compute, and cannot pass while the
  layer waits for its weights.
* **The interpreter's share does not.** Between two layers Python and autograd take some tens of microseconds, which an
  accelerator hides by running behind its host. A pause of up to ``INTERPRETER_S`` is taken for that.

At the start of a forward pass lateness beyond ``CARRIED_S`` is dropped: a process that was held up makes one iteration
longer, and no later one shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

INTERPRETER_S = 0.5e-3
"""The longest pause between two stretches that counts as the interpreter's own time, in seconds."""

CARRIED_S = 1e-3
"""The most lateness that a forward pass takes over from the iteration before it, in seconds."""


class Pacer:
    """Stretches of work, one behind the other: ``begin``, what has to be done meanwhile, ``finish(duration)``.

    ``now`` and ``sleep`` are a monotonic clock in seconds and what waits on it; all durations are multiplied by
    ``stretch``.
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
        """Work begins now, or ideally a little earlier."""
        now = self._now()
        pause_s = now - self._ended
        self._start = now - self._late_s - (pause_s if pause_s <= INTERPRETER_S else 0.0)

    def finish(self, duration_s: float) -> None:
        """Return when ``duration_s``, stretched, has passed since the work's ideal beginning, at once if it has."""
        due = self._start + duration_s * self.stretch
        left_s = due - self._now()
        if left_s > 0:
            self._sleep(left_s)
        self._ended = self._now()
        self._late_s = max(0.0, self._ended - due)
