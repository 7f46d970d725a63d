"""Runs ``syncline tune``: finds the strategy that trains a workload fastest here, within a time budget.

Owns the sequence of a tuning: check the arguments, start warm ranks (``warm``), measure the default strategy and the
network between the ranks, predict the candidates, and measure the candidates that a searcher asks for. At the end, the
best few and the default are measured in turn while time remains. Candidates that change the mathematics have to pass
the guard. ``candidates`` defines the space, and ``searchers`` have the search methods.

A failed candidate is listed with its error and skipped. The result file is replaced after every measurement, so an
interrupt loses at most one. ``resume`` tells the searcher the measurements of the file and continues the search.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from rich.console import Console

from syncline import registry
from syncline.costs.cluster import Cluster
from syncline.errors import SynclineError, UsageError
from syncline.nouns import Layer
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, NONE

from ..calibration.command import request_of
from ..cases import Case, Comparison, comparison_of
from ..display import RowDisplay, console_beside
from ..frameworks import DEFAULT, framework_of
from ..machine import provenance
from ..predict import settings
from ..predict.networks import load_network, parse_network, to_json
from ..report import tuning, units
from ..report.files import keep_text
from ..report.tuning import Tried, Tuned
from ..searchers import Searcher
from ..site import Site, site_of
from ..warm import Trained, WarmRanks
from ..workloads import Trace, TracedLayer, Workload, load
from .candidates import Offer, changes_mathematics, choices_of, text_left_open, text_of
from .foresight import Foresight
from .guard import judge

FINAL_SHARE = 0.3
"""The share of the budget for the final measurements of the best few."""

FINALISTS = 3
CALIBRATING_SHARE, PREDICTING_SHARE, GUARD_SHARE = 0.1, 0.1, 0.25
SHARE_OF_A_CANDIDATE = 1 / 20
"""The share of the budget for the iterations of one measurement, within the limits of ``COUNTED``."""

COUNTED = (3, 30)
"""The fewest and the most iterations whose median is a measurement."""

UNCOUNTED, UNTIL_CHOSEN = 2, 10
"""The first iterations that do not count: in general, and for a schedule that measures layers before it chooses."""

GUARDED = (30, 300)
"""The fewest and the most steps of a paired run."""

FIRST_SESSION = 1 / 3
"""The estimated overhead of a later session, relative to that of the ranks' first session."""

CLEARLY = 0.01
"""A candidate replaces the default only if it is faster by more than this share of an iteration."""

SILENCE_LIMIT_S = 120.0
INTERRUPTED = 130


@dataclass(frozen=True)
class Request:
    """The checked arguments of a tuning.

    ``asked`` has the fixed words of the strategy. ``loss`` is the most that a lossy candidate may lose; None excludes
    lossy candidates. ``before`` is the earlier result to resume.
    """

    comparison: Comparison
    case: Case
    workload: Workload
    asked: Strategy
    budget_s: float
    searcher: str
    seed: int
    loss: float | None = None
    network: Cluster | None = None
    before: Tuned | None = None

    @property
    def default(self) -> str:
        """The strategy that a run has without the tuning: the fixed words alone."""
        return str(self.asked)


def run(*, console: Console | None = None, **options: Any) -> int:
    """Run the tuning of ``request_of_tuning(**options)``, print the table and write the file. Returns the exit status.

    The status is 0, or 130 after an interrupt. Raises UsageError before any process starts, and later if the budget is
    too small for one measurement.
    """
    request = request_of_tuning(**options)
    target = request.comparison.json_path
    course = Course(request, lambda result: keep_text(target, result.to_json()))
    output = console or console_beside(target)
    interrupted = False
    try:
        with RowDisplay(Console(stderr=True) if console is None else console) as display:
            course.run(display)
    except KeyboardInterrupt:
        interrupted = True
        output.print("interrupted: what was measured is kept" if target else "interrupted")
    result = course.result
    if target is not None:
        result.save(target)
    output.print(tuning.render(result))
    return INTERRUPTED if interrupted else 0


