"""``syncline predict --workload`` without its options' syntax: question, prediction, files, table.

Owns the order of things: everything is checked before anything is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..report import forecast_table
from ..report.files import STANDARD_OUTPUT, replace_text, result_paths
from .rows import predict, question, worker_counts


def workload(
    text: str,
    networks: Sequence[str],
    workers: Sequence[str],
    strategies: Sequence[str],
    *,
    origin: Mapping[str, Any],
    per_node: int | None = None,
    price: float | None = None,
    epoch_images: int | None = None,
    json_path: Path | None = None,
    report_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Predict a workload, print the table and write the files; raises UsageError before anything is simulated.

    ``origin`` says in the files where, when and with which code they were made.
    """
    target, page = result_paths({"--json": json_path, "--report": report_path})
    asked = question(text, networks, worker_counts(workers), strategies, per_node, price, epoch_images)
    console = console or Console(stderr=STANDARD_OUTPUT in (target, page))
    found = replace(predict(asked), **origin)
    if target is not None:
        found.save(target)
    if page is not None:
        from ..report import forecast_page

        replace_text(page, forecast_page.render(found))
    console.print(forecast_table.render(found, console.width))
