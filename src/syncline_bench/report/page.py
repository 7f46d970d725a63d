"""A whole comparison as one HTML page that needs nothing else: no network, no script, styles and charts inline.

Owns the words and the order of the page; the charts come from ``charts``, the markup is ``page.html.j2``, which
``frame`` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from syncline.timeline.window import Iteration

from . import svg, table, units
from .charts import all_charts
from .figures import Key, strategy_styles
from .frame import Line, fill, origin_facts
from .rows import BASELINE, Result, Row
from .table import remarks
from .timeline_charts import timeline_charts

T = TypeVar("T")

HEADS = (
    ("{score}", ""),
    ("loss", ""),
    ("images/s", ""),
    ("scaling", ""),
    ("iteration", "ms"),
    ("loading", "ms"),
    ("copy", "ms"),
    ("forward", "ms"),
    ("backward", "ms"),
    ("update", "ms"),
    ("compute", "ms"),
    ("exposed", "ms"),
    ("sent", "per step"),
    ("start", ""),
    ("memory", ""),
    ("replicas", ""),
)
_MERIT = 4
"""As many columns say how good a row is; the others say why."""

READING = (
    "Accuracy and loss are of the test set after the last iteration. Images/s is of all workers together; scaling is "
    "that against one worker's times the number of workers. Times are medians over iterations: copy is the copy of a "
    "batch to the device, exposed the time for which the training thread was blocked in communication, compute the "
    "rest of an iteration. Sent is what one worker sends in one iteration. Start is joining the "
    "group and preparing the model, memory the most that the process of a worker had. Replicas are compared bit by bit."
)
BOUND = (
    "Of bound is the share of an iteration that no communication can make shorter without compression: the trace's "
    "compute, or its gradients over the link if that takes longer."
)


class Extra(NamedTuple):
    """A column that is left out where no row has something to say in it."""

    head: str
    note: str
    cell: Callable[[Row], str]
    reading: str
    """Empty where a remark says it."""
    when: Callable[[Row], bool] | None = None
    """Whether a row has something to say; by default where its cell is not empty."""

    def shown(self, row: Row) -> bool:
        """Whether this row has something to say in it."""
        return self.cell(row) != units.MISSING if self.when is None else self.when(row)


EXTRA = (
    Extra(
        "framework",
        "",
        lambda row: " ".join(filter(None, (row.framework, row.framework_version))),
        "",
        lambda row: row.framework != "torch",
    ),
    Extra(
        "step",
        "ms",
        lambda row: units.milliseconds(row.step_s),
        "Step is forward, backward and update where a framework makes one computation of them.",
    ),
    Extra(
        "staleness",
        "mean (most)",
        lambda row: table.staleness(row) if any(row.staleness) else units.MISSING,
        "Staleness is by how many steps a worker was ahead of the slowest when a step began.",
    ),
    Extra(
        "waited",
        "ms",
        lambda row: units.milliseconds(row.wait_s_per_step or None),
        "Waited is for how long a worker was held up by others before a step.",
    ),
    Extra(
        "to acc",
        "",
        lambda row: units.seconds(row.time_to_accuracy_s),
        "",
    ),
)


def render(result: Result, timelines: Sequence[Iteration] = ()) -> str:
    """The page as HTML text, with an iteration of each of the recorded runs."""
    score = "of bound" if result.replayed else "accuracy"
    extra = [one for one in EXTRA if any(map(one.shown, result.rows))]
    readings = [READING, *([BOUND] if result.replayed else []), *(one.reading for one in extra if one.reading)]
    return fill(
        "page.html.j2",
        title=f"Syncline: {result.workload}, {_contenders(result)}",
        heading=f"{result.workload}: {_contenders(result)}",
        summary=_summary(result),
        facts=_facts(result),
        heads=[
            (head.format(score=score), note) for head, note in _with(HEADS, ((one.head, one.note) for one in extra))
        ],
        reading=" ".join(readings),
        lines=_lines(result, extra),
        remarks=remarks(result),
        charts=(*all_charts(result), *timeline_charts(timelines)),
    )


def _contenders(result: Result) -> str:
    names = list(dict.fromkeys(row.preset or row.strategy for row in result.rows))
    if not names:
        return "no rows"
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return listed if len(listed) <= 80 else f"{len(names)} strategies side by side"


def _summary(result: Result) -> str:
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


def _facts(result: Result) -> tuple[tuple[str, str], ...]:
    length = f"{result.epochs} epochs" if result.epochs is not None else f"{result.iterations} iterations"
    batches = {row.batch for row in result.rows if row.batch is not None}
    return (
        ("workload", result.workload),
        ("length", length),
        ("global batch", ", ".join(str(batch) for batch in sorted(batches)) or units.MISSING),
        ("seed", str(result.seed)),
        *origin_facts(result),
        ("started", result.started or units.MISSING),
    )


def _lines(result: Result, extra: Sequence[Extra]) -> tuple[Line, ...]:
    pairs = zip(result.rows, strategy_styles([result.titled(row) for row in result.rows]), strict=True)
    return tuple(
        Line(
            key=Key(result.titled(row), svg.css(style.color), style.dash),
            place=_place(row),
            cells=_cells(row, result.replayed, extra) if row.iteration_s is not None else (),
            error=row.error,
            chosen=row.chosen if row.chosen not in (None, row.strategy) else None,
        )
        for row, style in pairs
    )


def _place(row: Row) -> str:
    workers = "1 worker" if row.workers == 1 else f"{row.workers} workers"
    if row.strategy == BASELINE:
        return f"{workers}, plain framework"
    if not row.servers:
        return workers
    return f"{workers}, {row.servers} server" + ("s" if row.servers > 1 else "")


def _cells(row: Row, replayed: bool, extra: Sequence[Extra]) -> tuple[str, ...]:
    verdict = {True: "equal", False: "DIFFER", None: units.MISSING}[row.replicas_equal]
    times = (row.loading_s, row.h2d_s, row.forward_s, row.backward_s, row.update_s, row.compute_s, row.exposed_comm_s)
    found = (
        units.percent(row.of_bound if replayed else row.accuracy, 2),
        units.number(row.loss),
        units.rate(row.images_per_s),
        units.percent(row.scaling_efficiency),
        units.milliseconds(row.iteration_s),
        *map(units.milliseconds, times),
        units.size(row.bytes_sent_per_step),
        units.seconds(row.start_s),
        units.size(row.peak_bytes),
        verdict,
    )
    return _with(found, (one.cell(row) for one in extra))


def _with(columns: tuple[T, ...], extra: Iterable[T]) -> tuple[T, ...]:
    """What is not in every table stands behind the figures of merit, where it is seen without scrolling."""
    return (*columns[:_MERIT], *extra, *columns[_MERIT:])
