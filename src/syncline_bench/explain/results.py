"""Explains results of ``compare``, ``tune`` and ``bench``: one of their rows, beside the others as measured changes.

Results have times by stage and no spans, so exposed communication has no finer cause than servers or the network; a
timeline (``--trace``) tells more. Without a choice the slowest row is explained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

from syncline.errors import DataError, UsageError
from syncline.plans.plan import ranks_text
from syncline.wire.meeting import printable

from ..report import units
from ..report.bench import BenchResult, Measured
from ..report.comparison import BASELINE, Result, Row
from ..report.explanation import Cause, Change, Explanation
from ..report.files import ResultFile
from ..report.tuning import Tuned
from .causes import LEAST

_Row = TypeVar("_Row")

_TELLS_MORE = "a timeline, compare --trace, tells more"


def explain_result(path: Path, text: str, only: str = "") -> Explanation:
    """The explanation of a result file. Raises UsageError for other files, or if ``only`` names no row."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is neither a timeline nor JSON: {error!r:.120}") from None
    read = _reader_of(path, data)
    try:
        found = read(text, only)
    except (TypeError, AttributeError, OverflowError, ValueError, KeyError) as error:
        if isinstance(error, UsageError):
            raise type(error)(f"{path}: {error}") from None
        raise DataError(f"{path} is damaged: {error!r:.120}") from None
    return replace(found, file=path.name)


def _reader_of(path: Path, data: Any) -> Callable[[str, str], Explanation]:
    """The function for a kind of result. Raises UsageError for kinds without an explanation."""
    keys = set(data) if isinstance(data, dict) else set()
    others = {"single_s": "predict", "causes": "explain", "runs": "accuracy", "constants": "calibrate"}
    kind = next((verb for key, verb in others.items() if key in keys), None)
    rows = data.get("rows") if isinstance(data, dict) else None
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if kind is None and "tried" in keys:
        return lambda text, only: _tuned(Tuned.from_json(text), only)
    if kind is None and "workload" in keys and "strategy" in first:
        return lambda text, only: _compared(Result.from_json(text), only)
    if kind is None and "transport" in first and "algorithm" in first:
        return lambda text, only: _benched(BenchResult.from_json(text), only)
    what = f"a result of syncline {kind}" if kind else "no timeline, flight record or result of Syncline"
    raise UsageError(
        f"{path} is {what}: explain reads timelines (--trace), flight records, and results of compare, tune and"
        " bench --sizes"
    )


def _chosen(rows: Iterable[_Row], only: str, name: Callable[[_Row], str], slow: Callable[[_Row], float]) -> _Row:
    """The slowest row whose name contains ``only``. UsageError if there is none."""
    found = [row for row in rows if only in name(row)]
    if not found:
        raise UsageError(f"it has no finished row{f' whose name contains {only!r}' if only else ''}")
    return max(found, key=slow)


def _origin(result: ResultFile) -> dict[str, Any]:
    names = ("machine", "cores", "versions", "commit", "modified", "source_sha256", "started")
    return {name: getattr(result, name) for name in names}


def _causes(found: Iterable[Cause], iteration_s: float) -> tuple[Cause, ...]:
    kept = (cause for cause in found if cause.seconds >= LEAST * iteration_s)
    return tuple(sorted(kept, key=lambda cause: -cause.seconds))


def _faster(changes: Iterable[Change], iteration_s: float) -> tuple[Change, ...]:
    return tuple(sorted((one for one in changes if one.iteration_s < iteration_s), key=lambda one: one.iteration_s))


# compare


def _compared(result: Result, only: str) -> Explanation:
    finished = [row for row in result.rows if row.iteration_s is not None and row.iteration_s > 0]
    others = [row for row in finished if row.strategy != BASELINE]
    row = _chosen(others, only, result.label, lambda row: row.iteration_s or 0.0)
    iteration_s = row.iteration_s or 0.0
    alone = result.baseline(row.framework)
    causes = _causes(_of_row(row, alone), iteration_s)
    beside = [
        Change(printable(result.label(one)), one.iteration_s or 0.0, measured=True)
        for one in others
        if one is not row and one.workers == row.workers and one.framework == row.framework
    ]
    stages = {
        name.removesuffix("_s"): getattr(row, name)
        for name in ("loading_s", "forward_s", "backward_s", "update_s", "exposed_comm_s")
        if getattr(row, name) is not None
    }
    return Explanation(
        kind="compare",
        name=printable(result.label(row)),
        healthy=not causes,
        iteration_s=iteration_s,
        iterations=max(0, row.iterations - row.warmup),
        workers=row.workers,
        stages_s=stages,
        causes=causes,
        changes=_faster(beside, iteration_s),
        remarks=(f"Without spans the cause is no closer than this: {_TELLS_MORE}.",) if causes else (),
        **_origin(result),
    )


