"""Simulates the speed of workers: a minimum step time, one slow worker, random stalls of all.

Ways to synchronize workers differ only if the workers do: one is always slower, as on an older machine, or any of them
at times, as on shared machines (Cipar et al., "Solving the straggler problem with bounded staleness", HotOS 2013). Time
in communication is never stretched, and only the training thread sleeps.

The computation time of a step is known only afterwards. A step of a real model is therefore extended between its
forward and its backward pass, before any gradient is ready, by an estimate from the previous backward pass; the rest
follows at its end. A third of the sleep counts as forward and the rest as backward, the usual proportion. Replayed
layers have their times from a trace, which is itself stretched; only stalls are slept here.

``Pacer`` is the clock of a replay: it simulates work of a given duration by sleeping, without drift.

A sleep always ends slightly late, and much later if the core is shared. Sleeping each stretch's duration from the real
end of the last one would accumulate this. Fixed deadlines for a whole iteration would let work elapse while the process
was in fact waiting for others. Each stretch therefore has an *ideal* end, and three rules define the ideal start of the
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
from dataclasses import dataclass

import numpy as np

from syncline.errors import UsageError
from syncline.nouns import Seconds

from ._feed import GREATEST_S

_NO_TIME = Seconds(0.0)
_MOST = 1000.0
_FORWARD_SHARE = 1 / 3
_STREAM = 0x717E
"""Separates the draws of stalls from others with the same seed."""


@dataclass(frozen=True)
class Speed:
    """The simulated computation time of a step, per worker.

    A step takes at least ``step``. On the worker ``slow_rank`` computation takes ``slowdown`` times as long;
    communication does not. ``jitter`` delays every worker in every step by an exponentially distributed time whose mean
    is that many times a step's computation, determined by seed and rank. Raises UsageError for invalid values.
    """

    step: Seconds = _NO_TIME
    slow_rank: int | None = None
    slowdown: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.step <= GREATEST_S:
            raise UsageError(f"step must be a time from 0s to 1h, such as 30ms, got {self.step:g} seconds")
        if not 1 <= self.slowdown <= _MOST:
            raise UsageError(
                f"slowdown must be a number from 1 (as fast as the others) to {_MOST:g}, got {self.slowdown:g}"
            )
        if not 0 <= self.jitter <= _MOST:
            raise UsageError(f"jitter must be a number of steps from 0 (none) to {_MOST:g}, got {self.jitter:g}")
        if self.slow_rank is None:
            if self.slowdown != 1:
                raise UsageError(f"slowdown={self.slowdown:g} slows down one worker: add slow_rank=0 to choose it")
        elif self.slow_rank < 0:
            raise UsageError(f"slow_rank must be a rank from 0 up, got {self.slow_rank}")
        elif self.slowdown == 1:
            raise UsageError(f"slow_rank={self.slow_rank} needs a slowdown: add slowdown=3")

    @property
    def even(self) -> bool:
        """Whether all workers compute as fast as they can."""
        return self == EVEN

    def check(self, workers: int) -> None:
        """Raise UsageError if the slow worker does not exist."""
        if self.slow_rank is not None and self.slow_rank >= workers:
            them = f"{workers} workers, whose ranks are 0 to {workers - 1}" if workers > 1 else "one worker, rank 0"
            raise UsageError(f"slow_rank={self.slow_rank} is not one of {them}: choose one of them, or more --workers")

    def slowed(self, rank: int) -> float:
        """The factor on a worker's computation time."""
        return self.slowdown if rank == self.slow_rank else 1.0

    def least_s(self, compute_s: float) -> float:
        """The seconds of a step that computes for ``compute_s``, on a worker without slowdown."""
        return max(self.step, compute_s)

    def stretch(self, rank: int, compute_s: float) -> float:
        """The factor on the times of replayed layers, whose sum is ``compute_s`` seconds."""
        return self.slowed(rank) * (self.least_s(compute_s) / compute_s if compute_s > 0 else 1.0)


EVEN = Speed()
"""Every worker at full speed."""


class Tempo:
    """Delays one worker's steps: call the four methods, in this order, in every step.

    ``replayed_s`` is the step's time in a trace, None for a real model. ``now`` is a clock in seconds; ``blocked``
    returns the seconds that the training was blocked in communication, None if that is not counted; ``pause`` sleeps.
    """

    def __init__(
        self,
        speed: Speed,
        rank: int,
        seed: int,
        replayed_s: float | None,
        now: Callable[[], float],
        blocked: Callable[[], float | None],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._speed, self._slowed, self._replayed_s = speed, speed.slowed(rank), replayed_s
        self._now, self._blocked, self._pause = now, blocked, pause
        self._random = np.random.default_rng((_STREAM, seed, rank))
        self._off = speed.even
        self._begun = self._forward_s = self._slept_s = self._owed_s = self._stall = 0.0
        self._backward_s: float | None = None

    def begin(self) -> None:
        """Call before the forward pass."""
        if self._off:
            return
        self._stall = self._speed.jitter * float(self._random.exponential())
        self._slept_s = self._owed_s = 0.0
        self._begun = self._computed()
        if self._replayed_s is not None:
            self._sleep(self._stall * self._speed.least_s(self._replayed_s))

    def forward_ended(self) -> None:
        """Call when the loss has been computed."""
        if self._off or self._replayed_s is not None:
            return
        self._forward_s = self._computed() - self._begun
        own_s = self._forward_s + (self._backward_s or 0.0)
        self._owed_s = self._due_s(own_s) - own_s
        self._sleep(_FORWARD_SHARE * self._owed_s)

    def backward_begins(self) -> None:
        """Call after measuring the forward pass."""
        if not (self._off or self._replayed_s is not None):
            self._sleep(self._owed_s - self._slept_s)

    def backward_ended(self) -> None:
        """Call when all gradients are complete."""
        if self._off or self._replayed_s is not None:
            return
        passed_s = self._computed() - self._begun
        backward_s = passed_s - self._slept_s - self._forward_s
        if self._blocked() is None and self._backward_s is not None:
            # the minimum was computation; the rest may have been waiting
            backward_s = min(backward_s, self._backward_s)
        self._backward_s = max(0.0, backward_s)
        self._sleep(self._due_s(self._forward_s + self._backward_s) - passed_s)

    def _due_s(self, own_s: float) -> float:
        """The seconds of a step that really computes for ``own_s``."""
        return self._slowed * self._speed.least_s(own_s) + self._stall * self._speed.least_s(own_s)

    def _computed(self) -> float:
        """The clock without time in communication."""
        return self._now() - (self._blocked() or 0.0)

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        begun = self._now()
        self._pause(seconds)
        self._slept_s += self._now() - begun


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
        """Sleep until ``duration_s``, stretched, has passed since the stretch's ideal start, or return at once."""
        due = self._start + duration_s * self.stretch
        left_s = due - self._now()
        if left_s > 0:
            self._sleep(left_s)
        self._ended = self._now()
        self._late_s = max(0.0, self._ended - due)
