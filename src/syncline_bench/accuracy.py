"""``syncline accuracy``: trains a network under strategies or codecs, and compares the accuracies that it reaches.

Owns the list of trainings, their order, and the reuse of an earlier table. The result file is written after every
training, so an interrupt or a failure loses at most one training. ``cases`` checks and ``processes`` runs a training,
as for ``compare``; ``report`` interprets the numbers.

Codecs are trained under the architecture ``direct``, which adds in a fixed order, so no choice made by a measurement
can make two trainings differ. A codec that ``direct`` cannot carry uses the exchange of its own kind. Every training
records its exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from syncline.codecs import Chooses, Wraps
from syncline.errors import UsageError
from syncline.strategy.grammar import Part, read_part
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import build
from syncline.tuning.codec_times import every_codec, told, ways

from .cases import Case, Comparison, comparison_of
from .compare import INTERRUPTED, SILENCE_LIMIT_S
from .display import Display, Task, console_beside
from .machine import provenance
from .processes import measure
from .report import accuracy as shown
from .report.accuracy import AccuracyResult, AccuracyRun
from .report.comparison import BASELINE, Row
from .report.files import keep_text, replace_text, result_paths
from .site import Site

SEEDS = (0, 1, 2)

_LABEL_MOST = 24

Way = tuple[str, bool]
"""A codec's text without error feedback, and whether error feedback is added."""

DENSE: Way = ("none", False)
"""The exchange without a codec: the reference for all codecs."""


@dataclass(frozen=True)
class Training:
    """One training of the table. ``codec`` and ``feedback`` are None if the request names strategies."""

    case: Case
    seed: int
    codec: str | None = None
    feedback: bool | None = None

    @property
    def key(self) -> tuple[str, int]:
        """The identity of the training within a table: strategy and seed."""
        return self.case.strategy, self.seed

    @property
    def label(self) -> str:
        """The name in the progress display, short enough for a terminal of 80 columns."""
        name = self.codec or self.case.strategy
        if len(name) > _LABEL_MOST:
            name = f"...{name[3 - _LABEL_MOST :].lstrip()}"  # the ends of strategies differ, not their beginnings
        return f"{name}{' fb' if self.feedback else ''} seed {self.seed}"


@dataclass(frozen=True)
class Request:
    """The checked request. The trainings of the reference come first; the seeds of one row are adjacent."""

    comparison: Comparison
    workers: int
    trainings: tuple[Training, ...]


def run(
    *,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    report_path: Path | None = None,
    resume_path: Path | None = None,
    console: Console | None = None,
    **options: Any,
) -> int:
    """Run the trainings of ``request_of(**options)``, print the table and write the files. Returns the exit status.

    The status is 0 if every training finished with equal replicas, 130 after an interrupt (finished trainings are
    written), else 1. With ``resume_path``, the finished trainings of that file are kept and only the missing ones run;
    the file is overwritten unless ``json_path`` names another. Raises UsageError before any process starts.
    """
    paths = {"--json": json_path or resume_path, "--markdown": markdown_path, "--report": report_path}
    request = request_of(**options)
    target, markdown, report = result_paths(paths)
    console = console or console_beside(target, markdown, report)
    result = _origin(request)
    if resume_path is not None:
        result = resumed(result, resume_path)
        console.print(f"{len(result.runs)} trainings of {resume_path} are kept", style="dim", markup=False)
    keeper = _Keeper(request, result, target)
    interrupted = False
    try:
        with Display(console) as display:
            carry_out(request, keeper, display)
    except KeyboardInterrupt:
        interrupted = True
        kept = target is not None and keeper.result.runs
        console.print("interrupted" + (": the trainings so far are kept" if kept else ", and no training is kept"))
    result = keeper.result
    console.print(shown.render(result))
    if result.runs:
        _write(result, target, markdown, report)
    if interrupted:
        return INTERRUPTED
    return 0 if all(training.finished for training in result.runs) else 1


def request_of(
    workload: str = "digits",
    workers: int = 4,
    seeds: Sequence[int] = SEEDS,
    codecs: Sequence[str] = (),
    strategies: Sequence[str] = (),
    epochs: int | None = None,
    iterations: int | None = None,
    launcher: str = "auto",
) -> Request:
    """Check a request for strategies, or for codecs (all codecs if neither is named). Raises UsageError.

    The reference is the strategy ``single`` (one worker) if listed, else the first strategy. For codecs it is the
    dense exchange.
    """
    if not seeds or min(seeds) < 0:
        raise UsageError(f"--seeds has to be one or more numbers from 0, got {', '.join(map(str, seeds)) or 'none'}")
    if len(set(seeds)) < len(seeds):
        raise UsageError("a seed is listed twice: leave one of them out")
    if codecs and strategies:
        raise UsageError("--codecs and --strategies exclude each other: name a codec as a strategy, direct codec=int8")
    ways = () if strategies else ways_of(codecs)
    asked = strategies or [strategy_of(way) for way in ways]
    comparison = comparison_of(workload, workers, asked, epochs, iterations, seed=seeds[0], launcher=launcher)
    if not comparison.scored:
        raise UsageError(
            f"the workload {workload} has no test set, so it has no accuracy: use digits, text or cifar10:PATH"
        )
    texts = [case.strategy for case in comparison.cases]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise UsageError(f"two of the presets stand for {twice}, which would be trained twice: leave one of them out")
    alone = any(text.strip() == BASELINE for text in asked)
    cases = comparison.cases[0 if alone else 1 :]
    names = ways or [(None, None)] * len(cases)
    trainings = tuple(Training(case, seed, *name) for case, name in zip(cases, names, strict=True) for seed in seeds)
    return Request(comparison, workers, trainings)


