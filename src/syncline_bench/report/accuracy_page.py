"""A table of ``syncline accuracy`` as one HTML page that needs nothing else, in the style of a comparison's page.

Owns the words and the order of the page: the table's figures, then how the trainings went, a line per strategy; the
markup is ``page.html.j2``, which ``frame`` fills.
"""

from __future__ import annotations

import matplotlib as mpl

from . import svg
from .accuracy_rows import AccuracyResult, AccuracyRow
from .accuracy_table import cells, length_of, long_heads, title_of
from .curves import Learner, learning
from .figures import RC, Chart, Key, Style, drawable, strategy_styles
from .frame import Line, fill, origin_facts
from .rows import BASELINE


def render(result: AccuracyResult) -> str:
    """The page as HTML text."""
    styles = strategy_styles([row.strategy for row in result.rows])
    return fill(
        "page.html.j2",
        title=f"Syncline: accuracy, {title_of(result)}",
        heading=f"Accuracy: {title_of(result)}",
        summary=_summary(result),
        facts=_facts(result),
        heads=[(head, "") for head in long_heads(result.reference, _sender(result))],
        reading=_reading(result),
        lines=[_line(result, row, style) for row, style in zip(result.rows, styles, strict=True)],
        remarks=(),
        charts=_charts(result, styles),
    )


def _summary(result: AccuracyResult) -> str:
    failed = sum(not run.finished for run in result.runs)
    if failed:
        return f"{failed} of {len(result.runs)} trainings could not be finished; the first error of each row is below."
    other = result.reference
    compared = [row for row in result.rows if row.within_scatter is not None]
    outside = [row.strategy for row in compared if not row.within_scatter]
    if not compared:
        return "Every training finished, and its replicas agree at the end."
    if not outside:
        verdict = f"every row lies within what the seeds of {other} scatter"
    elif len(outside) < len(compared):
        verdict = f"all but {', '.join(outside)} lie within what the seeds of {other} scatter"
    else:
        verdict = f"no row lies within what the seeds of {other} scatter"
    return f"Every training finished, its replicas agree at the end, and {verdict}."


def _reading(result: AccuracyResult) -> str:
    other = result.reference
    return (
        "Accuracy is of the test set after the last iteration, the median over the seeds, beside the lowest and the "
        f"highest. A row is within the scatter when its median is no further from that of {other} than the seeds of "
        f"{other} are from each other. Bytes are what one worker sends in one iteration, their share is of those of "
        f"{_sender(result)}."
    )


def _sender(result: AccuracyResult) -> str:
    return result.sender or result.reference  # a single worker alone sends nothing, and nobody else is there


def _facts(result: AccuracyResult) -> tuple[tuple[str, str], ...]:
    return (
        ("length", length_of(result)),
        *origin_facts(result),
        ("started", result.started),
    )


def _line(result: AccuracyResult, row: AccuracyRow, style: Style) -> Line:
    workers = 1 if row.strategy == BASELINE else result.workers
    seeds = f"seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"
    return Line(
        key=Key(row.strategy, svg.css(style.color), style.dash),
        place=f"{workers} worker{'s' if workers > 1 else ''}, {seeds}",
        cells=() if row.median_accuracy is None else cells(row),
        error=row.error,
        chosen=row.chosen if row.chosen not in (None, row.strategy) else None,
    )


def _charts(result: AccuracyResult, styles: tuple[Style, ...]) -> list[Chart]:
    learners = [
        Learner(
            strategy,
            style,
            tuple(tuple(drawable(point) for point in run.curve) for run in runs if run.finished),
        )
        for (strategy, runs), style in zip(result.grouped.items(), styles, strict=True)
    ]
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        return learning(learners, timed=False)
