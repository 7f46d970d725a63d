"""Trials on the live run: which of a few layouts has the shortest steps, each run for some steps, in turn.

Pure: is told when steps end, by its caller's clock, and answers which layout comes next. Rank 0 alone has one.

Layouts come in the order of their predictions, behind the one that runs where nothing is tried. In a first turn all of
them run; in a second and third the better half and quarter, as far as they are near the best: so a moment in which the
machine is busy is seen by all that are left (successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization", AISTATS 2016). Steps count from the second on in a layout, since the
first one fills what the exchange needs. A trial ends early when ``ENOUGH`` of its steps count and all are far behind
the best: a trial costs what its steps are slower, and a single step may have been held up. The median decides, and the
first layout stays where no other one is faster by more than ``CLEARLY``. When the budget is spent no more are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ..errors import UsageError
from ..session.layout import Layout

STEPS = 5
"""Of a layout in one turn, the first of which does not count."""

ENOUGH = 2
"""Steps that count before a trial may end early."""

TURNS = 3
MOST = 8
"""Layouts in the first turn."""

CLEARLY = 0.02

FAR, NEAR = 0.2, 0.1
"""Shares of the best's time: a trial whose steps all take so much more ends early, and one that takes no more than the
second runs again."""


@dataclass
class Trials:
    """``layouts``, what runs without trials first, whose steps end at what ``clock`` says, until ``until_s``.

    ``crosses`` says of a layout whether its steps end in the next iteration.
    """

    layouts: Sequence[Layout]
    until_s: float
    clock: Callable[[], float]
    crosses: Callable[[Layout], bool]
    _times_s: dict[int, list[float]] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)  # of the present turn
    _turn: int = 0
    _now: int = -1
    _ended_s: float = 0.0
    _steps: int = 0  # of the present trial
    _fastest_s: float = math.inf  # of the steps of it that count
    _crossing: bool = True

    def began(self) -> None:
        """The layout that ``following`` gave has taken its place."""
        self._ended_s, self._steps, self._fastest_s = self.clock(), 0, math.inf

    def step_ended(self) -> None:
        """A step has."""
        now_s = self.clock()
        self._steps += 1
        if self._steps > 1 and self._now >= 0:
            self._times_s.setdefault(self._now, []).append(now_s - self._ended_s)
            self._fastest_s = min(self._fastest_s, now_s - self._ended_s)
        self._ended_s = now_s

    @property
    def ends(self) -> bool:
        """Whether the step that begins is the last one of the present trial."""
        others_s = [median(times_s) for number, times_s in self._times_s.items() if number != self._now]
        counted = self._steps - 1
        is_far = counted >= ENOUGH and bool(others_s) and self._fastest_s > min(others_s) * (1 + FAR)
        return is_far or self._steps + 1 >= STEPS or self.clock() >= self.until_s

    def refuse_crossing(self) -> None:
        """A script has looked at what would be under way: no layout that crosses iterations may run any more."""
        self._crossing = False

    def following(self) -> Layout:
        """The layout that comes next: the next trial, or the best one when all is tried."""
        self._left = [number for number in self._left if self._may(number)]
        if not self._left and self._turn < TURNS:
            self._left = self._next_turn()
            self._turn += 1
        if not self._left or self.clock() >= self.until_s:
            self._now = -1
            return self.best()
        self._now = self._left.pop(0)
        layout = self.layouts[self._now]
        return replace(layout, trial=True, reason=f"schedule={layout.schedule} while schedules are tried")

    def best(self, *, crossing: bool = True) -> Layout:
        """The fastest, with what was measured; without ``crossing`` of those whose steps end by themselves.

        Raises UsageError where there are none of these.
        """
        found = {
            number: median(times_s)
            for number, times_s in self._times_s.items()
            if self._may(number) and (crossing or not self.crosses(self.layouts[number]))
        }
        if not found:
            may = (one for one in self.layouts if not self.crosses(one) or (crossing and self._crossing))
            if (first := next(may, None)) is None:
                raise UsageError("no schedule whose steps end by themselves fits this model")
            return first
        number = min(found, key=found.__getitem__)
        if 0 in found and found[number] > found[0] * (1 - CLEARLY):
            number = 0
        layout = self.layouts[number]
        beside = f", {_ms(found[0])} with {self.layouts[0].schedule}" if number and 0 in found else ""
        tried = f"of {len(found)} that were tried on the live run" if len(found) > 1 else "alone was tried"
        reason = f"schedule={layout.schedule}: {_ms(found[number])} per iteration{beside}, {tried}"
        return replace(layout, reason=reason)

    def _next_turn(self) -> list[int]:
        if not self._turn:
            return [number for number in range(min(MOST, len(self.layouts))) if self._may(number)]
        known = sorted((median(times_s), number) for number, times_s in self._times_s.items() if self._may(number))
        near = [number for seconds, number in known if seconds <= known[0][0] * (1 + NEAR)]
        left = {number for number in near if number == 0} | set(near[: max(2, MOST >> self._turn)])
        return sorted(left) if len(left) > 1 else []

    def _may(self, number: int) -> bool:
        return self._crossing or not self.crosses(self.layouts[number])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