def _of_row(row: Row, alone: Row | None) -> Iterable[Cause]:
    """The causes that the stages of a row show."""
    late_s = 0.0
    by_rank = row.compute_by_rank_s
    if row.slowest_rank is not None and row.slowest_rank < len(by_rank):
        usual_s = median_low(list(filter(None, by_rank)))
        late_s = by_rank[row.slowest_rank] - usual_s
        rest = [rank for rank in range(row.workers) if rank != row.slowest_rank]
        yield Cause(
            "slow_rank", late_s, rank=row.slowest_rank,
            said=f"rank {row.slowest_rank} computes for {units.seconds(by_rank[row.slowest_rank])}, the median worker"
            f" for {units.seconds(usual_s)}; {ranks_text(rest)} wait{'s' * (len(rest) == 1)} for it",
            remedy=f"look at the host of rank {row.slowest_rank}; {_TELLS_MORE}",
        )  # fmt: skip
    if row.loading_s:
        yield Cause(
            "slow_loading", row.loading_s,
            said="the ranks wait for their batches",
            remedy="load batches ahead, in other processes",
        )  # fmt: skip
    exposed_s = row.exposed_comm_s
    if exposed_s is None and alone is not None and alone.iteration_s is not None and row.iteration_s is not None:
        exposed_s = row.iteration_s - alone.iteration_s
    exposed_s = max(0.0, (exposed_s or 0.0) - late_s)
    if 0 < row.servers < row.workers:
        served_s = exposed_s * (1 - row.servers / row.workers)
        yield Cause(
            "shared_server", served_s, rank=row.workers,
            said=f"{row.workers} workers share {row.servers} server{'s' * (row.servers > 1)}",
            remedy=f"use more servers, ps(servers={row.workers}), or on=workers, or an allreduce such as ring",
        )  # fmt: skip
        exposed_s -= served_s
    yield Cause(
        "network", exposed_s,
        said="the training thread waits for communication",
        remedy=f"overlap it (schedule=wait_free), send fewer bytes (a codec), or use a faster network; {_TELLS_MORE}",
    )  # fmt: skip


# tune


def _tuned(result: Tuned, only: str) -> Explanation:
    times: dict[str, float] = {one.strategy: one.counts_s for one in result.tried if one.counts_s}
    if result.default and result.default_iteration_s:
        times[result.default] = result.default_iteration_s
    asked = only or result.default
    name = _chosen(times, asked if asked in times or only else "", str, lambda one: times[one])
    iteration_s = times[name]
    best = min(times, key=lambda one: times[one])
    causes = _causes(
        [Cause(
            "strategy", iteration_s - times[best],
            said=f"{printable(best)} takes {units.seconds(times[best])} on the same work",
            remedy=f"use it: {printable(best)}",
        )],
        iteration_s,
    )  # fmt: skip
    beside = [Change(printable(one), seconds, measured=True) for one, seconds in times.items() if one != name]
    return Explanation(
        kind="tune",
        name=printable(name),
        healthy=not causes,
        iteration_s=iteration_s,
        workers=result.workers,
        causes=causes,
        changes=_faster(beside, iteration_s),
        **_origin(result),
    )


# bench


def _benched(result: BenchResult, only: str) -> Explanation:
    rows = [row for row in result.rows if row.finished and row.median_s]
    row = _chosen(rows, only, _title, lambda one: _times(one, rows))
    seconds = row.median_s or 0.0
    smaller = [
        one for one in rows if one.contender == row.contender and one.place == row.place and 4 * one.bytes <= row.bytes
    ]
    near = max(smaller, key=lambda one: one.bytes, default=None)
    fixed_s = min(seconds, near.median_s or 0.0) if near is not None else 0.0
    share = "" if row.of_limit is None else f", at {units.percent(row.of_limit)} of the speed of the {row.limit}"
    causes = [
        Cause(
            "fixed_cost", fixed_s,
            said="a quarter of the bytes or fewer take"
            f" {units.seconds(fixed_s)}: so much hardly depends on the bytes",
            remedy="exchange more bytes at once, in larger buckets",
        ),
        Cause(
            "network", seconds - fixed_s,
            said=f"the time grows with the bytes{share}",
            remedy="send fewer bytes, or take the fastest contender",
        ),
    ]  # fmt: skip
    beside = [
        Change(printable(one.contender), one.median_s or 0.0, measured=True)
        for one in _beside(row, rows)
        if one is not row
    ]
    return Explanation(
        kind="bench",
        name=printable(_title(row)),
        iteration_s=seconds,
        iterations=row.repetitions,
        causes=_causes(causes, seconds),
        changes=_faster(beside, seconds),
        **_origin(result),
    )


def _title(row: Measured) -> str:
    return f"{row.contender} {row.collective} of {units.decimal_size(row.bytes)} on {row.ranks} ranks"


def _beside(row: Measured, rows: Sequence[Measured]) -> list[Measured]:
    """The contenders of the same work."""
    return [one for one in rows if (one.place, one.bytes) == (row.place, row.bytes)]


def _times(row: Measured, rows: Sequence[Measured]) -> float:
    """How many times as long as the fastest contender of the same work a row takes."""
    fastest_s = min(one.median_s or 0.0 for one in _beside(row, rows))
    return (row.median_s or 0.0) / fastest_s if fastest_s > 0 else 0.0
