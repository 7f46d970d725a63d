"""Predicts what changes would bring to a recorded run, with the simulator of ``syncline predict``.

The model of the run is made of the recording: the stages of the median worker, the gradients in pieces that become
ready as the buckets did, and a network whose two constants are those of the recorded exchanges. A bucket's pieces are
assumed to become ready evenly, from the bucket before on.

A prediction is relative: the simulated time after the change over the simulated time before it, times the measured
iteration. The interval has the error of the model on the run as it is, and the spread of the recorded exchanges. No
change is predicted if that error is above ``MOST_ERROR``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from syncline.costs.cluster import Cluster, Constant
from syncline.costs.iteration import Batches
from syncline.costs.plans import plan_s
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, NONE, write
from syncline.tuning import schedule_choice

from ..predict.iterations import simulate
from ..predict.settings import Setting, setting_of, traced
from ..predict.vary import Varied
from ..report import units
from ..report.explanation import Cause, Change
from ..workloads import EVEN, Speed, Trace, TracedLayer
from .activity import Activity, ExchangeSpan, Stage, common, total, union
from .causes import bucket_of, buckets_of, fixed_part, median_worker

MOST_ERROR = 0.25
"""The error of the model on the run as it is, from which it predicts no changes."""

LEAST_GAIN = 0.03
"""The share of an iteration from which a change is worth naming."""

_FEW_BYTES = 1024
"""The bytes of a message whose time is that of no bytes."""

_ASSUMED = 0.8, 1.25
"""The range of constants without a measured spread, relative to the constants."""

_PIECES = 64
_ALGORITHMS = ("ring", "halving_doubling", "tree", "direct")
_CODECS = ("fp16", "int8")
_SCHEDULES = ("fixed(bucket=1MiB)", "fixed(bucket=4MiB)")
"""Besides those that a run with ``schedule=auto`` considers."""


@dataclass(frozen=True)
class Outlook:
    """The changes, the best one first, the model's time of the run as it is, and remarks."""

    changes: tuple[Change, ...] = ()
    model_s: float | None = None
    remarks: tuple[str, ...] = ()


def outlook(activity: Activity, causes: Sequence[Cause]) -> Outlook:
    """The gains of changes: the best of each word of the strategy, and repairs. Takes some fifty simulations."""
    try:
        strategy = _plain(activity.strategy)
        pieces = _pieces(activity)
        setting = setting_of(strategy, _cluster(activity, strategy, pieces), len(activity.workers))
        now = _as_it_is(setting, activity, pieces, causes)
    except UsageError as error:
        return Outlook(remarks=(f"No change is predicted: {error}.",))
    model_s = now.nominal.iteration_s
    off = abs(model_s / activity.step_s - 1)
    if off > MOST_ERROR:
        return Outlook(
            model_s=model_s,
            remarks=(
                f"The prediction is {units.percent(off)} off here ({units.seconds(model_s)}, measured"
                f" {units.seconds(activity.step_s)}), so it predicts no change.",
            ),
        )
    tried: list[tuple[str, Varied]] = []
    for name, one in _candidates(now, activity, causes):
        with suppress(UsageError):
            tried.append((name, replace(one, nominal=simulate(one.setting, one.model))))
    tried.sort(key=lambda one: one[1].nominal.iteration_s)
    found, scale = [], activity.step_s / model_s
    for name, varied in {name.partition("=")[0]: (name, varied) for name, varied in reversed(tried)}.values():
        if varied.nominal.iteration_s < (1 - LEAST_GAIN) * model_s:
            low_s, high_s = (end_s * scale for end_s in varied.interval(off))
            if high_s < activity.step_s:
                found.append(Change(name, varied.nominal.iteration_s * scale, low_s, high_s))
    found.sort(key=lambda change: change.iteration_s)
    return Outlook(tuple(found), model_s)


def _plain(text: str) -> Strategy:
    """The strategy of a run, without its transport, whose times are in the recording."""
    if not text:
        raise UsageError("the recording does not say under which strategy it was made")
    strategy = Strategy.parse(text)
    if strategy.collective is not None:
        raise UsageError(f"the library of {strategy.architecture.name} chooses its messages itself")
    return replace(strategy, transport=AUTO)


