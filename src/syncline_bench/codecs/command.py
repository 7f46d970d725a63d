"""The verb ``syncline bench codecs`` without its options' syntax: request, run, file, table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..cases import console_beside
from ..display import Display
from ..report.bench import render_codecs
from ..report.files import result_paths
from .run import WORKERS, contestants_of, measure, request_of


def run(
    elements: int,
    texts: Sequence[str] = (),
    *,
    repetitions: int,
    workers: int = WORKERS,
    json_path: Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure codecs, all where ``texts`` is empty, print the table and write the file.

    Raises UsageError before anything is measured. An interrupt leaves no file, since medians of a run that was cut off
    would not be comparable.
    """
    (target,) = result_paths({"--json": json_path})
    console = console or console_beside(target)
    request = request_of(texts, elements, repetitions, workers)
    count = contestants_of(request)
    with Display(console) as display, display.task("codecs", (repetitions + 1) * count) as task:

        def progress(repetition: int, place: int) -> None:
            doing = "warm-up" if repetition < 0 else f"repetition {repetition + 1} of {repetitions}"
            task.at((repetition + 1) * count + place, doing)

        result = measure(request, progress)
    if target is not None:
        result.save(target)
    console.print(render_codecs(result))
