"""Owns the processes of one row: starts them, takes their reports and makes the row from the reports.

A failure becomes a row with an error. ``ranks`` names the process that failed first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from syncline.errors import SynclineError

from .cases import Case
from .frameworks import framework_of
from .measure import row_of
from .messages import Job, Message
from .ranks import Launched, Ranks, RanksSilent
from .report.comparison import Row
from .site import HERE, Site

TRAIN = ("-m", "syncline_bench.train")


class Progress(Protocol):
    """Receives the progress of a row: ``display.RowDisplay``, or the display of a larger task."""

    def begin(self, strategy: str, processes: int, iterations: int) -> None:
        """The row of ``strategy`` starts: this many processes train for this many iterations."""

    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None:
        """The row has reached this iteration."""

    def end(self, outcome: str) -> None:
        """The row has ended; ``outcome`` describes the end in a few words."""


def measure(
    case: Case,
    workload: str,
    seed: int,
    silence_s: float,
    display: Progress,
    site: Site = HERE,
    script: Sequence[str] = TRAIN,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Row:
    """Run one row's processes to their end; a failure is in the row's ``error``.

    The row fails if no process reports anything for ``silence_s`` seconds. The processes run at ``site``. ``script`` is
    Python's command line, to which the job and the addresses of all lines are appended. ``env`` is added to the
    environment.
    """
    processes = case.workers + case.servers
    display.begin(case.name, processes, case.iterations)
    reports, error, launcher = Reports(case, display), None, None
    job = Job(
        workload, case.strategy, case.batch, case.iterations, seed, case.evaluate_every, case.target, case.framework
    )
    try:
        launcher = site.launcher_of(case.strategy)
        env = {**framework_of(case.framework).capabilities["environ"], **env}
        place = Launched(launcher, env, site, case.servers)
        with Ranks(job.to_json(), processes, place, script, silence_s, reports.take) as ranks:
            ranks.join(silence_s)
    except RanksSilent as silent:
        error = f"{silent}, so the row was ended: raise the limit (--timeout of compare) if its iterations take longer"
    except SynclineError as failure:
        error = str(failure)
    missing = [rank for rank in range(case.workers) if rank not in reports.results]
    if error is None and missing:
        error = f"rank {missing[0]} ended with status 0 but without a result"
    display.end("done" if error is None else "failed")
    row = replace(reports.row(), error=error)
    return row if launcher is None else replace(row, launcher=launcher.text)


class Reports:
    """Takes the reports of a row's processes, shows the progress, and makes the row."""

    def __init__(self, case: Case, display: Progress) -> None:
        self._case, self._display = case, display
        self.results: dict[int, Message] = {}
        """The final reports of the workers."""
        self._served_s = 0.0  # processor time of servers

    def take(self, message: Message) -> None:
        """Keep a process's result or processor time, or show its progress."""
        match message["kind"]:
            case "result":
                self.results[message["rank"]] = message
            case "served":
                self._served_s += message["cpu_s"]
            case "progress":
                self._display.advance(message["iteration"], message["loss"], message["images_per_s"])

    def row(self) -> Row:
        """The row from the reports, without figures if a worker's result is missing."""
        case = self._case
        if len(self.results) < case.workers:
            return Row(case.strategy, case.workers, servers=case.servers, batch=case.batch)
        results = [self.results[rank] for rank in range(case.workers)]
        return row_of(case.strategy, case.workers, case.servers, case.batch, results, self._served_s)
