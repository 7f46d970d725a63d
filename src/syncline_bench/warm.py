"""Owns ranks that outlive a row: the same processes train one row after the other, each in a session of its own.

The start of a rank takes seconds (the interpreter, the framework, the data); a session takes a tenth of a second. The
measurement of many strategies over a few steps each therefore keeps the ranks. Each row still joins, prepares a fresh
model from the same seed, trains and leaves, as a script would. Every row is an order to ``ranks``, which report as in
``processes``.

After a failure the state of the ranks is unknown: they are ended, and the next row starts new ones. All ranks are
workers, so strategies with separate server processes are not supported.

``python -m syncline_bench.warm SEATS LINES`` is one rank.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, cast

from rich.console import Console

from syncline.costs.cluster import Cluster
from syncline.errors import SynclineError
from syncline.launch.environment import recognise
from syncline.nouns import Layer, Spec

from .calibration.command import Request, calibrated
from .cases import Case
from .frameworks import Training, framework_of
from .messages import Job, Message, Task
from .predict.networks import parse_network, to_json
from .processes import Progress, Reports
from .ranks import Launched, Line, Ranks
from .report.comparison import Row
from .site import HERE, LOCAL, Site
from .train import side_of, train
from .workloads import Workload, load

SCRIPT = ("-m", "syncline_bench.warm")
START_SILENCE_S = 120.0
"""The longest time without a report while the ranks load the framework and the workload."""
_END_SILENCE_S = 5.0
"""The longest time without a report while they end: all rows are complete."""

_LAST_WORDS_S = 2.0
"""For further reports after the first report of a failure: a search has no time to lose."""


@dataclass(frozen=True)
class Seats(Task):
    """The work of every rank: its workload and framework."""

    workload: str
    framework: str


@dataclass(frozen=True)
class Trained:
    """A row, and the ``layers`` with their times if rank 0's schedule has measured them."""

    row: Row
    layers: tuple[Layer, ...] = ()


class WarmRanks:
    """The workers of one workload. As a context manager it ends them."""

    def __init__(self, workers: int, workload: str, framework: str, display: Progress, site: Site = HERE) -> None:
        self._workers, self._seats = workers, Seats(workload, framework)
        self._display, self._site = display, site
        self._ranks: Ranks | None = None

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._ranks is not None:
                with suppress(SynclineError):  # all rows are there
                    self._ranks.end(_END_SILENCE_S)
        finally:
            self.end_at_once()

    def start(self) -> float:
        """Start the ranks unless they run. Returns the seconds until all are ready; raises SynclineError on failure."""
        begun = time.monotonic()
        self._started()
        return time.monotonic() - begun

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers in rank order."""
        return self._started().pids

    def train(
        self, case: Case, seed: int, silence_s: float, *, warmup: int | None = None, scored: bool = False
    ) -> Trained:
        """Train one row. A failure is in the row's ``error``, and ends the ranks.

        The row fails if no rank reports anything for ``silence_s`` seconds. ``warmup`` and ``scored``: see ``Job``.
        """
        self._display.begin(case.name, case.workers, case.iterations)
        reports, error = Reports(case, self._display), None
        job = Job(
            self._seats.workload, case.strategy, case.batch, case.iterations, seed, case.evaluate_every,
            framework=self._seats.framework, warmup=warmup, scored=scored,
        )  # fmt: skip
        try:
            self._started().order(reports.take, silence_s, kind="train", **asdict(job))
        except (SynclineError, OSError) as failure:
            error = str(failure)
            self.end_at_once()
        self._display.end("done" if error is None else "failed")
        return Trained(replace(reports.row(), error=error), _layers(reports.results.get(0, {})))

    def calibrate(self, request: Request, silence_s: float) -> Cluster:
        """Measure the network between the ranks as ``syncline calibrate`` does. Raises SynclineError if that fails."""
        told: list[Message] = []
        try:
            self._started().order(told.append, silence_s, kind="calibrate", request=request.to_json())
        except (SynclineError, OSError):
            self.end_at_once()
            raise
        return parse_network(str(told[0]["network"]), "measured here")

    def end_at_once(self) -> None:
        """End the ranks without waiting for their work."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _started(self) -> Ranks:
        if self._ranks is None:
            environ = framework_of(self._seats.framework).capabilities["environ"]
            place = Launched(LOCAL, environ, self._site)
            made = Ranks(
                self._seats.to_json(), self._workers, place, SCRIPT, START_SILENCE_S, last_words_s=_LAST_WORDS_S
            )
            self._ranks = made.__enter__()
        return self._ranks


def _layers(told: Mapping[str, Any]) -> tuple[Layer, ...]:
    return tuple(
        Layer(Spec(name, tuple(shape), dtype), forward_s, backward_s)
        for name, shape, dtype, forward_s, backward_s in told.get("layers", ())
    )


# The process of a rank.


def main(text: str, lines: str) -> None:
    """Run one rank until the orders end. A failure is reported to the starter before it ends the process."""
    seats, place = Seats.from_json(text), recognise()
    line = Line(lines, place)
    with line.telling():
        cast("type[Training]", framework_of(seats.framework).target).loaded()
        workload = load(seats.workload)
        for order in line.orders():
            _carry_out(order, workload, line)
            gc.collect()  # hooks keep models of hundreds of megabytes in reference cycles
            gc.freeze()  # the remaining objects were loaded once and stay


def _carry_out(order: dict[str, Any], workload: Workload, line: Line) -> None:
    if order.pop("kind") == "calibrate":
        found = calibrated(Request.from_json(order["request"]), recognise(), Console(quiet=True))
        if found is not None:
            line.send("calibrated", network=to_json(found.cluster))
        return
    job = replace(Job(**order), workload=workload.name)
    begun = time.perf_counter()
    side = side_of(job.strategy)
    train(job, side, line.send, time.perf_counter() - begun, line.rank, workload, _measured_layers)


def _measured_layers() -> dict[str, Any]:
    """The layers of the first model if its schedule has measured them; empty under a peer, or without PyTorch."""
    from syncline.process import process

    if process.joined is None or not process.prepared:
        return {}
    layers = process.prepared[0].replica.exchange.layout.layers
    if not any(layer.backward_s for layer in layers):
        return {}
    return {
        "layers": [
            [layer.spec.name, layer.spec.shape, layer.spec.dtype, layer.forward_s, layer.backward_s] for layer in layers
        ]
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
