"""The verb ``syncline bench gradients`` without its options' syntax: request, run, files, table, exit status."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..cases import console_beside
from ..display import Display
from ..report.bench import render_gradients
from ..report.files import replace_text, result_paths
from .request import Request
from .run import measure


def run(
    request: Request,
    *,
    json_path: Path | None = None,
    report_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Measure, write the files and print the tables; 0 when everything was measured and right, else 1.

    Raises UsageError before anything is measured. An interrupt leaves no files, since medians of a run that was cut off
    would not be comparable.
    """
    target, report = result_paths({"--json": json_path, "--report": report_path})
    console = console or console_beside(target, report)
    if request.left_out:
        console.print(f"not measured with 1 rank, which exchanges nothing: {', '.join(request.left_out)}", markup=False)
    with Display(console) as display:
        result = measure(request, display)
    if target is not None:
        result.save(target)
    if report is not None:
        from ..report.page import gradient_page  # matplotlib is only loaded for a page

        replace_text(report, gradient_page(result))
    console.print(render_gradients(result))
    return 0 if all(row.finished for row in result.rows) else 1
