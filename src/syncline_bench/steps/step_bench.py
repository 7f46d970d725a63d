"""``syncline bench steps``: the time of a step beyond the plain framework's step and the exchange.

Owns the request, the turns of the frameworks, whose ranks run ``step_ranks``, and the making of rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from syncline.errors import SynclineError, UsageError
from syncline.strategy.strategy import Strategy
from syncline.sync import Averages

from ..display import Display, shown
from ..machine import provenance
from ..messages import Message
from ..ranks import Launched, Ranks
from ..report.bench import StepResult, StepRow, render_steps
from ..site import LOCAL, Launcher, Site, read_launcher
from .loops import check_framework, installed
from .step_ranks import Work

RANK = ("-m", "syncline_bench.steps.step_ranks")


@dataclass(frozen=True)
class Request:
    """The measurements asked for: ``tensors`` of ``elements`` float32 each; every tensor is a bucket."""

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
    if min(counts) < 1:
        raise UsageError(f"--tensors has to be 1 or more, got {min(counts)}")
    names = tuple(frameworks) or tuple(installed())
    request = Request(names, strategy, ranks, counts, elements, repetitions)
    parsed = Strategy.parse(request.whole_strategy)
    mode = parsed.sync_mode()
    if parsed.servers or parsed.server_holds_weights or isinstance(mode, Averages) or not mode.merges:
        raise UsageError(
            f"--strategy {strategy!r}: give an allreduce such as ring or direct, whose step is one exchange"
        )
    return replace(request, launcher=Site(launcher=read_launcher(launcher)).launcher_of(request.whole_strategy))


def run(request: Request, *, json_path: Path | None = None, console: Console | None = None) -> int:
    """Measure as ``display.shown`` does. Returns 0 if every row was measured with right weights, else 1."""
    result = shown(partial(measure, request), render_steps, json_path=json_path, console=console)
    return 0 if all(row.finished for row in result.rows) else 1


def measure(request: Request, display: Display) -> StepResult:
    """All rows of a request: each framework in turn, with each number of tensors."""
    rows = [row for framework in request.frameworks for row in _measured(request, framework, display)]
    return StepResult(
        **provenance(),
        strategy=request.whole_strategy,
        ranks=request.ranks,
        repetitions=request.repetitions,
        load=os.getloadavg()[0],
        rows=tuple(rows),
    )


def _measured(request: Request, framework: str, display: Display) -> list[StepRow]:
    """The rows of a framework, whose ranks are a set of their own. Missing rows get the error of the set."""
    rows: list[StepRow] = []
    work = Work(framework, request.whole_strategy, request.elements, request.repetitions).to_json()
    launcher, error = request.launcher, "the ranks sent no result"
    place = Launched(launcher, {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"})

    def heard(tensors: int, message: Message) -> None:
        if message["rank"] == 0:
            figures = {name: message[name] for name in message if name in StepRow.__dataclass_fields__}
            rows.append(StepRow(framework, tensors, request.elements, **figures))

    with display.task(framework, len(request.tensors)) as task:
        try:
            with Ranks(work, request.ranks, place, RANK) as ranks:
                for number, tensors in enumerate(request.tensors):
                    task.at(number, f"{tensors} tensors")
                    ranks.order(partial(heard, tensors), tensors=tensors)
                ranks.end()
        except SynclineError as failure:
            error = str(failure)
    missing = request.tensors[len(rows) :]
    return rows + [StepRow(framework, tensors, request.elements, error=error) for tensors in missing]