def request_of_tuning(
    workload: str,
    workers: int,
    budget_s: float = 60.0,
    strategy: str = "",
    searcher: str = "bayes",
    framework: str = DEFAULT,
    seed: int = 0,
    lab: str | None = None,
    batch: int | None = None,
    network: str | None = None,
    lossy: bool = False,
    loss: float = 0.02,
    json_path: Path | None = None,
    resume_path: Path | None = None,
) -> Request:
    """Check all arguments before any process starts. Raises UsageError with the remedy."""
    if budget_s <= 0:
        raise UsageError(f"--budget has to be more than 0 seconds, such as 60s, got {budget_s:g}s")
    registry.get("searchers", searcher)
    asked = Strategy.parse(strategy)
    if asked.servers:
        raise UsageError(
            f"{strategy!r} has separate server processes, and tune starts only workers: use on=workers, as in"
            f" ps(servers={asked.servers}, on=workers), or measure it with syncline compare"
        )
    target = json_path or resume_path
    comparison = comparison_of(
        workload, workers, [str(asked)], None, 1, batch, seed, target, lab=lab, framework=framework
    )
    loaded = load(workload)
    if not loss >= 0:
        raise UsageError(f"--loss, the accuracy that may be lost, must be 0 or more, such as 0.02, got {loss:g}")
    if lossy and loaded.trace is not None:
        raise UsageError(
            f"--lossy: the workload {workload} replays times and learns nothing, so a paired run cannot measure the"
            " accuracy under a codec: tune a workload that learns, such as digits, or compare only speeds with"
            " syncline compare"
        )
    request = Request(
        comparison, comparison.cases[-1], loaded, asked, budget_s, searcher, seed, loss if lossy else None,
        None if network is None else load_network(network),
    )  # fmt: skip
    return request if resume_path is None else replace(request, before=_empty(request).earlier(resume_path))


def _empty(request: Request) -> Tuned:
    case, comparison = request.case, request.comparison
    lab = None if comparison.lab is None else Site(rate=comparison.lab).name
    return Tuned(
        **provenance(),
        default=request.default,
        workload=comparison.workload,
        workers=case.workers,
        framework=case.framework,
        lab=lab,
        budget_s=request.budget_s,
        searcher=request.searcher,
        seed=request.seed,
        loss=request.loss,
    )


