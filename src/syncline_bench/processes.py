"""Owns the processes of one row: starts them, receives their reports and makes the row from the reports.

A failure becomes a row with an error. The text names the process that failed first, because the others usually fail as
a consequence.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from syncline.errors import SynclineError
from syncline.launch.local import GRACE_S, LocalRun, Outcome

from .cases import Case
from .frameworks import framework_of
from .launchers import LOCAL, Launcher
from .measure import row_of
from .messages import Job, Mailbox, Message
from .report.rows import Row
from .site import HERE, Site

TRAIN = ("-m", "syncline_bench.train")
_POLL_S = 0.1
_KEPT_LINES = 12
_LAST_WORDS_S = 2.0
"""For processes that stay: how long to wait for further reports after the first report of a failure."""


class Progress(Protocol):
    """Receives the progress of a row: ``display.RowDisplay``, or the display of a larger task."""

    def begin(self, strategy: str, processes: int, iterations: int) -> None:
        """A row starts."""

    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None:
        """The row has reached this iteration."""

    def end(self, outcome: str) -> None:
        """The row has ended; ``outcome`` describes the end in a few words."""


def measure(
    case: Case,
    workload: str,
    seed: int,
    limit_s: float,
    display: Progress,
    site: Site = HERE,
    script: Sequence[str] = TRAIN,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Row:
    """Run one row's processes to their end; a failure is in the row's ``error``.

    The row fails if no process reports anything for ``limit_s`` seconds. The processes run at ``site``. ``script`` is
    Python's command line, to which the job is appended as the last argument. ``env`` is added to the environment.
    """
    processes = case.workers + case.servers
    display.begin(case.name, processes, case.iterations)
    row = Row(case.strategy, case.workers, servers=case.servers, batch=case.batch)
    try:
        launcher = site.launcher_of(case.strategy)
        with site.mailbox(launcher, processes) as mailbox:
            looks = case.evaluate_every, case.target
            job = Job(
                workload, case.strategy, case.batch, case.iterations, seed, mailbox.addresses, *looks, case.framework
            )
            command = [sys.executable, *script, job.to_json()]
            env = {**framework_of(case.framework).capabilities["environ"], **env, **mailbox.environ}
            watch = RowWatch(case, display, limit_s, launcher=launcher)
            started = site.run(launcher, command, processes, servers=case.servers, env=env, on_output=watch.output)
            try:
                with started:
                    watch.follow(mailbox, started)
            except SynclineError as error:
                watch.failure = str(error)
            row = replace(watch.row(), launcher=launcher.text)
    except SynclineError as error:
        row = replace(row, error=str(error))
    display.end("done" if row.error is None else "failed")
    return row


class RowWatch:
    """The state of a row while its processes run. With ``stay`` the processes outlive the row (``warm``)."""

    def __init__(
        self, case: Case, display: Progress, limit_s: float, *, stay: bool = False, launcher: Launcher = LOCAL
    ) -> None:
        self.failure: str | None = None
        self._stay, self._failed_at, self._launcher = stay, 0.0, launcher
        self._lost: tuple[float, int] | None = None  # the first worker whose line ended before its result, and when
        self._case, self._display, self._limit_s = case, display, limit_s
        self._outcome: Outcome | None = None
        self._results: dict[int, Message] = {}
        self._served_s = 0.0  # processor time of servers
        self._errors: list[tuple[float, int, str]] = []
        self._printed: dict[int, deque[str]] = {}
        self._heard = time.monotonic()

    def output(self, rank: int, line: str) -> None:
        """Keep a line that a process printed. The last lines explain an error without a report."""
        self._printed.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(line)

    def follow(self, mailbox: Mailbox, started: LocalRun) -> None:
        """Receive reports until all processes have ended. Raises SynclineError after ``limit_s`` without a report."""
        while not self._over(started):
            self._take(mailbox.receive(_POLL_S))
            self._look_for_lost(mailbox)
            silent = time.monotonic() - self._heard
            if silent > self._limit_s:
                raise SynclineError(
                    f"no report for {silent:.0f} s, so the row was ended: raise the limit (--timeout of compare) if"
                    " its iterations take longer"
                )
        if self._outcome is not None:
            for last in mailbox.rest():
                self._take(last)

    def _look_for_lost(self, mailbox: Mailbox) -> None:
        """Raise SynclineError if a launched worker is lost and the row has not ended ``GRACE_S`` later."""
        if self._launcher == LOCAL:
            return
        if self._lost is None:
            gone = (rank for rank in mailbox.ended if rank < self._case.workers and rank not in self._results)
            self._lost = next(((time.monotonic(), rank) for rank in gone), None)
        elif time.monotonic() - self._lost[0] > GRACE_S:
            raise SynclineError(self._launched_error())

    def _over(self, started: LocalRun) -> bool:
        """Whether no more reports follow: the processes have ended, or they wait for the next job."""
        self._outcome = started.poll()
        complete = len(self._results) == self._case.workers
        return self._outcome is not None or (self._stay and (complete or self._given_up))

    @property
    def _given_up(self) -> bool:
        """Whether a process has reported a failure and the others had time to report; the first counts."""
        return bool(self._errors) and time.monotonic() - self._failed_at > _LAST_WORDS_S

    @property
    def told(self) -> Mapping[int, Message]:
        """The final reports received so far, by worker."""
        return self._results

    def row(self) -> Row:
        """The row from the reports, or a row with only an error if a worker's result is missing."""
        case = self._case
        error = self._error()
        if len(self._results) < case.workers:
            return Row(case.strategy, case.workers, servers=case.servers, batch=case.batch, error=error)
        reports = [self._results[rank] for rank in range(case.workers)]
        row = row_of(case.strategy, case.workers, case.servers, case.batch, reports, self._served_s)
        return replace(row, error=error)

    def _take(self, messages: Sequence[tuple[int, Message]]) -> None:
        for rank, message in messages:
            self._heard = time.monotonic()
            if message["kind"] == "result":
                self._results[rank] = message
            elif message["kind"] == "served":
                self._served_s += message["cpu_s"]
            elif message["kind"] == "error":
                self._failed_at = self._failed_at or self._heard
                self._errors.append((message["at"], rank, message["text"]))
            elif message["kind"] == "progress":
                self._display.advance(message["iteration"], message["loss"], message["images_per_s"])

    def _error(self) -> str | None:
        """The error text of a failed row, else None. The first failure is the cause of the others."""
        missing = [rank for rank in range(self._case.workers) if rank not in self._results]
        outcome = self._outcome
        if self.failure is None and outcome is None and self._stay and not missing and not self._errors:
            return None
        if self.failure is not None or (outcome is None and not self._errors):
            return self.failure or "the processes were not followed to their end"
        if self._launcher != LOCAL:
            return self._launched_error() if missing or self._errors or (outcome and outcome.status) else None
        endings = () if outcome is None else outcome.endings
        failed = [ending for ending in endings if ending.status and not ending.told]
        culprit = next((ending for ending in failed if ending.status > 128), failed[0] if failed else None)
        told = [f"{self._name(rank)}: {text}" for _, rank, text in sorted(self._errors)]
        if culprit is not None and (culprit.status > 128 or not told):
            # A killed process could not report: show its last output, and the first report of another process.
            return "\n".join((culprit.text, *self._printed.get(culprit.rank, ()), *told[:1]))
        if told:
            return told[0]
        if outcome is not None and outcome.status:
            return outcome.text
        return f"rank {missing[0]} ended with status 0 but without a result" if missing else None

    def _launched_error(self) -> str:
        """The error text of a launched row: the rank lost without a report, the ranks' reports, the launcher's end."""
        told = [(rank, f"{self._name(rank)}: {text}") for _, rank, text in sorted(self._errors)]
        ended = "; ".join(f"{self._launcher.name} {ending.how}" for ending in getattr(self._outcome, "endings", ()))
        silent = self._lost is not None and all(rank != self._lost[1] for rank, _ in told)
        if silent and self._lost is not None:
            first = f"{self._name(self._lost[1])} ended without a result"
            return "\n".join(filter(None, (f"{first}; {ended}" if ended else first, *(text for _, text in told[:1]))))
        if told:
            return told[0][1]
        missing = [rank for rank in range(self._case.workers) if rank not in self._results]
        which = f" before rank {missing[0]} had a result" if missing else ""
        remedy = "" if self._lost else f"; see whether it works alone: {shlex.join(self._launcher.words)} -n 2 hostname"
        return "\n".join((f"{ended or self._launcher.name}{which}{remedy}", *self._printed.get(0, ())))

    def _name(self, rank: int) -> str:
        workers = self._case.workers
        return f"rank {rank}" if rank < workers else f"rank {rank} (server {rank - workers})"
