"""Results as self-contained HTML pages: no network, no script, styles and charts inline.

Owns the words and the order of each page, and fills the template ``page.html.j2``. Tables are the terminal's with more
columns; the charts come from ``charts``. The template engine escapes everything from outside (strategy texts, errors,
machine names).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, TypeVar

import jinja2
from markupsafe import Markup

from syncline.timeline.chrome import Iteration
from syncline.timeline.flight import FlightRecord

from . import accuracy, bench, charts, comparison, flight, predictions, units
from .accuracy import AccuracyResult, AccuracyRow
from .bench import BARE, BenchResult, GradientResult, GradientRow, Measured, Verdict
from .columns import Column, Table, legend
from .comparison import BASELINE, Result, Row
from .explanation import CAUSES, Cause, Explanation
from .figures import Key, Style, css, strategy_styles
from .files import ResultFile, grouped
from .predictions import Prediction
from .timeline_charts import timeline_charts

_Row = TypeVar("_Row")
Facts = tuple[tuple[str, str], ...]
Section = dict[str, Any]
"""One table of a page: its parts by the template's names."""


def comparison_page(result: Result, timelines: Sequence[Iteration] = ()) -> str:
    """The page of a comparison, with an iteration of each of the recorded runs."""
    shown = comparison.table(result)
    keys = _keys(map(result.titled, result.rows))
    return _filled(
        title=f"Syncline: {result.workload}, {_contenders(result)}",
        heading=f"{result.workload}: {_contenders(result)}",
        summary=_compared(result),
        facts=_comparison_facts(result),
        tables=[_section("Results", shown, keys, _place)],
        reading=_reading([shown]),
        remarks=comparison.remarks(result),
        charts=(*charts.comparison_charts(result), *timeline_charts(timelines)),
    )


def accuracy_page(result: AccuracyResult) -> str:
    """The page of an accuracy table: its figures, then the curves of the trainings, a line per strategy."""
    shown = accuracy.table(result, codecs=False)
    styles = strategy_styles([row.strategy for row in result.rows])

    def place(row: AccuracyRow) -> tuple[str, ...]:
        workers = 1 if row.strategy == BASELINE else result.workers
        seeds = f"seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"
        return f"{workers} worker{'s' if workers > 1 else ''}, {seeds}", *_ran(row)

    return _filled(
        title=f"Syncline: accuracy, {accuracy.title_of(result)}",
        heading=f"Accuracy: {accuracy.title_of(result)}",
        summary=_learned(result),
        facts=(("length", accuracy.length_of(result)), *_origin(result), ("started", result.started)),
        tables=[_section("Results", shown, _keys(row.strategy for row in result.rows), place)],
        reading=_reading([shown]),
        charts=charts.accuracy_charts(result, styles),
    )


def bench_page(result: BenchResult, verdicts: Sequence[Verdict] = ()) -> str:
    """The page of a bench; ``verdicts`` are the goals to show, if any."""
    styles = charts.contender_styles(result)

    def keys(rows: Sequence[Measured]) -> list[Key]:
        return [_key(row.contender, styles[row.contender]) for row in rows]

    tables = bench.collectives(result)
    goals = [Key(verdict.goal, "") for verdict in verdicts]
    return _filled(
        title="Syncline: bench",
        heading="Collectives next to the alternatives",
        summary=_measured(result, [row.contender for row in result.rows if row.correct is False]),
        facts=_bench_facts(result),
        tables=[_section("Goals", bench.goals(verdicts), goals)] if verdicts else (),
        details=[_section(one.title, one, keys(one.rows), _chosen) for one in tables],
        reading=_reading(tables),
        charts=charts.bench_charts(result),
    )


def gradient_page(result: GradientResult) -> str:
    """The page of a bench of gradients."""

    def keys(rows: Sequence[GradientRow]) -> list[Key]:
        return [Key(row.form, charts.BARE_COLOR if row.form == BARE else charts.ADDED_COLOR) for row in rows]

    tables = bench.gradients(result)
    return _filled(
        title="Syncline: bench gradients",
        heading="Gradients in one block, next to copying them together and back",
        summary=_measured(result, [f"{row.form} ({row.workload})" for row in result.rows if row.correct is False]),
        facts=_bench_facts(result),
        details=[_section(one.title, one, keys(one.rows)) for one in tables],
        reading=f"{_reading(tables)} {bench.GRADIENT_WORDS}",
        charts=charts.gradient_charts(result),
    )


