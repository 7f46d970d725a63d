"""The verb ``syncline bench steps`` without its options' syntax: request, run, file, table, exit status."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..cases import console_beside
from ..collectives.display import Display
from ..report.bench import render_steps
from ..report.files import result_paths
from .run import Request, measure


def run(request: Request, *, json_path: Path | None = None, console: Console | None = None) -> int:
    """Measure, write the file and print the table; 0 when everything was measured and right, else 1.

    Raises UsageError before anything is measured. An interrupt leaves no file, since medians of a run that was cut off
    would not be comparable.
    """
    (target,) = result_paths({"--json": json_path})
    console = console or console_beside(target)
    with Display(console) as display:
        result = measure(request, display)
    if target is not None:
        result.save(target)
    console.print(render_steps(result))
    return 0 if all(row.finished for row in result.rows) else 1
