"""``syncline compare``: one workload trained under several strategies, side by side, by real processes.

Owns the order of things: check everything before any process starts, run the single worker and then every strategy
and peer, all of them in one lab where one is asked for, keep what has been measured whatever happens later. Does not
know how a strategy works or what its numbers mean: ``cases`` checks, ``processes`` runs ``train`` and makes a row of
what it reports, ``bound`` says what a replayed iteration cannot beat, ``report`` shows the rows.

A row that fails is listed with its error and does not stop the others. The result file is replaced after every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ..errors import UsageError
from ..report import table
from ..report.files import STANDARD_OUTPUT, keep_text, replace_text
from ..report.rows import Result
from .bound import bounded, link_bytes_per_s
from .cases import Case, Plan, console_beside, plan_of
from .machine import provenance
from .measure import scaled
from .processes import measure
from .progress import Display
from .site import Site, site_of

SILENCE_LIMIT_S = 1800.0
INTERRUPTED = 130


def run(
    workload: str,
    workers: int,
    strategies: Sequence[str],
    epochs: int | None = None,
    iterations: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    json_path: str | Path | None = None,
    report_path: str | Path | None = None,
    timeout: float | None = None,
    console: Console | None = None,
    lab: str | None = None,
) -> int:
    """Compare the strategies on the workload and return the exit status.

    0: every row finished and its replicas agree; 1: not so; 130: interrupted, the rows so far are kept. ``batch``
    replaces the workload's default and means the same (of all workers, or of each); ``timeout`` is how many seconds a
    row may go without any report before it counts as failed. With ``lab``, a rate such as ``1Gbit``, every process has
    a host of its own behind links of that rate. Raises UsageError before any process starts.
    """
    plan = plan_of(workload, workers, strategies, epochs, iterations, batch, seed, json_path, report_path, lab)
    limit = SILENCE_LIMIT_S if timeout is None else timeout
    if limit <= 0:
        raise UsageError(f"the time limit has to be more than 0 seconds, got {limit:g}")
    output = console_beside(plan.json_path, plan.report_path)
    return carry_out(plan, limit, console or Console(stderr=True), output)


def carry_out(plan: Plan, limit_s: float, progress: Console, output: Console) -> int:
    """Run the planned rows, save after each, print the table and write the page; returns the exit status."""
    result = _empty(plan)
    interrupted = False
    try:
        with Display(progress) as display, site_of(plan.processes, plan.lab, display.say) as site:
            result = replace(result, lab=site.name, goodput_bytes_per_s=site.goodput_bytes_per_s)
            for case in plan.cases:
                row = measure(case, plan.workload, plan.seed, limit_s, display, site)
                row = bounded(scaled(row, result.baseline), plan.trace, _link(case, site))
                result = result.with_row(row)
                keep_text(plan.json_path, result.to_json())
    except KeyboardInterrupt:
        interrupted = True
        progress.print("interrupted: the rows so far are kept")
    output.print(table.render(result))
    for row in result.rows:
        if "codec=auto" in row.strategy and row.chosen:
            output.print(f"{row.strategy}: {row.chosen}", markup=False, highlight=False)
    _publish(plan, result, output)
    if interrupted:
        return INTERRUPTED
    return 0 if all(row.finished for row in result.rows) else 1


def _empty(plan: Plan) -> Result:
    return Result(
        **provenance(),
        workload=plan.workload,
        seed=plan.seed,
        epochs=plan.epochs,
        iterations=plan.iterations,
    )


def _link(case: Case, site: Site) -> float | None:
    return link_bytes_per_s(site.goodput_bytes_per_s, site.rate, case.rate)


def _publish(plan: Plan, result: Result, output: Console) -> None:
    if plan.json_path is not None:
        result.save(plan.json_path)
    if plan.report_path is not None:
        from ..report import page

        replace_text(plan.report_path, page.render(result))
    for name, path in (("results", plan.json_path), ("report", plan.report_path)):
        if path not in (None, STANDARD_OUTPUT):
            output.print(f"{name}: {path}", soft_wrap=True, markup=False, highlight=False)