def prediction_page(result: Prediction) -> str:
    """The page of a predicted workload."""
    tables = predictions.iterations(result)
    networks = list(dict.fromkeys(row.network for row in result.rows))
    rows = [
        _section(f"Iterations, {name}", one, _keys(row.requested for row in one.rows), lambda row: (row.chosen,))
        for name, one in zip(networks, tables, strict=True)
    ]
    constants = [
        _section(f"Constants, {name}", Table(predictions.CONSTANTS, its), [Key(one.name, "") for one in its])
        for name, its in grouped(result.constants, lambda one: one.network).items()
    ]
    return _filled(
        title=f"Syncline: predicted {result.workload}",
        heading=f"{result.workload}, predicted on {', '.join(networks)}",
        summary="Simulated iterations, not measurements: their assumptions are below the charts.",
        origin="Assumptions",
        facts=(
            ("workload", result.workload),
            ("to be known", " ".join(result.warnings)),
            ("computed", result.started),
            *_origin(result),
        ),
        reading=" ".join((_reading(tables), *predictions.findings(result))),
        details=[*rows, *constants],
        charts=charts.prediction_charts(result),
    )


def flight_page(record: FlightRecord) -> str:
    """The page of a flight record: the verdict, its processes and a chart."""
    shown = flight.table(record)
    facts = tuple((part.name, text) for part, text in zip(record.parts, map(flight.fate, record.parts), strict=True))
    return _filled(
        title="Syncline: flight record",
        heading="Who waited for whom",
        summary=record.verdict,
        tables=[_section("Processes", shown, [Key(part.name, "") for part in record.parts])],
        reading=_reading([shown]),
        remarks=[*(f"{name} left no record." for name in flight.absent(record)), *record.unread],
        charts=(flight.flight_chart(record),),
        origin="What they said",
        facts=facts,
    )


def explanation_page(found: Explanation) -> str:
    """The page of an explanation: causes with their remedies, changes, and bars."""
    causes, changes = found.causes_table(), found.changes_table()

    def under(cause: Cause) -> tuple[str, ...]:
        return f"{cause.said}.", f"Remedy: {cause.remedy}." if cause.remedy else ""

    tables = [_section(causes.title, causes, [Key(one.cause, "") for one in causes.rows], under)]
    tables += [
        _section(changes.title, changes, [Key(one.change, "") for one in changes.rows], lambda one: (one.known,))
    ]
    ended = bool(found.causes) and found.causes[0].cause == "failure"
    words = legend((cause.cause, CAUSES.get(cause.cause, "")) for cause in found.causes)
    facts = (
        ("file", found.file),
        ("kind", found.kind),
        ("run", found.name),
        ("workers", str(found.workers or "")),
        ("as it is, by the model", "" if found.model_s is None else units.seconds(found.model_s)),
        *(_origin(found) if found.machine else ()),
    )
    return _filled(
        title=f"Syncline: explain {found.file or found.name}",
        heading="Why a run ended" if ended else "Why a run takes its time",
        summary=" ".join(found.lines()[:2]),
        tables=[one for one in tables if one["lines"]],
        reading=f"{_reading(one for one in (causes, changes) if one.rows)} {words}".strip(),
        remarks=found.remarks,
        charts=charts.explanation_charts(found),
        origin="What was read",
        facts=tuple((name, text) for name, text in facts if text),
    )


def _section(
    title: str, shown: Table[_Row], keys: Iterable[Key], under: Callable[[_Row], tuple[str, ...]] = lambda _: ()
) -> Section:
    columns: Sequence[Column[_Row]] = shown.on_page
    lines = [
        {
            "key": key,
            "under": list(filter(None, under(row))),
            "cells": [column.cell(row) for column in columns] if shown.measured(row) else [],
            "error": getattr(row, "error", None),
        }
        for row, key in zip(shown.rows, keys, strict=True)
    ]
    first = next(column.headed for column in shown.columns if column.kind == "name")
    heads = [(column.headed, column.unit) for column in columns]
    return {"title": title, "first": first, "heads": heads, "lines": lines}


def _reading(tables: Iterable[Table[Any]]) -> str:
    return legend((column.headed, one.meaning(column)) for one in tables for column in one.on_page)


def _keys(names: Iterable[str]) -> list[Key]:
    """A key for each strategy, equal for equal strategies."""
    texts = list(names)
    return [_key(text, style) for text, style in zip(texts, strategy_styles(texts), strict=True)]


def _key(text: str, style: Style) -> Key:
    return Key(text, css(style.color), style.dash)


