"""``schedule=auto``: which schedule lets an iteration end soonest here, predicted from what a few steps have measured.

The steps of a run time the layers and the exchanges of buckets of all sizes. From these the time of an iteration under
every candidate is predicted (``costs.iteration``) by the state machine that would run it: to try each in turn would
cost more steps, and ranks that are busy otherwise would choose. Rank 0 decides and tells the others with the layout.

Candidates are those that leave the mathematics as it is and go with the rest of the strategy. The simplest counts that
is as fast as the best, give or take ``MARGIN``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..costs.iteration import IterationTimes, predict_iteration
from ..costs.network import LinearCost
from ..errors import StrategyError, UsageError
from ..nouns import Layer
from ..session.layout import Lay, Layout
from ..strategy.grammar import read_part
from ..strategy.parts import write
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO
from ..sync import Averages
from . import mode

log = logging.getLogger("syncline")

FIRST = "fixed"
"""What a run begins with."""

MEASURING = "merged"
"""Its first buckets double in size, so that it shows what exchanges of all sizes take."""

CANDIDATES = (FIRST, "fixed(bucket=8MiB)", "fixed(bucket=2MiB)", "wait_free", "merged", "priority", "split")
"""The simplest first."""

MORE = ("fixed(bucket=1MiB)", "fixed(bucket=4MiB)", "fixed(bucket=64MiB)", "priority(slice=1MiB)",
        "priority(slice=16MiB)", "split(slice=1MiB)")  # fmt: skip
"""Tried beside them where there is a budget for trials."""

UNLIKELY = 0.25
"""What is predicted to take longer than the best by this share of it is not tried."""

MARGIN = 0.02

CROSSING_COST = 0.05
"""What iterations that are crossed take beyond the prediction and beyond the others, as a share: weights are updated in
parts, and exchanges go on in forward passes, too, which both want the processor (benchmarks/performance.md)."""


def is_wanted(asked: Strategy, workers: int) -> bool:
    """Whether there is a schedule to choose: between workers that come together in each of their steps."""
    sync = asked.sync_mode()
    together = sync.merges and not isinstance(sync, Averages)
    return asked.schedule == AUTO and workers > 1 and together and mode() != "off"


def candidates(strategy: Strategy, crossing: bool, texts: Sequence[str] = CANDIDATES) -> list[Strategy]:
    """The strategy with each schedule that goes with the rest of it; ``crossing`` says if steps may end in the next.

    None may where servers hold the weights: scripts that look at gradients are refused there, not waited for.
    """
    found, crossing = [], crossing and not strategy.server_holds_weights
    for text in texts:
        try:
            one = replace(strategy, schedule=read_part(text))
        except StrategyError:
            continue
        if crossing or one.schedule_object().apply == "step":
            found.append(one)
    return found


def with_measuring_buckets(strategy: Strategy, lay: Lay) -> Layout:
    """What the steps that are measured run."""
    found = lay(replace(strategy, schedule=read_part(MEASURING)))
    return replace(found, schedule=MEASURING, reason=f"schedule={MEASURING} while steps are measured")


def choose_schedule(
    strategy: Strategy,
    layers: Sequence[Layer],
    cost: LinearCost | None,
    lay: Lay,
    crossing: bool,
    fits: Callable[[Strategy], bool] = lambda _: True,
) -> Layout:
    """The layout of the schedule that is predicted to be fastest with these times of layers and exchanges.

    ``lay`` makes a schedule's buckets; those that it or ``fits`` refuses are left out. Whatever else fails, the first
    one runs: the buckets of steps that are measured are not to stay. Raises UsageError where all are refused. Takes
    some tenths of a second in models of hundreds of tensors.
    """
    offered = list(filter(fits, candidates(strategy, crossing)))
    if cost is None or not any(layer.backward_s for layer in layers):
        return _simplest(offered, lay, cost, "nothing was measured")
    found: list[tuple[Strategy, Layout, IterationTimes]] = []
    for one in offered:
        try:
            laid = lay(one)
            times = predict_iteration(layers, laid, one.schedule_object(), one.sync_mode(), cost)
        except UsageError:
            continue
        except Exception as error:
            why = f"nothing was predicted, as {_text(one)} failed ({type(error).__name__}: {error})"
            log.warning("schedule=auto: %s", why)
            return _simplest(offered, lay, cost, why)
        found.append((one, laid, times))
    if not found:
        return _simplest(offered, lay, cost, "nothing could be predicted")
    expected_s = [
        times.whole_s * (1 + CROSSING_COST * (one.schedule_object().apply != "step")) for one, _, times in found
    ]
    enough_s = min(expected_s) * (1 + MARGIN)
    by, laid, times = next(row for row, seconds in zip(found, expected_s, strict=True) if seconds <= enough_s)
    first, _, beside = found[0]
    others = "" if by is first else f", {_ms(beside.whole_s)} with {_text(first)}"
    why = f"predicted {_ms(times.whole_s)} per iteration{others}, {_ms(times.computing_s)} computing"
    return _chosen(by, laid, cost, why)


def worth_a_trial(
    strategy: Strategy,
    layers: Sequence[Layer],
    cost: LinearCost | None,
    lay: Lay,
    crossing: bool,
    fits: Callable[[Strategy], bool],
) -> list[Layout]:
    """The layouts that may be the fastest, all of schedules that ``fits`` takes: that of ``choose_schedule`` first.

    The others come in the order of their predictions, without those that are far behind or cannot be predicted. One
    whose steps end by themselves is always among them; where none can be predicted, the simplest schedule is alone. Of
    schedules that lie and go alike one is left. Raises UsageError where no schedule can be laid out.
    """
    chosen = choose_schedule(strategy, layers, cost, lay, crossing, fits)
    found: dict[object, tuple[float, Layout]] = {}
    quiet: tuple[float, Layout] | None = None
    for one in candidates(strategy, crossing, (*CANDIDATES, *MORE)):
        if not fits(one):
            continue
        try:
            laid = lay(one)
            expected_s = _expected_s(one, layers, laid, cost)
        except UsageError:
            continue
        except Exception as error:
            log.warning(
                "schedule=auto: %s is not tried, as it failed (%s: %s)", _text(one), type(error).__name__, error
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
        offered = list(filter(fits, candidates(strategy, crossing)))
        return [_simplest(offered, lay, cost, "nothing could be predicted")]
    least_s = min(seconds for seconds, _ in rows)
    left = [laid for seconds, laid in rows if seconds <= least_s * (1 + UNLIKELY) or laid is rows[0][1]]
    return left if quiet[1] in left else [*left, quiet[1]]


def _expected_s(one: Strategy, layers: Sequence[Layer], laid: Layout, cost: LinearCost | None) -> float:
    """Seconds of an iteration, the same for all where no exchange was measured."""
    if cost is None:
        return 0.0
    schedule = one.schedule_object()
    whole_s = predict_iteration(layers, laid, schedule, one.sync_mode(), cost).whole_s
    return whole_s * (1 + CROSSING_COST * (schedule.apply != "step"))


def _simplest(offered: Sequence[Strategy], lay: Lay, cost: LinearCost | None, why: str) -> Layout:
    """The first that can be laid out; raises UsageError where none can."""
    refusal: UsageError | None = None
    for one in offered:
        try:
            return _chosen(one, lay(one), cost, why)
        except UsageError as error:
            refusal = error
    if refusal is None:
        raise UsageError("no schedule that might be chosen may run here")
    raise UsageError(f"{refusal}; no other schedule that might be chosen fits this model, either") from refusal


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _text(by: Strategy) -> str:
    return write("schedules", by.schedule)


def _chosen(by: Strategy, laid: Layout, cost: LinearCost | None, why: str) -> Layout:
    text = _text(by)
    return replace(laid, schedule=text, reason=f"schedule={text}: {why}", cost=cost)
