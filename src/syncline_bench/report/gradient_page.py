"""A whole run of ``syncline bench gradients`` as one HTML page, in the style of a bench's page.

Owns the words; the frame and the escaping are ``frame``'s.
"""

from __future__ import annotations

from . import units
from .figures import Key
from .frame import Line, Section, fill, origin_facts
from .gradient_charts import ADDED_COLOR, BARE_COLOR, all_charts
from .gradient_rows import BARE, GradientResult, places
from .gradient_table import LEGEND, figures, title

_HEADS = ("median", "p99", "added", "share", "limit", "of limit", "x", "ok")


def render(result: GradientResult) -> str:
    """The page as HTML text."""
    return fill(
        "bench.html.j2",
        title="Syncline: bench gradients",
        heading="Gradients in one block, beside copying them together and back",
        summary=_summary(result),
        facts=_facts(result),
        reading=LEGEND,
        columns=("form", "passes"),
        verdicts=(),
        sections=_sections(result),
        charts=all_charts(result),
    )


def _summary(result: GradientResult) -> str:
    failed = sum(row.error is not None for row in result.rows)
    wrong = [f"{row.form} ({row.workload})" for row in result.rows if row.correct is False]
    if wrong:
        return f"Results were wrong: {', '.join(dict.fromkeys(wrong))}."
    if failed:
        return f"{failed} of {len(result.rows)} rows could not be measured; their errors are in the tables."
    return (
        f"{len(result.rows)} rows, every element of every gradient right. All forms of a table ran in the same"
        " processes and took turns."
    )


def _sections(result: GradientResult) -> tuple[Section, ...]:
    found = []
    for rows in places(result.rows):
        lines = []
        for row in rows:
            cells = figures(row, rows)
            key = Key(row.form, BARE_COLOR if row.form == BARE else ADDED_COLOR)
            shown = () if row.error is not None else tuple(cells[head] for head in _HEADS)
            lines.append(Line(key, units.MISSING if not row.passes else cells["passes"], shown, row.error, None))
        found.append(Section(title(rows, result.cores), _HEADS, tuple(lines)))
    return tuple(found)


def _facts(result: GradientResult) -> tuple[tuple[str, str], ...]:
    counts = sorted({row.repetitions for row in result.rows if row.repetitions})
    return (
        *origin_facts(result),
        ("repetitions", ", ".join(map(str, counts)) or units.MISSING),
        ("started", result.started or units.MISSING),
    )