def _candidates(now: Varied, activity: Activity, causes: Sequence[Cause]) -> Iterator[tuple[str, Varied]]:
    """Changes, not simulated yet; not all of them are possible or better."""
    for cause in causes:
        yield from _repairs(cause, now, activity)
    if any(cause.cause == "slow_link" for cause in causes):
        return  # all links of the model are alike, and another exchange may use the slow one less
    strategy, workers = now.setting.strategy, now.setting.workers
    for one in _others(strategy, workers):
        if one.schedule != strategy.schedule:
            name = f"schedule={write('schedules', one.schedule)}"
        elif one.codec != strategy.codec:
            free = ", if encoding took no time" if one.codec != NONE else ""
            name = f"codec={write('codecs', one.codec)}{free}"
        else:
            name = f"architecture={write('algorithms', one.architecture)}"
        with suppress(UsageError):
            yield name, replace(now, setting=setting_of(one, now.setting.cluster, workers))


def _others(strategy: Strategy, workers: int) -> Iterator[Strategy]:
    """The strategy with another schedule, codec or architecture, where that is possible."""
    texts = (*schedule_choice.CANDIDATES, *_SCHEDULES)
    yield from (one for one in schedule_choice.candidates(strategy, True, texts) if one != strategy)
    made = [("codec", codec) for codec in (_CODECS if strategy.codec == NONE else ("none",))]
    served = strategy.roles is not None
    if served:
        made += [
            ("architecture", f"ps(servers={number})") for number in (2, 4, 8) if strategy.servers < number <= workers
        ]
    made += [("architecture", name) for name in _ALGORITHMS]
    for word, text in made:
        try:
            part = read_part(text)
            yield replace(strategy, codec=part) if word == "codec" else replace(strategy, architecture=part)
        except UsageError:
            continue


def _repairs(cause: Cause, now: Varied, activity: Activity) -> Iterator[tuple[str, Varied]]:
    """The run without a cause."""
    if cause.cause == "slow_rank":
        yield f"rank {cause.rank} as fast as the median", replace(now, model=replace(now.model, speed=EVEN))
    elif cause.cause == "late_loader":
        even = Batches(max(0.0, now.model.batches.loading_s - cause.seconds))
        yield f"rank {cause.rank} loading as fast as the median", replace(now, model=replace(now.model, batches=even))
    elif cause.cause == "slow_loading":
        ahead = Batches(now.model.batches.loading_s, prefetch=2)
        yield "batches loaded ahead", replace(now, model=replace(now.model, batches=ahead))
    elif cause.cause == "slow_link" and cause.link is not None:
        rate, cluster = activity.links[cause.link].bytes_per_s, now.setting.cluster
        usual = median(one.bytes_per_s for one in activity.links.values() if one.bytes_per_s > 1.5 * rate)
        faster = cluster.replaced({"between.beta": cluster.constants["between.beta"].value * rate / usual})
        yield "links as fast as the others", replace(now, setting=replace(now.setting, cluster=faster))


# The model of the run


def _middle(activity: Activity, stage: Stage) -> float:
    """The seconds of a stage on the median worker in the median iteration."""
    return float(np.median(median_worker(activity.stages[stage])))