def _ran(row: Row | AccuracyRow) -> tuple[str, ...]:
    return () if row.chosen in (None, row.strategy) else (f"ran as {row.chosen}",)


def _chosen(row: Measured) -> tuple[str, ...]:
    """Includes the size if the row failed, because it then has no cells."""
    return (row.chosen or "", "" if row.median_s is not None else units.decimal_size(row.bytes))


def _place(row: Row) -> tuple[str, ...]:
    workers = "1 worker" if row.workers == 1 else f"{row.workers} workers"
    if row.strategy == BASELINE:
        workers += ", plain framework"
    elif row.servers:
        workers += f", {row.servers} server" + ("s" if row.servers > 1 else "")
    return workers, *_ran(row)


def _contenders(result: Result) -> str:
    names = list(dict.fromkeys(row.preset or row.strategy for row in result.rows))
    if not names:
        return "no rows"
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return listed if len(listed) <= 80 else f"{len(names)} strategies side by side"


def _compared(result: Result) -> str:
    failed = [row for row in result.rows if row.error is not None]
    if failed:
        return f"{len(failed)} of {len(result.rows)} rows could not be finished; their errors are in the table."
    differ = [result.label(row) for row in result.rows if row.replicas_equal is False]
    if differ:
        return f"Every row finished, but the replicas of {', '.join(differ)} differ at the end."
    scores = [row.accuracy for row in result.rows if row.accuracy is not None]
    if not scores:
        return "Every row finished, and the replicas of every row agree at the end."
    spread = " to ".join(dict.fromkeys(units.percent(score, 2) for score in (min(scores), max(scores))))
    return f"Every row finished, the replicas of every row agree at the end, and test accuracy is {spread}.".replace(
        " %", "\N{NO-BREAK SPACE}%"
    )


def _learned(result: AccuracyResult) -> str:
    failed = sum(not run.finished for run in result.runs)
    if failed:
        return f"{failed} of {len(result.runs)} trainings could not be finished; the first error of each row is below."
    other = result.reference
    compared = [row for row in result.rows if row.within_scatter is not None]
    outside = [row.strategy for row in compared if not row.within_scatter]
    if not compared:
        return "Every training finished, and its replicas agree at the end."
    if not outside:
        verdict = f"every row lies within the scatter of the seeds of {other}"
    elif len(outside) < len(compared):
        verdict = f"all but {', '.join(outside)} lie within the scatter of the seeds of {other}"
    else:
        verdict = f"no row lies within the scatter of the seeds of {other}"
    return f"Every training finished, its replicas agree at the end, and {verdict}."


def _measured(result: BenchResult | GradientResult, wrong: Sequence[str]) -> str:
    failed = sum(row.error is not None for row in result.rows)
    if wrong:
        return f"Results were wrong: {', '.join(dict.fromkeys(wrong))}."
    if failed:
        return f"{failed} of {len(result.rows)} rows could not be measured; their errors are in the tables."
    return (
        f"{len(result.rows)} rows, every element of every result right. All rows of a table were measured in the same"
        " processes, in turn."
    )


def _comparison_facts(result: Result) -> Facts:
    length = f"{result.epochs} epochs" if result.epochs is not None else f"{result.iterations} iterations"
    batches = {row.batch for row in result.rows if row.batch is not None}
    return (
        ("workload", result.workload),
        ("length", length),
        ("global batch", ", ".join(str(batch) for batch in sorted(batches)) or units.MISSING),
        ("seed", str(result.seed)),
        *_origin(result),
        ("started", result.started or units.MISSING),
    )


def _bench_facts(result: BenchResult | GradientResult) -> Facts:
    counts = sorted({row.repetitions for row in result.rows if row.repetitions})
    return (
        *_origin(result),
        ("repetitions", ", ".join(map(str, counts)) or units.MISSING),
        ("started", result.started or units.MISSING),
    )


def _origin(result: ResultFile) -> Facts:
    """The machine, the versions and the commit."""
    commit = "none" if result.commit is None else result.commit + (" with changes" if result.modified else "")
    return (
        ("machine", result.machine),
        ("cores", str(result.cores)),
        ("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
        ("commit", commit),
    )


def _filled(**content: Any) -> str:
    """The page as HTML text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    defaults: dict[str, Any] = {"origin": "Where and how this was measured", "tables": (), "details": (), "remarks": ()}
    # The SVG is serialised from an element tree, which escapes every label in it.
    return environment.from_string(source).render(drawing=lambda chart: Markup(chart.svg), **{**defaults, **content})
