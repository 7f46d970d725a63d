"""The course of ``bench steps``: one set of ranks for every framework, and the making of rows."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from syncline.errors import SynclineError, UsageError
from syncline.strategy.strategy import Strategy
from syncline.sync import Averages

from ..collectives.display import Display
from ..launchers import LOCAL, Launcher, read_launcher
from ..machine import provenance
from ..messages import Message
from ..report.bench import StepResult, StepRow
from ..site import Site
from .loops import check_framework, installed
from .rank import Work

RANK = ("-m", "syncline_bench.steps.rank")
SILENCE_S = 300.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Request:
    """What to measure: ``tensors`` of ``elements`` float32 each, which are a bucket each."""

    frameworks: tuple[str, ...]
    strategy: str
    ranks: int
    tensors: tuple[int, ...]
    elements: int
    repetitions: int
    launcher: Launcher = LOCAL

    @property
    def whole_strategy(self) -> str:
        """With buckets of one tensor."""
        return f"{self.strategy} schedule=fixed(bucket={4 * self.elements}B)"


def request_of(
    frameworks: Sequence[str],
    strategy: str,
    *,
    ranks: int = 2,
    tensors: Sequence[int] = (),
    elements: int = 1000,
    repetitions: int = 300,
    launcher: str = "auto",
) -> Request:
    """A checked request; raises UsageError with the remedy."""
    for name in frameworks:
        check_framework(name)
    counts = tuple(tensors) or (1, 10, 40)
    for name, least, value in (("tensors", 1, min(counts)), ("elements", 1, elements), ("ranks", 2, ranks)):
        if value < least:
            raise UsageError(f"--{name} has to be {least} or more, got {value}")
    names = tuple(frameworks) or tuple(installed())
    request = Request(names, strategy, ranks, counts, elements, repetitions)
    parsed = Strategy.parse(request.whole_strategy)
    mode = parsed.sync_mode()
    if parsed.servers or parsed.server_holds_weights or isinstance(mode, Averages) or not mode.merges:
        raise UsageError(
            f"--strategy {strategy!r}: give an allreduce, as ring or direct, of which a step is one exchange"
        )
    return replace(request, launcher=Site(launcher=read_launcher(launcher)).launcher_of(request.whole_strategy))


def measure(request: Request, display: Display) -> StepResult:
    """All rows of a request: frameworks, in each the numbers of tensors."""
    rows: list[StepRow] = []
    for framework in request.frameworks:
        with display.task(framework, len(request.tensors)) as task:
            found, error = _measured(request, framework, lambda done, task=task: task.at(done, f"{done} measured"))
        for tensors in request.tensors:
            row = StepRow(framework, tensors, request.elements)
            message = found.get(tensors)
            if message is None:
                rows.append(StepRow(framework, tensors, request.elements, error=error or "no result came"))
            else:
                figures = {name: message[name] for name in message if hasattr(row, name) and name != "tensors"}
                rows.append(StepRow(framework, tensors, request.elements, **figures))
    return StepResult(
        **provenance(),
        strategy=request.whole_strategy,
        ranks=request.ranks,
        repetitions=request.repetitions,
        load=os.getloadavg()[0],
        rows=tuple(rows),
    )


def _measured(request: Request, framework: str, progress: object) -> tuple[dict[int, Message], str | None]:
    """What rank 0 has measured of a framework, by number of tensors, and why there is no more."""
    found: dict[int, Message] = {}
    errors: list[str] = []
    site, launcher = Site(launcher=request.launcher), request.launcher
    with site.mailbox(launcher, request.ranks) as mailbox:
        elements, repetitions, reports = request.elements, request.repetitions, mailbox.addresses
        work = Work(framework, request.whole_strategy, request.tensors, elements, repetitions, reports)
        command = [sys.executable, *RANK, json.dumps(asdict(work))]
        env = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", **mailbox.environ}
        heard = time.monotonic()
        with site.run(launcher, command, request.ranks, env=env, on_output=lambda *_: None) as started:
            messages, outcome = mailbox.receive(_POLL_S), started.poll()
            while messages or outcome is None:
                for rank, message in messages:
                    heard = time.monotonic()
                    if message["kind"] == "error":
                        errors.append(f"rank {rank}: {message['text']}")
                    elif rank == 0:
                        found[message["tensors"]] = message
                        progress(len(found))  # type: ignore[operator]
                outcome = outcome or started.poll()
                if time.monotonic() - heard > SILENCE_S:
                    raise SynclineError(f"bench steps: no rank has reported anything for {SILENCE_S:.0f} s")
                messages = (
                    mailbox.receive(_POLL_S) if outcome is None else [one for some in mailbox.rest() for one in some]
                )
        if outcome.status and not errors:
            errors.append(outcome.text)
    return found, errors[0] if errors else None
