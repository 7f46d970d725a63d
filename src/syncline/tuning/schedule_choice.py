"""``schedule=auto``: chooses the schedule with the shortest iterations, by a prediction or by trials.

The first steps of a run measure the layers, and the exchanges of buckets of all sizes. From these the state machine
that would run each candidate predicts its iteration (``costs.iteration``). Trying each candidate instead would cost
more steps, and let ranks that are busy for other reasons influence the choice. Rank 0 decides and tells the others with
the layout. Candidates keep the mathematics and are compatible with the rest of the strategy. The simplest one within
``MARGIN`` of the best is chosen. No overlap is expected if processes outnumber the cores of their only host: each
message then takes a core from a computation.

With a budget, ``Trials`` follow in the live run: a few layouts run in turn for some steps each. Only rank 0 has the
``Trials``; its caller reports when steps end, by its own clock, and asks for the next layout. Layouts come in the order
of their predictions, after the one that runs without trials. All run in a first turn, the better half and quarter in a
second and third if they are near the best. A moment in which the machine is busy thus affects all remaining layouts
(successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
AISTATS 2016). The first step of a layout does not count, since it fills the exchange's pipeline. A trial ends early
when ``ENOUGH`` steps count and all are far behind the best: a trial costs the time by which its steps are slower, and a
single step may have been delayed. The median decides; the first layout stays unless another one is faster by more than
``CLEARLY``. No trial begins once the budget is spent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ..costs.iteration import IterationTimes, predict_iteration
from ..costs.plans import LinearCost
from ..errors import StrategyError, UsageError
from ..nouns import Layer
from ..session.layout import Lay, Layout
from ..strategy.grammar import read_part
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, write
from ..sync import Averages
from .algorithm_choice import mode

STEPS = 5
"""Steps of a layout in one turn. The first does not count."""

ENOUGH = 2
"""Steps that must count before a trial may end early."""

TURNS = 3
MOST = 8
"""Layouts in the first turn."""

CLEARLY = 0.02

FAR, NEAR = 0.2, 0.1
"""Shares of the best's time. A trial whose steps all take FAR longer ends early; one within NEAR runs again."""


@dataclass
class Trials:
    """Tries ``layouts``, the first being the one without trials, by ``clock`` until ``until_s``.

    ``overlaps`` tells whether the steps of a layout end in the next iteration.
    """

    layouts: Sequence[Layout]
    until_s: float
    clock: Callable[[], float]
    overlaps: Callable[[Layout], bool]
    _times_s: dict[int, list[float]] = field(default_factory=dict)
    _left: list[int] = field(default_factory=list)  # layouts left in the present turn
    _turn: int = 0
    _now: int = -1
    _ended_s: float = 0.0
    _steps: int = 0  # steps of the present trial
    _fastest_s: float = math.inf  # the fastest of its steps that count
    _overlap: bool = True

    def began(self) -> None:
        """Note that the layout that ``following`` returned is in use."""
        self._ended_s, self._steps, self._fastest_s = self.clock(), 0, math.inf

    def step_ended(self) -> None:
        """Note that a step has ended."""
        now_s = self.clock()
        self._steps += 1
        if self._steps > 1 and self._now >= 0:
            self._times_s.setdefault(self._now, []).append(now_s - self._ended_s)
            self._fastest_s = min(self._fastest_s, now_s - self._ended_s)
        self._ended_s = now_s

    @property
    def ends(self) -> bool:
        """Whether the step that now begins is the last one of the present trial."""
        others_s = [median(times_s) for number, times_s in self._times_s.items() if number != self._now]
        counted = self._steps - 1
        is_far = counted >= ENOUGH and bool(others_s) and self._fastest_s > min(others_s) * (1 + FAR)
        return is_far or self._steps + 1 >= STEPS or self.clock() >= self.until_s

    def refuse_overlap(self) -> None:
        """Exclude layouts that overlap with the next iteration: the script has read gradients in flight."""
        self._overlap = False

    def following(self) -> Layout:
        """The next layout: the next trial, or the best layout after all trials."""
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

    def best(self, *, overlap: bool = True) -> Layout:
        """The fastest layout, with its measurement; without ``overlap``, among those without overlap.

        Raises UsageError if there is no such layout.
        """
        found = {
            number: median(times_s)
            for number, times_s in self._times_s.items()
            if self._may(number) and (overlap or not self.overlaps(self.layouts[number]))
        }
        if not found:
            may = (one for one in self.layouts if not self.overlaps(one) or (overlap and self._overlap))
            if (first := next(may, None)) is None:
                raise UsageError("no schedule whose steps end within their iteration fits this model")
            return first
        number = min(found, key=found.__getitem__)
        if 0 in found and found[number] > found[0] * (1 - CLEARLY):
            number = 0
        layout = self.layouts[number]
        beside = f", {_ms(found[0])} with {self.layouts[0].schedule}" if number and 0 in found else ""
        tried = f"the fastest of {len(found)} schedules tried on the live run" if len(found) > 1 else "alone was tried"
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
        return self._overlap or not self.overlaps(self.layouts[number])


