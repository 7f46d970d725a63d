"""``syncline compare``: trains one workload under several strategies in real processes, and compares the results.

Owns the sequence: ``cases`` checks all arguments, then the single worker runs, then each strategy and peer, all in one
lab if ``--lab`` is given. For each row, ``processes`` runs ``train`` and makes the row from its reports, and
``measure`` adds the lower bound of a replayed iteration. ``report`` renders the rows.

A failed row keeps its error and does not stop the others. The result file is replaced after each row, so finished rows
survive any later failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from rich.console import Console

from syncline.timeline.chrome import middle
from syncline.timeline.folder import Assembly

from .batches import in_step
from .cases import Case, Comparison, comparison_of
from .display import RowDisplay, console_beside
from .machine import provenance
from .measure import bounded, link_bytes_per_s, scaled, timed
from .processes import measure
from .report.comparison import BASELINE, Result, Row, render
from .report.files import STANDARD_OUTPUT, keep_text, replace_text
from .site import Site, site_of

SILENCE_LIMIT_S = 1800.0
INTERRUPTED = 130


def run(
    workload: str,
    workers: int | Sequence[int],
    strategies: Sequence[str],
    *,
    timeout: float | None = None,
    console: Console | None = None,
    **options: Any,
) -> int:
    """Compare the strategies on the workload and return the exit status. ``options`` are as for ``comparison_of``.

    The status is 0 if every row finished with equal replicas, 130 after an interrupt (finished rows are kept), else 1.
    A row fails after ``timeout`` seconds without a report. The timeline covers the rows that train under Syncline. With
    a ``target`` accuracy, rows have the training time until the first evaluation that reached it. Raises UsageError
    before any process starts.
    """
    comparison = comparison_of(workload, workers, strategies, **options)
    limit = SILENCE_LIMIT_S if timeout is None else timeout
    output = console_beside(comparison.json_path, comparison.report_path)
    return carry_out(comparison, limit, console or Console(stderr=True), output)


def carry_out(comparison: Comparison, silence_s: float, progress: Console, output: Console) -> int:
    """Run the planned rows, save after each row, print the table and write the page. Returns the exit status."""
    result = _empty(comparison)
    assembly = None if comparison.timeline_path is None else Assembly(comparison.timeline_path)
    interrupted = False
    try:
        with RowDisplay(progress) as display, _site(comparison, display) as site:
            result = replace(result, lab=site.name, goodput_bytes_per_s=site.goodput_bytes_per_s)
            for case in comparison.cases:
                env = {} if assembly is None else assembly.environ(_title(case, comparison))
                row = measure(case, comparison.workload, comparison.seed, silence_s, display, site, env=env)
                row = timed(scaled(_asked(case, row), result.baseline(case.framework)), comparison.target)
                link = _link(case, site)
                row = bounded(row, comparison.trace, link, comparison.pipeline, comparison.speed)
                result = result.with_row(row)
                keep_text(comparison.json_path, result.to_json())
    except KeyboardInterrupt:
        interrupted = True
        progress.print("interrupted: the rows so far are kept")
    output.print(render(result))
    for row in result.rows:
        if row.reasoned:
            name = row.strategy if len(result.frameworks) < 2 else f"{row.framework} {row.strategy}"
            output.print(f"{name}: {row.chosen}", markup=False, highlight=False)
    _publish(comparison, result, output, assembly)
    if interrupted:
        return INTERRUPTED
    return 0 if all(row.finished for row in result.rows) else 1


def _site(comparison: Comparison, display: RowDisplay) -> AbstractContextManager[Site]:
    return site_of(comparison.processes, comparison.lab, display.say, comparison.launcher)


def _empty(comparison: Comparison) -> Result:
    return Result(
        **provenance(),
        workload=comparison.workload,
        seed=comparison.seed,
        epochs=comparison.epochs,
        iterations=comparison.iterations,
        target=comparison.target,
    )


def _asked(case: Case, row: Row) -> Row:
    """The row with the user's text for the strategy, its preset and its framework."""
    row, preset = replace(row, requested=case.requested, framework=case.framework), case.preset
    return row if preset is None else replace(row, preset=preset.name, note=preset.note or None)


def _title(case: Case, comparison: Comparison) -> str:
    """The title of a row in the timeline, with the number of workers if rows differ in it."""
    counts = {other.workers for other in comparison.cases if other.name != BASELINE}
    return case.name if len(counts) < 2 else f"{case.name}, {case.workers} workers"


def _link(case: Case, site: Site) -> float | None:
    """The link speed for a row's bound. None if some iterations exchange no gradients, since the bound assumes all do.

    Also None if nothing limits the link.
    """
    if not in_step(case.strategy, case.iterations):
        return None
    return link_bytes_per_s(site.goodput_bytes_per_s, site.rate, case.rate)


def _publish(comparison: Comparison, result: Result, output: Console, assembly: Assembly | None) -> None:
    if comparison.json_path is not None:
        result.save(comparison.json_path)
    if comparison.report_path is not None:
        from .report.page import comparison_page  # matplotlib is only loaded for a page

        timelines = [] if assembly is None else [one for run in assembly.runs() if (one := middle(run)) is not None]
        replace_text(comparison.report_path, comparison_page(result, timelines))
    for name, path in (("results", comparison.json_path), ("report", comparison.report_path)):
        if path not in (None, STANDARD_OUTPUT):
            output.print(f"{name}: {path}", soft_wrap=True, markup=False, highlight=False)
    if assembly is not None:
        output.print(assembly.finish(), soft_wrap=True, markup=False, highlight=False)
