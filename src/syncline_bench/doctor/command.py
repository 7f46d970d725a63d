"""Runs ``syncline doctor``: on this machine, as a rank of a job, or as the starter of ranks; prints the findings.

Under torchrun, ``syncline run``, mpirun or srun this process is a rank, and rank 0 prints. The exit status is 1 if a
finding is ``fail``, else 0.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncline.errors import UsageError
from syncline.launch.environment import recognise
from syncline.launch.local import LEFT_S, launch
from syncline.version import __version__
from syncline.wire.meeting import printable

from ..display import console_beside
from ..report.files import replace_text, result_paths
from .checks import INTERFACE, Finding, checks_of, examined, interfaces, way

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run(*, json_path: Path | None, workers: int | None, timeout_s: float) -> int:
    """Check and print. Returns the exit status; raises UsageError before any check."""
    environment = recognise()
    (target,) = result_paths({"--json": json_path if environment.rank == 0 else None})
    if workers is not None:
        if environment.launcher != "none":
            raise UsageError(f"{environment.launcher} has started the ranks: leave -n out")
        return _start(workers, target, timeout_s)
    if environment.world == 1:
        known = interfaces()
        found = examined(checks_of(1, way(environment, os.environ.get(INTERFACE), known), known))
    else:
        from . import hosts  # loads modules that only a job needs

        told = hosts.findings(environment, timeout_s)
        if told is None:
            return 0
        found = told
    if target is not None:
        replace_text(target, to_json(found))
    console = console_beside(target)
    show(found, console)
    counts = Counter(one.status for one in found)
    console.print(Text(f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail"))
    return int(any(one.status == "fail" for one in found))


def to_json(found: Sequence[Finding]) -> str:
    """The text of the result file."""
    return json.dumps({"version": __version__, "findings": [asdict(one) for one in found]}, indent=1) + "\n"


def show(found: Sequence[Finding], console: Console) -> None:
    """Print the findings, each with its remedy below."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        text = Text(printable(one.text))  # other users choose the names of processes, other hosts their texts
        if one.remedy:
            text.append(f"\n{printable(one.remedy)}", style="bold")
        table.add_row(Text(one.status, style=_STYLES[one.status]), one.check, text)
    console.print(table)


def _start(workers: int, target: Path | None, timeout_s: float) -> int:
    """Start the ranks on this machine, which check together. Returns the exit status."""
    more = [] if target is None else ["--json", str(target)]
    command = [sys.executable, "-m", "syncline", "doctor", "--timeout", str(timeout_s), *more]
    outcome = launch(command, workers, stop_s=LEFT_S)
    if outcome.status == 128 + signal.SIGINT:
        raise KeyboardInterrupt  # Ctrl-C also reaches the ranks, and one of them may end first
    failed = [ending.rank for ending in outcome.endings if ending.status]
    if outcome.status and (failed != [0] or outcome.status != 1):  # else rank 0 has printed the failure
        Console(stderr=True).print(Text(f"syncline: {outcome.text}"), soft_wrap=True)
    return outcome.status