log = logging.getLogger("syncline")

FIRST = "fixed"
"""The schedule at the beginning of a run."""

MEASURING = "merged"
"""Its first buckets double in size, so that it measures exchanges of all sizes."""

CANDIDATES = (FIRST, "fixed(bucket=8MiB)", "fixed(bucket=2MiB)", "wait_free", "merged", "priority", "split")
"""From the simplest on."""

MORE = ("fixed(bucket=1MiB)", "fixed(bucket=4MiB)", "fixed(bucket=64MiB)", "priority(slice=1MiB)",
        "priority(slice=16MiB)", "split(slice=1MiB)")  # fmt: skip
"""Further candidates if there is a budget for trials."""

UNLIKELY = 0.25
"""A schedule predicted to take longer than the best by this share is not tried."""

MARGIN = 0.02

OVERLAP_COST = 0.05
"""The additional cost of steps that end in the next iteration, as a share, beyond the prediction.

Weights are updated in parts, and exchanges continue in forward passes; both need the processor
(benchmarks/performance.md).
"""


def is_wanted(asked: Strategy, workers: int) -> bool:
    """Whether to choose a schedule: ``auto``, and workers that synchronise in every step."""
    sync = asked.sync_mode()
    together = sync.merges and not isinstance(sync, Averages)
    return asked.schedule == AUTO and workers > 1 and together and mode() != "off"


def candidates(strategy: Strategy, overlap: bool, texts: Sequence[str] = CANDIDATES) -> list[Strategy]:
    """The strategy with each compatible schedule; ``overlap`` says if steps may end in the next iteration.

    Where servers hold the weights no step may end later, because a script that reads gradients is refused there.
    """
    found, overlap = [], overlap and not strategy.server_holds_weights
    for text in texts:
        try:
            one = replace(strategy, schedule=read_part(text))
        except StrategyError:
            continue
        if overlap or one.schedule_object().apply == "step":
            found.append(one)
    return found


def with_measuring_buckets(strategy: Strategy, lay: Lay) -> Layout:
    """The layout of the steps that are measured."""
    found = lay(replace(strategy, schedule=read_part(MEASURING)))
    return replace(found, schedule=MEASURING, reason=f"schedule={MEASURING} while steps are measured")


def choose_schedule(
    strategy: Strategy,
    layers: Sequence[Layer],
    cost: LinearCost | None,
    lay: Lay,
    overlap: bool,
    fits: Callable[[Strategy], bool] = lambda _: True,
    *,
    crowded: bool = False,
) -> Layout:
    """The layout of the schedule that is predicted to be fastest, given the times of layers and exchanges.

    ``lay`` makes a schedule's buckets; schedules that it or ``fits`` refuses are left out. If the prediction fails, the
    first schedule runs, since the buckets for measuring must not stay. ``crowded`` says that exchanges and computation
    share too few cores to overlap. Raises UsageError if all are refused. Takes some tenths of a second in models of
    hundreds of tensors.
    """
    offered = list(filter(fits, candidates(strategy, overlap)))
    if cost is None or not any(layer.backward_s for layer in layers):
        return _simplest(offered, lay, cost, "nothing was measured")
    found: list[tuple[Strategy, Layout, IterationTimes]] = []
    for one in offered:
        try:
            laid = lay(one)
            times = _predicted(layers, laid, one, cost, crowded)
        except UsageError:
            continue
        except Exception as error:
            why = f"no schedule was predicted, because {_text(one)} failed ({type(error).__name__}: {error})"
            log.warning("schedule=auto: %s", why)
            return _simplest(offered, lay, cost, why)
        found.append((one, laid, times))
    if not found:
        return _simplest(offered, lay, cost, "nothing could be predicted")
    expected_s = [with_overlap_s(one, times.whole_s) for one, _, times in found]
    enough_s = min(expected_s) * (1 + MARGIN)
    by, laid, times = next(row for row, seconds in zip(found, expected_s, strict=True) if seconds <= enough_s)
    first, _, beside = found[0]
    others = "" if by is first else f", {_ms(beside.whole_s)} with {_text(first)}"
    why = f"predicted {_ms(times.whole_s)} per iteration{others}, {_ms(times.computing_s)} computing"
    if crowded:
        why += ", without overlap because processes outnumber cores"
    return _chosen(by, laid, cost, why)


