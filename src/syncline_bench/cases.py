"""Checks all arguments of a comparison before any process starts, and makes its plan, the ``Comparison``.

Owns the checks of numbers, strategies, peers, workload, lab rate, paths, and the packages that a report needs. Starts
no process and writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from syncline.errors import UsageError
from syncline.nouns import Rate
from syncline.registry import Entry
from syncline.strategy.grammar import read_value
from syncline.strategy.words import Preset
from syncline.timeline.folder import checked_target

from .contenders import Contender, belongs, check_peers, check_strategies, contender_of
from .frameworks import DEFAULT, check_workload, frameworks_of
from .report.comparison import BASELINE
from .report.files import result_paths
from .site import AUTO, Launcher, check_site, read_launcher
from .workloads import AT_ONCE, EVEN, Pipeline, Speed, Trace, Workload, load

LOOKS = 8
"""Evaluations per epoch if a target accuracy is given."""


@dataclass(frozen=True)
class Case:
    """One row to measure: a strategy or peer with its numbers of workers and servers. ``batch`` is the global batch.

    ``rate`` is the strategy's own limit in bits/s, or None. ``requested`` is the user's text, ``preset`` the preset
    that it names, if any. ``Job`` explains ``evaluate_every`` and ``target``.
    """

    strategy: str
    workers: int
    servers: int
    batch: int
    iterations: int
    rate: float | None = None
    preset: Preset | None = None
    requested: str | None = None
    evaluate_every: int = 0
    target: float | None = None
    framework: str = DEFAULT

    @property
    def name(self) -> str:
        """The name in the progress display and in timelines."""
        name = self.strategy if self.preset is None else self.preset.name
        return name if self.framework == DEFAULT else f"{self.framework} {name}"


@dataclass(frozen=True)
class Comparison:
    """The checked plan of a comparison.

    ``lab`` is the rate of a lab's links, None without a lab. ``trace`` is the trace of a replayed workload; with
    ``pipeline`` and ``speed`` it gives the bounds of the rows. ``scored`` is true if there is a test set. ``target`` is
    the accuracy whose training time is wanted. ``launcher`` starts the processes.
    """

    workload: str
    cases: tuple[Case, ...]
    seed: int
    epochs: int | None
    iterations: int | None
    json_path: Path | None
    report_path: Path | None
    lab: Rate | None = None
    trace: Trace | None = None
    scored: bool = False
    pipeline: Pipeline = AT_ONCE
    timeline_path: Path | None = None
    speed: Speed = EVEN
    target: float | None = None
    launcher: Launcher = AUTO

    @property
    def processes(self) -> int:
        """The number of processes of the largest row. A lab needs as many hosts."""
        return max(case.workers + case.servers for case in self.cases)


def comparison_of(
    workload: str,
    workers: int | Sequence[int],
    strategies: Sequence[str],
    epochs: int | None = None,
    iterations: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    json_path: str | Path | None = None,
    report_path: str | Path | None = None,
    lab: str | None = None,
    timeline_path: str | Path | None = None,
    target: float | None = None,
    evaluate_every: int | None = None,
    framework: str | Sequence[str] = DEFAULT,
    launcher: str = "auto",
) -> Comparison:
    """Check all arguments and return the plan. Raises UsageError, or another SynclineError, with the remedy.

    ``batch`` replaces the workload's default and has the same meaning: per worker or for all workers. Each strategy has
    a row for each number of ``workers`` and each ``framework``; each framework's first row is its single worker. A peer
    has rows only under its own framework. With ``lab``, a rate such as ``1Gbit``, every process has its own host behind
    links of that rate. With a ``target`` accuracy, the model is evaluated after every ``evaluate_every`` steps, by
    default ``LOOKS`` times per epoch. ``launcher`` is a text of ``read_launcher``.
    """
    counts = _counts([workers] if isinstance(workers, int) else workers)
    _check_numbers(epochs, iterations, target)
    timeline = None if timeline_path is None else checked_target(timeline_path)
    json_file, report_file, timeline = result_paths({"--json": json_path, "--report": report_path, "--trace": timeline})
    rate, starts = None if lab is None else _rate(lab), read_launcher(launcher)
    check_site(starts, in_lab=rate is not None)
    chosen = [framework] if isinstance(framework, str) else list(framework)
    contenders = {count: _contenders(strategies, count, one_host=rate is None) for count in counts}
    entries = _able(chosen, [one for found in contenders.values() for one in found])
    loaded = load(workload)
    check_workload(entries, loaded)
    _check_scored(loaded, target, evaluate_every)
    for count, found in contenders.items():
        if found:
            loaded.speed.check(count)
    if iterations is None and epochs is None:
        epochs = loaded.epochs
    made = partial(_case, loaded, batch=batch, epochs=epochs, iterations=iterations)
    cases = tuple(
        _looked_at(made(one, count, framework=entry.name), loaded, target, evaluate_every)
        for entry in entries
        for count, one in _rows(contenders, entry.name)
    )
    return Comparison(
        loaded.name, cases, seed, epochs, iterations, json_file, report_file, rate, loaded.trace,
        loaded.test is not None, loaded.pipeline, timeline, loaded.speed, target, starts,
    )  # fmt: skip


def _able(frameworks: Sequence[str], contenders: Sequence[Contender]) -> Sequence[Entry]:
    """The frameworks. Raises UsageError for an unknown one, and for a contender that cannot train under them."""
    entries = frameworks_of(frameworks)
    check_peers(contenders, frameworks)
    check_strategies(contenders, entries)
    return entries


def _check_numbers(epochs: int | None, iterations: int | None, target: float | None) -> None:
    if epochs is not None and iterations is not None:
        raise UsageError("--epochs and --iterations both set the length of training: give one of them")
    if target is not None and not 0 < target <= 1:
        raise UsageError(f"--target has to be an accuracy above 0 and up to 1, such as 0.97, got {target:g}")


def _rows(contenders: Mapping[int, Sequence[Contender]], framework: str) -> list[tuple[int, Contender]]:
    """A framework's rows as (workers, contender): first the single worker, then all except other frameworks' peers."""
    every = [(count, one) for count, found in contenders.items() for one in found if belongs(one, framework)]
    return [(1, Contender(BASELINE)), *every]


def _check_scored(workload: Workload, target: float | None, evaluate_every: int | None) -> None:
    """Raise UsageError if an option needs accuracy and the workload has no test set."""
    asked = {"--target": target, "--evaluate-every": evaluate_every}
    for name, value in asked.items():
        if value is not None and workload.test is None:
            raise UsageError(f"{name}: the workload {workload.name} has no test set: use digits, text or cifar10:PATH")


def _looked_at(case: Case, workload: Workload, target: float | None, evaluate_every: int | None) -> Case:
    """The case with its evaluations during training."""
    if evaluate_every is None and target is not None:
        evaluate_every = max(1, workload.steps_per_epoch(case.batch, case.workers) // LOOKS)
    return replace(case, evaluate_every=evaluate_every or 0, target=target)


def _counts(workers: Sequence[int]) -> list[int]:
    """The numbers of workers, ascending. Raises UsageError for an empty list or a duplicate."""
    if len(set(workers)) < len(workers) or not workers:
        raise UsageError(f"--workers takes different numbers, got {', '.join(map(str, workers)) or 'none'}")
    return sorted(workers)


def _rate(text: str) -> Rate:
    rate: Rate = read_value(text, Rate, "--lab")
    if rate <= 0:
        raise UsageError(f"--lab has to be a rate above 0, such as 1Gbit, got {text!r}")
    return rate


def _contenders(strategies: Sequence[str], workers: int, *, one_host: bool) -> list[Contender]:
    """All strategies and peers, checked for this group. Raises UsageError for duplicates.

    ``single`` is skipped, because every comparison includes it.
    """
    found: dict[str, Contender] = {}
    for text in strategies:
        if text.strip() == BASELINE:
            continue
        contender = contender_of(text, workers, one_host=one_host)
        if contender.name in found:
            raise UsageError(f"the strategy {contender.name} is listed twice: leave one of them out")
        found[contender.name] = contender
    return list(found.values())


def _case(
    workload: Workload,
    contender: Contender,
    workers: int,
    batch: int | None,
    epochs: int | None,
    iterations: int | None,
    framework: str,
) -> Case:
    total = workload.total_batch(workers, batch)
    # steps_per_epoch also raises for a batch with fewer samples than workers.
    steps = workload.steps_per_epoch(total, workers)
    if iterations is None:
        iterations = steps * (workload.epochs if epochs is None else epochs)
    if steps < 1:
        raise UsageError(f"the workload {workload.name} is smaller than one batch of {total}: use a smaller --batch")
    asked = contender.preset, contender.requested or contender.text
    rate = contender.rate
    return Case(contender.text, workers, contender.servers, total, iterations, rate, *asked, framework=framework)