def ways_of(texts: Sequence[str]) -> tuple[Way, ...]:
    """The dense exchange, then each codec with and without error feedback. Without ``texts``, all codecs.

    A codec that chooses another codec for each tensor has its own feedback and is listed once.
    """
    found: list[Way] = [DENSE]
    for text in texts or every_codec(choosing=True):
        name, _ = told(text)
        if isinstance(build("codecs", read_part(name)), Chooses):
            found.append((name, True))
        elif name != DENSE[0]:
            found += ways(text)
    return tuple(dict.fromkeys(found))


def strategy_of(way: Way) -> str:
    """The text of the strategy that trains with this codec, with or without error feedback."""
    name, feedback = way
    codec = read_part(name)
    if feedback and not isinstance(build("codecs", codec), (Chooses, Wraps)):
        codec = Part("feedback", (("", codec),))
    return str(Strategy(architecture=Part("direct"), codec=codec))


def carry_out(request: Request, keeper: _Keeper, display: Display) -> None:
    """Run the missing trainings one after the other, and keep each result at once."""
    there = {run.key for run in keeper.result.runs}
    todo = [training for training in request.trainings if training.key not in there]
    site = Site(launcher=request.comparison.launcher)
    with display.task("accuracy", sum(training.case.iterations for training in todo)) as task:
        progress = _Progress(task)
        for number, training in enumerate(todo, 1):
            progress.doing = f"{number}/{len(todo)} {training.label}"
            row = measure(training.case, request.comparison.workload, training.seed, SILENCE_LIMIT_S, progress, site)
            run = run_of(training, row)
            keeper.add(run)
            if run.error is not None:
                display.say(f"{training.label}: failed: {run.error}")


def run_of(training: Training, row: Row) -> AccuracyRun:
    """The result of a training from its row. Replicas that differ are an error."""
    error = row.error
    if error is None and not row.replicas_equal:
        error = "the replicas differ at the end of the training"
    return AccuracyRun(
        training.codec,
        training.feedback,
        training.seed,
        strategy=row.strategy,
        accuracy=row.accuracy,
        loss=row.loss,
        bytes_sent_per_step=row.bytes_sent_per_step,
        chosen=row.chosen,
        error=error,
        replica_sha256=row.replica_sha256,
        curve=row.curve,
    )


def resumed(fresh: AccuracyResult, path: Path) -> AccuracyResult:
    """``fresh`` with the finished trainings of the file. Raises UsageError if it is not of the same work."""
    before = fresh.earlier(path)
    kept = tuple(run for run in before.runs if run.finished)
    # Rows are compared with the old reference until the new reference has an accuracy.
    return replace(before, runs=kept).beside(fresh.reference)


class _Keeper:
    """Keeps the results so far in memory and in the result file."""

    def __init__(self, request: Request, result: AccuracyResult, path: Path | None) -> None:
        self.result, self._path = result, path
        self._order = [training.key for training in request.trainings]
        self._reference = request.trainings[0].case.strategy

    def add(self, run: AccuracyRun) -> None:
        """Add a result, and write the result file if there is one."""
        self.result = self.result.with_run(run).arranged(self._order).beside(self._reference)
        keep_text(self._path, self.result.to_json())


class _Progress:
    """Shows the iterations of all trainings together as one task of a display."""

    def __init__(self, task: Task) -> None:
        self.doing = ""
        self._task, self._before, self._iterations = task, 0, 0

    def begin(self, strategy: str, processes: int, iterations: int) -> None:  # noqa: ARG002 - all are alike
        """Show the label of the training that starts."""
        self._iterations = iterations
        self._task.at(self._before, self.doing)

    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None:  # noqa: ARG002
        """Show the iterations of the earlier trainings plus those of this one."""
        self._task.at(self._before + iteration, self.doing)

    def end(self, outcome: str) -> None:  # noqa: ARG002 - the result says it
        """Count all iterations of the training as done."""
        self._before += self._iterations


def _write(result: AccuracyResult, target: Path | None, markdown: Path | None, report: Path | None) -> None:
    """Write all requested files. If one cannot be written, raise its error after the others are written."""

    def page() -> str:
        from .report.page import accuracy_page  # matplotlib is only loaded for a page

        return accuracy_page(result)

    texts = ((target, result.to_json), (markdown, lambda: shown.markdown(result)), (report, page))
    faults = []
    for path, text in texts:
        try:
            if path is not None:
                replace_text(path, text())
        except UsageError as fault:
            faults.append(fault)
    if faults:
        raise faults[0]


def _origin(request: Request) -> AccuracyResult:
    """An empty result that describes this machine, this code and the request."""
    first = request.trainings[0].case
    return AccuracyResult(
        **provenance(),
        workload=request.comparison.workload,
        workers=request.workers,
        epochs=request.comparison.epochs,
        iterations=first.iterations,
        batch=first.batch,
        reference=first.strategy,
    )
