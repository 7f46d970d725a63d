"""A whole bench as one HTML page that needs nothing else, in the style of a comparison's page.

Owns the words and the order of the page; ``bench.html.j2`` puts its tables into ``page.html.j2``.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import svg, units
from .bench_charts import all_charts, contender_styles
from .bench_rows import BenchResult, Measured, places
from .bench_table import LEGEND, at_size, figures, peers_of, ratio, title
from .figures import Key
from .frame import Line, Section, fill, origin_facts
from .goal_table import Verdict


def render(result: BenchResult, verdicts: Sequence[Verdict] = ()) -> str:
    """The page as HTML text; ``verdicts`` are the goals to show, if any."""
    return fill(
        "bench.html.j2",
        title="Syncline: bench",
        heading="Collectives beside what one would use instead",
        summary=_summary(result),
        facts=_facts(result),
        reading=LEGEND,
        columns=("contender", "bytes"),
        verdicts=verdicts,
        sections=_sections(result),
        charts=all_charts(result),
    )


def _summary(result: BenchResult) -> str:
    failed = sum(row.error is not None for row in result.rows)
    wrong = [row.contender for row in result.rows if row.correct is False]
    if wrong:
        return f"Results were wrong: {', '.join(dict.fromkeys(wrong))}."
    if failed:
        return f"{failed} of {len(result.rows)} rows could not be measured; their errors are in the tables."
    return (
        f"{len(result.rows)} rows, every element of every result right. All contenders of a table ran in the same"
        " processes and took turns."
    )


def _sections(result: BenchResult) -> tuple[Section, ...]:
    styles = contender_styles(result)
    found = []
    for rows in places(result.rows):
        peers = peers_of(rows)
        heads = ("median", "p99", "busbw", "CPU s/GB", "of limit", *(f"x {name}" for name in peers), "memory", "right")
        lines = []
        for row in rows:
            style = styles[row.contender]
            key = Key(row.contender, svg.css(style.color), style.dash)
            cells = () if row.error is not None else _cells(row, rows, peers)
            lines.append(Line(key, units.decimal_size(row.bytes), cells, row.error, row.chosen))
        found.append(Section(title(rows, result.cores), heads, tuple(lines)))
    return tuple(found)


def _cells(row: Measured, rows: Sequence[Measured], peers: Sequence[str]) -> tuple[str, ...]:
    *measured, right = figures(row)
    against = (ratio(row, at_size(rows, name, row.bytes)) for name in peers)
    return (
        *measured,
        *("" if value is None else units.significant(value) for value in against),
        "" if row.memory_bytes is None else units.size(row.memory_bytes),
        right,
    )


def _facts(result: BenchResult) -> tuple[tuple[str, str], ...]:
    counts = sorted({row.repetitions for row in result.rows if row.repetitions})
    return (
        *origin_facts(result),
        ("repetitions", ", ".join(map(str, counts)) or units.MISSING),
        ("started", result.started or units.MISSING),
    )
