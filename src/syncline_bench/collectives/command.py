"""The verb ``syncline bench`` without its options' syntax: request, run, files, tables, exit status.

Owns what is kept of an earlier run (``resume``), when files are written, and what is printed at the end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from syncline.errors import UsageError
from syncline.nouns import Rate

from ..cases import console_beside
from ..display import Display
from ..goals import ONE_LEVEL, TWO_LEVELS, TWO_LEVELS_BYTES, judge
from ..report import bench
from ..report.bench import BenchResult
from ..report.files import keep_text, replace_text, result_paths
from .request import Request, request_of
from .run import measure, origin, resumed

LAB_RATE = Rate(1e9)
"""Of the links of the lab in which the goals are measured."""


def goal_requests(sizes: Sequence[int] = ()) -> list[Request]:
    """What the table of goals needs: the default contenders here, and in labs where there is root.

    One of 4 hosts, and one of 2 hosts with 2 ranks each for two levels with a codec.
    """
    found = [request_of(sizes=sizes)]
    if os.geteuid() == 0:
        found.append(replace(request_of(sizes=sizes, lab_rate=LAB_RATE), optional=True))
        asked = request_of(
            sizes=sizes or (TWO_LEVELS_BYTES,), contenders=(TWO_LEVELS, ONE_LEVEL), lab_rate=LAB_RATE, per_host=2
        )
        found.append(replace(asked, optional=True))
    return found


def run(
    requests: Sequence[Request],
    *,
    json_path: Path | None = None,
    resume_path: Path | None = None,
    report_path: Path | None = None,
    goals: bool = False,
    console: Console | None = None,
) -> int:
    """Measure and print; 0 when all that is installed was measured and right, else 1.

    With ``resume_path`` all rows of that file are kept and none is measured again; of a file that ``json_path`` names
    those are taken over that are asked for, if it is of the same machine and code. Files are written after every size,
    the page at the end, and after an interrupt too. Raises UsageError before anything is measured.
    """
    target, report = result_paths({"--json": json_path or resume_path, "--report": report_path})
    console = console or console_beside(target, report)
    keeper = _Keeper(_start(requests, json_path, resume_path, console), target)
    try:
        with Display(console) as display:
            measure(requests, keeper.result, keeper.save, display)
    finally:
        if target is not None and keeper.result.rows:
            keeper.result.save(target)
        verdicts = judge(keeper.result.rows) if goals else ()
        if report is not None:
            from ..report.page import bench_page  # matplotlib is only loaded for a page

            replace_text(report, bench_page(keeper.result, verdicts))
    console.print(bench.render(keeper.result))
    if goals:
        console.print(bench.goals(verdicts))
    return 0 if all(row.finished or row.missing for row in keeper.result.rows) else 1


class _Keeper:
    """The rows so far, in memory and in the result file."""

    def __init__(self, result: BenchResult, path: Path | None) -> None:
        self.result, self._path = result, path

    def save(self, result: BenchResult) -> None:
        """Take over new rows, and write them where a file is asked for."""
        self.result = result
        keep_text(self._path, result.to_json())


def _start(
    requests: Sequence[Request], json_path: Path | None, resume_path: Path | None, console: Console
) -> BenchResult:
    """What there is before the first measurement."""
    fresh = origin()
    if resume_path is not None:
        found = resumed(fresh, resume_path)
    elif json_path is not None and json_path.is_file():
        try:
            found = resumed(fresh, json_path)
        except UsageError:
            return fresh  # another bench's, which this one replaces
        asked = {key for request in requests for key in request.keys}
        found = replace(found, rows=tuple(row for row in found.rows if row.key in asked))
    else:
        return fresh
    if found.rows:
        console.print(f"{len(found.rows)} rows of {resume_path or json_path} are kept", style="dim", markup=False)
    return found