def worth_a_trial(
    strategy: Strategy,
    layers: Sequence[Layer],
    cost: LinearCost | None,
    lay: Lay,
    overlap: bool,
    fits: Callable[[Strategy], bool],
    *,
    crowded: bool = False,
) -> list[Layout]:
    """The layouts that may be the fastest, for schedules that ``fits`` accepts: ``choose_schedule``'s first.

    The others come in the order of their predictions, without those that are far behind or cannot be predicted. One
    without overlap of iterations is always included; if none can be predicted, the result is the simplest schedule
    alone. Schedules with equal buckets and behaviour are listed once. Raises UsageError if no schedule can be laid out.
    """
    chosen = choose_schedule(strategy, layers, cost, lay, overlap, fits, crowded=crowded)
    found: dict[object, tuple[float, Layout]] = {}
    quiet: tuple[float, Layout] | None = None
    for one in candidates(strategy, overlap, (*CANDIDATES, *MORE)):
        if not fits(one):
            continue
        try:
            laid = lay(one)
            expected_s = 0.0  # equal for all if no exchange was measured
            if cost is not None:
                times = _predicted(layers, laid, one, cost, crowded)
                expected_s = with_overlap_s(one, times.whole_s)
        except UsageError:
            continue
        except Exception as error:
            log.warning(
                "schedule=auto: %s is not tried, because it failed (%s: %s)", _text(one), type(error).__name__, error
            )
            continue
        schedule = one.schedule_object()
        row = expected_s, _chosen(one, laid, cost, "not tried")
        goes = schedule.release, schedule.phases, schedule.apply, schedule.in_flight
        found.setdefault((laid.buckets, laid.priorities, goes), row)
        if schedule.apply == "step" and (quiet is None or row[0] < quiet[0]):
            quiet = row
    rows = sorted(found.values(), key=lambda row: (row[1].schedule != chosen.schedule, row[0]))
    if quiet is None:
        offered = list(filter(fits, candidates(strategy, overlap)))
        return [_simplest(offered, lay, cost, "nothing could be predicted")]
    least_s = min(seconds for seconds, _ in rows)
    left = [laid for seconds, laid in rows if seconds <= least_s * (1 + UNLIKELY) or laid is rows[0][1]]
    return left if quiet[1] in left else [*left, quiet[1]]


def _predicted(
    layers: Sequence[Layer], laid: Layout, strategy: Strategy, cost: LinearCost, crowded: bool
) -> IterationTimes:
    """One iteration; if exchanges and computation compete for cores, it takes the sum of their times."""
    times = predict_iteration(layers, laid, strategy.schedule_object(), strategy.sync_mode(), cost)
    if not crowded:
        return times
    exchange_s = math.fsum(cost(bucket.nbytes) for bucket in laid.buckets)
    return replace(times, whole_s=times.computing_s + exchange_s)


def with_overlap_s(strategy: Strategy, predicted_s: float) -> float:
    """The expected time of an iteration with this prediction."""
    return predicted_s * (1 + OVERLAP_COST * (strategy.schedule_object().apply != "step"))


def _simplest(offered: Sequence[Strategy], lay: Lay, cost: LinearCost | None, why: str) -> Layout:
    """The first schedule that can be laid out; raises UsageError if none can."""
    refusal: UsageError | None = None
    for one in offered:
        try:
            return _chosen(one, lay(one), cost, why)
        except UsageError as error:
            refusal = error
    if refusal is None:
        raise UsageError("none of the schedules that schedule=auto tries can run here: name another one")
    raise UsageError(f"{refusal}; none of the other schedules that schedule=auto tries fits this model") from refusal


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _text(by: Strategy) -> str:
    return write("schedules", by.schedule)


def _chosen(by: Strategy, laid: Layout, cost: LinearCost | None, why: str) -> Layout:
    text = _text(by)
    return replace(laid, schedule=text, reason=f"schedule={text}: {why}", cost=cost)