@dataclass
class Book:
    """The measurements and verdicts of all candidates, by their texts."""

    times_s: dict[str, list[float]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    efficiency: dict[str, float] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def measured_s(self, text: str) -> float | None:
        """The median of a candidate's measurements; None without any, or if it was refused."""
        found = self.times_s.get(text)
        return median(found) if found and text not in self.refused else None

    def counts_s(self, text: str) -> float | None:
        """The seconds that candidates are compared by: iteration time / statistical efficiency."""
        found = self.measured_s(text)
        return None if found is None else found / self.efficiency.get(text, 1.0)

    def fastest(self) -> list[str]:
        """The measured candidates that were not refused, the fastest first."""
        found = {text: seconds for text in self.times_s if (seconds := self.counts_s(text)) is not None}
        return sorted(found, key=found.__getitem__)

    def take_over(self, before: Tuned) -> None:
        """Enter the measurements and verdicts of an earlier tuning."""
        for one in before.tried:
            if one.times_s or one.why.startswith(("failed", "refused")):
                self.times_s[one.strategy] = list(one.times_s)
                self.why[one.strategy] = one.why
                if one.efficiency is not None:
                    self.efficiency[one.strategy] = one.efficiency
                if one.measured_s is None:
                    self.refused.add(one.strategy)


class Course:
    """A tuning from its first measurement to its last. ``keep`` is called with the result after each measurement."""

    def __init__(
        self, request: Request, keep: Callable[[Tuned], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request, self._keep, self._clock = request, keep, clock
        self._begun = clock()
        self._book, self._offered = Book(), list[str]()
        self._might_run = defaultdict[str, list[str]](list)  # by a candidate that leaves its architecture open
        self._predictions: dict[str, float | None] = {}
        self._foresight = Foresight(None, {}, request.case.workers, clock)
        self._networks: dict[str, Cluster] = {}
        self._explanation = ""
        self._overhead_s = 0.0  # the time of a measurement beyond its iterations
        self._exact: Trained | None = None
        self._steps = 0
        self._origin = _empty(request)
        if request.before is not None:
            self._book.take_over(request.before)
            self._networks = {
                name: parse_network(json.dumps(held), f"the network of {name}")
                for name, held in request.before.networks.items()
            }
        if request.network is not None:
            self._networks = {"auto": request.network}

    @property
    def _left_s(self) -> float:
        return self._request.budget_s - (self._clock() - self._begun)

    def run(self, display: RowDisplay) -> None:
        """Start the ranks and tune. Raises UsageError if the budget is too small."""
        comparison, workers = self._request.comparison, self._request.case.workers
        with site_of(workers, comparison.lab, display.say) as site:
            framework = self._request.case.framework
            with WarmRanks(workers, comparison.workload, framework, display, site) as ranks:
                try:
                    self.search(ranks, display)
                except KeyboardInterrupt:
                    ranks.end_at_once()  # without waiting for the current measurement
                    raise

    def search(self, ranks: WarmRanks, display: RowDisplay) -> None:
        """Spend the budget: calibrate, predict the candidates, and measure those that the searcher asks for."""
        layers = self._first(ranks)
        self._calibrate(ranks, display)
        model = self._model(layers)
        self._foresight = Foresight(model, self._networks, self._request.case.workers, self._clock)
        self._foresight.deadline = self._clock() + PREDICTING_SHARE * self._request.budget_s
        searcher = self._searcher(layers if model is None else model.layers)
        display.say(f"{len(self._offered)} candidates")
        while self._left_s > self._final_s + self._expected_s(None) and (asked := searcher.ask()) is not None:
            text = text_of(asked)
            if self._left_s < self._final_s + self._expected_s(text):
                self._book.why.setdefault(text, "not measured: it would exceed the rest of the budget")
                continue
            self._measure(ranks, text)
            searcher.tell(asked, self._book.counts_s(text))
        self._decide(ranks)
        self._explain()
        self._keep(self.result)

    @property
    def _final_s(self) -> float:
        """The time reserved for one final round of the best few and the default, at most ``FINAL_SHARE``."""
        return min(FINAL_SHARE * self._request.budget_s, (1 + FINALISTS) * self._expected_s(self._request.default))

    # The parts of a tuning.

    def _first(self, ranks: WarmRanks) -> tuple[Layer, ...]:
        """Start the ranks and measure the default. Returns the layers if its schedule measures their times."""
        started_s = ranks.start()
        text = self._request.default
        known = self._book.measured_s(text)
        if known is not None and self._request.workload.trace is not None:
            return ()
        begun = self._clock()
        trained = self._measure(ranks, text, iterations=UNTIL_CHOSEN + COUNTED[0])
        if trained.row.error is not None:
            raise SynclineError(
                f"the default, {text}, failed, so no candidate can be compared with it: {trained.row.error}"
            )
        if self._left_s <= 0:
            took_s = self._clock() - begun
            raise UsageError(
                f"--budget {self._request.budget_s:g}s is too small: the ranks start in {started_s:.1f} s, and one"
                f" measurement takes {took_s:.1f} s: give {5 * (started_s + took_s):.0f}s or more"
            )
        return trained.layers

    def _calibrate(self, ranks: WarmRanks, display: RowDisplay) -> None:
        """Measure the network under each transport of the space while time remains, and always under the first."""
        limit_s = CALIBRATING_SHARE * self._request.budget_s
        begun, longest_s = self._clock(), 0.0
        axes = {axis.name: axis.choices for axis in self._offer(()).axes()}
        for transport in axes["transport"]:
            name, now = str(transport).partition("(")[0], self._clock()
            if name in self._networks or (self._networks and now - begun + longest_s > limit_s):
                continue
            codecs = [one for one in map(str, axes["codec"]) if one not in ("none", "auto")]
            asked = request_of(transport=transport, codecs=codecs or ["none"], budget_s=limit_s / 8)
            asked = replace(asked, lab_rate=self._request.comparison.lab)
            try:
                found = ranks.calibrate(asked, SILENCE_LIMIT_S)
            except SynclineError as error:
                display.say(f"no predictions for transport={transport}: {error}")
                if name == "auto":
                    return
                continue
            self._networks[name] = found
            if "auto" not in self._networks:
                self._networks["auto"] = found
            longest_s = max(longest_s, self._clock() - now)
            display.say(f"network under transport={transport} measured in {self._clock() - now:.1f} s")

    def _model(self, layers: Sequence[Layer]) -> settings.Model | None:
        """The model for predictions: a replayed trace, or the layers with the times of the first run; else None."""
        workload = self._request.workload
        if workload.trace is not None:
            return settings.model_of(workload)
        if not layers:
            return None
        rows = tuple(TracedLayer(each.spec.name, (each.spec,), each.forward_s, each.backward_s) for each in layers)
        batch = self._request.case.batch // self._request.case.workers
        return settings.traced(workload.name, Trace(workload.name, rows), batch, speed=workload.speed)

    def _offer(self, layers: Sequence[Layer]) -> Offer:
        request = self._request
        refuses = framework_of(request.case.framework).target.check  # type: ignore[attr-defined]
        one_host = request.comparison.lab is None
        lossy = request.loss is not None
        return Offer(request.asked, request.case.workers, one_host, lossy, tuple(layers), refuses)

    def _searcher(self, layers: Sequence[Layer]) -> Searcher:
        """Make the searcher, and tell it the measurements so far."""
        request = self._request
        space = self._offer(layers).space(self._predicted)
        self._offered = [text_of(candidate) for candidate in space.candidates]
        for candidate, text in zip(space.candidates, self._offered, strict=True):
            if (left_open := text_left_open(candidate)) is not None:
                self._might_run[left_open].append(text)
        first = {axis.name: axis.choices[0] for axis in space.axes}
        plainest = sorted(space.candidates, key=lambda one: sum(one[name] != first[name] for name in one))
        for candidate in plainest:  # predictions have a deadline: the candidates nearest to the default come first
            self._predicted(text_of(candidate))
        made = cast("Searcher", registry.get("searchers", request.searcher).target(space, seed=request.seed))
        for text in list(self._book.times_s):
            if (choices := choices_of(space, text)) is not None:
                made.tell(choices, self._book.counts_s(text))
        return made

    def _predicted(self, text: str) -> float | None:
        """The predicted seconds of a candidate; None if there was no time for the prediction."""
        if text not in self._predictions:
            self._predictions[text] = self._predict(text)
        return self._predictions[text]

    def _predict(self, text: str) -> float | None:
        """Predict a candidate. For ``auto``, it is the prediction of the best algorithm that a run may choose."""
        strategy = Strategy.parse(text)
        if strategy.architecture != AUTO or strategy.schedule == AUTO or strategy.codec != NONE:
            return self._foresight.seconds(text)
        known = [seconds for one in self._might_run[text] if (seconds := self._foresight.seconds(one)) is not None]
        return min(known, default=None)

    def _expected_s(self, text: str | None) -> float:
        """The expected time of a candidate's measurement; for None, the time of the default's iterations."""
        usual_s = self._book.measured_s(self._request.default) or 0.0
        predicted = None if text is None else self._predictions.get(text)
        usually = self._predictions.get(self._request.default)
        each_s = usual_s if predicted is None or not usually else usual_s * predicted / usually
        return self._overhead_s + each_s * (self._uncounted(text) + self._counted(each_s))

    def _counted(self, each_s: float) -> int:
        """The number of iterations that a measurement counts if each takes ``each_s``."""
        wanted = SHARE_OF_A_CANDIDATE * self._request.budget_s / each_s if each_s > 0 else COUNTED[1]
        return int(min(COUNTED[1], max(COUNTED[0], wanted)))

    def _uncounted(self, text: str | None) -> int:
        if text is None:
            return UNCOUNTED
        strategy = Strategy.parse(text)
        chooses = strategy.schedule == AUTO or strategy.schedule_object().measures
        return UNTIL_CHOSEN if chooses else UNCOUNTED

    def _measure(self, ranks: WarmRanks, text: str, iterations: int | None = None) -> Trained:
        """Train a candidate for some iterations, and enter its time, or its failure."""
        uncounted = self._uncounted(text)
        if iterations is None:
            each_s = self._book.measured_s(text) or self._book.measured_s(self._request.default) or 0.0
            iterations = uncounted + self._counted(each_s)
        case, begun = replace(self._request.case, strategy=text, iterations=iterations), self._clock()
        trained = ranks.train(case, self._request.seed, SILENCE_LIMIT_S, warmup=uncounted)
        error = trained.row.error
        if error is None and not trained.row.replicas_equal and not _apart(text):
            error = "the replicas differ after the last step"
        if error is not None:
            self._book.why[text] = f"failed: {error}"
            self._book.refused.add(text)
            self._book.times_s.setdefault(text, [])
        elif trained.row.iteration_s is not None:
            self._book.times_s.setdefault(text, []).append(trained.row.iteration_s)
            spent_s = self._clock() - begun - iterations * trained.row.iteration_s
            # The first session loads code that later ones find in memory.
            overhead_s = max(0.0, spent_s) * (1.0 if self._overhead_s else FIRST_SESSION)
            self._overhead_s = min(self._overhead_s or overhead_s, overhead_s)
            self._guard(ranks, text)
        self._keep(self.result)
        return trained

    def _guard(self, ranks: WarmRanks, text: str) -> None:
        """Make a paired run of a lossy candidate that is faster than the default, and accept or refuse it."""
        request, book = self._request, self._book
        if request.loss is None or not changes_mathematics(Strategy.parse(text)) or text in book.efficiency:
            return
        usual_s, seconds = book.measured_s(request.default), book.measured_s(text)
        if seconds is None or usual_s is None or seconds >= usual_s * (1 - CLEARLY):
            book.refused.add(text)
            book.why[text] = "refused: it is not faster than the default, which is exact"
            return
        if self._exact is None:
            wanted = GUARD_SHARE * request.budget_s / 4 / usual_s
            self._steps = int(min(GUARDED[1], max(GUARDED[0], wanted)))
            self._exact = self._paired(ranks, request.default)
            if self._exact.row.error is not None:
                raise SynclineError(f"the exact run of the guard failed: {self._exact.row.error}")
        found = judge(self._exact.row, self._paired(ranks, text).row, request.loss)
        book.why[text] = found.why
        if not found.accepted:
            book.refused.add(text)
        elif found.efficiency > 0:
            book.efficiency[text] = found.efficiency

    def _paired(self, ranks: WarmRanks, text: str) -> Trained:
        case = replace(self._request.case, strategy=text, iterations=self._steps)
        return ranks.train(case, self._request.seed, SILENCE_LIMIT_S, scored=True)

    def _decide(self, ranks: WarmRanks) -> None:
        """Measure the best few in turn with the default while time remains."""
        default = self._request.default
        finalists = [text for text in self._book.fastest() if text != default][:FINALISTS]
        while finalists:
            for text in (default, *finalists):
                if self._left_s < self._expected_s(text):
                    return
                if text not in self._book.refused:
                    self._measure(ranks, text)

    def _explain(self) -> None:
        result = self.result
        if result.iteration_s is None or result.default_iteration_s is None:
            return
        if result.best == result.default:
            self._explanation = f"no measured candidate is clearly faster than {result.default}"
            return
        gain = 1 - result.iteration_s / result.default_iteration_s
        why = self._foresight.explained(result.best, result.default)
        measured = f"measured: {units.percent(gain)} less time per iteration than {result.default}"
        guarded = self._book.why.get(result.best, "") if result.best in self._book.efficiency else ""
        self._explanation = "; ".join(filter(None, (why, measured, guarded)))

    @property
    def result(self) -> Tuned:
        """The result so far."""
        book, default = self._book, self._request.default
        usual_s = book.measured_s(default)
        fastest = book.fastest()
        best = default
        if fastest and usual_s is not None and cast(float, book.counts_s(fastest[0])) < usual_s * (1 - CLEARLY):
            best = fastest[0]
        texts = list(dict.fromkeys([*fastest, *book.times_s, *self._offered]))
        unseen = sorted(texts[len(fastest) :], key=lambda text: self._predictions.get(text) or float("inf"))
        tried = tuple(self._tried(text, best) for text in [*fastest, *unseen])
        return replace(
            self._origin,
            best=best if usual_s is not None else "",
            iteration_s=book.measured_s(best),
            default_iteration_s=usual_s,
            tried=tried,
            explanation=self._explanation,
            spent_s=self._clock() - self._begun,
            networks={name: json.loads(to_json(cluster)) for name, cluster in self._networks.items()},
        )

    def _tried(self, text: str, best: str) -> Tried:
        book = self._book
        ran = {best: "best", self._request.default: "default"}.get(text, "measured")
        if best == text == self._request.default:
            ran = "default, and best"
        why = book.why.get(text, ran if book.times_s.get(text) else "predicted, not measured")
        if text == best and book.why.get(text):
            why = f"best: {why}"
        times = tuple(book.times_s.get(text, ()))
        return Tried(text, self._predictions.get(text), book.measured_s(text), why, times, book.efficiency.get(text))


def _apart(text: str) -> bool:
    """Whether replicas may differ between exchanges: if the sync mode averages weights."""
    return hasattr(Strategy.parse(text).sync_mode(), "averages")