def _as_it_is(
    setting: Setting, activity: Activity, pieces: Sequence[tuple[int, float]], causes: Sequence[Cause]
) -> Varied:
    """The run as it is: the computation of the median worker, and of the slow one."""
    forward_s, backward_s = _middle(activity, "forward"), _middle(activity, "backward")
    layers = [
        TracedLayer(f"piece {place}", (Spec("part", (max(1, nbytes // 4),)),), forward_s / len(pieces), seconds)
        for place, (nbytes, seconds) in enumerate(reversed(pieces))  # in forward order
    ]
    speed = EVEN
    slow = next((cause for cause in causes if cause.cause == "slow_rank"), None)
    if slow is not None and forward_s + backward_s > 0:
        place = [side.number for side in activity.workers].index(slow.rank or 0)
        speed = Speed(slow_rank=place, slowdown=1 + slow.seconds / (forward_s + backward_s))
    late = next((cause.seconds for cause in causes if cause.cause == "late_loader"), 0.0)  # for which all wait
    trace, batches = Trace("recording", tuple(layers)), Batches(_middle(activity, "loading") + late)
    model = traced("recording", trace, 1, batches, speed)
    return Varied(setting, model, simulate(setting, model))


def _pieces(activity: Activity) -> list[tuple[int, float]]:
    """The gradients in the order of backward: bytes, and the seconds after which each is ready after the one before."""
    backward_s = _middle(activity, "backward")
    begin, end = activity.steps[0, activity.steps.shape[1] // 2]
    side = activity.workers[0]
    passes = [one.begin_s for one in side.thread if one.stage == "backward" and begin <= one.begin_s < end]
    first: dict[int | None, ExchangeSpan] = {}
    for one in side.exchanges:
        if begin <= one.submit_s < end and bucket_of(one) is not None:
            first.setdefault(bucket_of(one), one)  # without the second half of an exchange in two phases
    rows = sorted(first.values(), key=lambda one: one.submit_s)
    nbytes = sum(one.nbytes for one in rows)
    if not nbytes:
        raise UsageError("no exchange of gradients is in the iterations that were looked at")
    ready = [one.submit_s - passes[0] for one in rows] if passes else [backward_s]
    late = not passes or ready[0] >= 0.9 * backward_s
    found, before = [], 0.0
    for number, one in enumerate(rows):
        count = max(1, min(_PIECES * one.nbytes // nbytes, one.nbytes // 4096))
        seconds = backward_s * one.nbytes / nbytes if late else max(0.0, min(backward_s, ready[number]) - before)
        before = max(before, ready[number]) if not late else before
        found += [(one.nbytes // count, seconds / count)] * count
    rest = backward_s - sum(seconds for _, seconds in found)
    if rest > 0:
        found[-1] = found[-1][0], found[-1][1] + rest
    return found


# The network


def _cluster(activity: Activity, strategy: Strategy, pieces: Sequence[tuple[int, float]]) -> Cluster:
    """A network with the recorded cost of exchanges, each constant with the spread over iterations as its range."""
    rows = buckets_of(activity)
    workers = len(activity.workers)
    nbytes = sum(row[0].nbytes for row in rows)
    if activity.servers or not rows or strategy.codec != NONE:
        alpha, beta, spread = _of_links(activity)
    else:
        active = _active(activity, rows)
        part, spread = fixed_part(activity, rows), _spread(active)
        setting = setting_of(strategy, _network(1.0, 0.0), workers)
        plan = setting.strategy.plan(setting.placement.group)
        messages, moved = plan_s(plan, 0.0, setting.cluster), plan_s(plan, 1e6, _network(0.0, 1.0)) / 1e6
        alpha, beta = part * sum(active) / len(rows) / messages, (1 - part) * sum(active) / nbytes / moved
    others = {"iteration": _middle(activity, "script")}
    if strategy.codec != NONE and nbytes:
        coding_s = max(total(side.coding) for side in activity.workers)
        others[f"codecs.{write('codecs', strategy.codec)}.encode"] = coding_s / nbytes
        others[f"codecs.{write('codecs', strategy.codec)}.decode"] = 0.0
    if not strategy.server_holds_weights:
        others["update"] = _middle(activity, "optimizer") / sum(nbytes for nbytes, _ in pieces)
    made = _network(alpha, beta, spread)
    constants = {**made.constants, **{name: Constant(value, measured=True) for name, value in others.items()}}
    return replace(made, constants=constants)


def _network(alpha: float, beta: float, spread: tuple[float, float] = (1.0, 1.0)) -> Cluster:
    return Cluster(
        "the recorded run",
        {
            name: Constant(value, value * min(1.0, spread[0]), value * max(1.0, spread[1]), measured=True)
            for name, value in (("between.alpha", alpha), ("between.beta", beta))
        },
    )


def _active(activity: Activity, rows: Sequence[Sequence[ExchangeSpan]]) -> list[float]:
    """The seconds of each iteration in which an exchange was under way that all workers had begun."""
    times = union((max(one.begin_s for one in row), max(one.end_s for one in row)) for row in rows)
    return [total(common(times, [(begin, end)])) for begin, end in activity.steps[0].tolist()]


def _spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The tenth and the ninetieth percentile, relative to the mean."""
    mean = sum(seconds) / len(seconds)
    if mean <= 0:
        raise UsageError("no exchange of gradients was under way on all ranks at once")
    low, high = np.quantile(seconds, (0.1, 0.9)) / mean
    return float(low), float(high)


def _of_links(activity: Activity) -> tuple[float, float, tuple[float, float]]:
    """Seconds per message and per byte at the busiest process, from its messages."""
    messages = [message for link in activity.links.values() for message in link.messages]
    small = [message.end_s - message.ready_s for message in messages if message.nbytes <= _FEW_BYTES]
    busiest = (0.0, 0.0)
    for side in activity.sides:
        its = [link for (_, dst), link in activity.links.items() if dst == side.number]
        busy_s = total(union(part for link in its for part in link.busy))
        nbytes = sum(link.nbytes for link in its)
        if nbytes > busiest[0]:
            busiest = nbytes, busy_s
    if not busiest[0]:
        raise UsageError("the recording has no messages, as over shared memory, from which to learn the network")
    return (median(small) if small else 0.0), busiest[1] / busiest[0], _ASSUMED
