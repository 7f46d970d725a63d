"""Owns ranks that outlive a row: the same processes train one row after the other, each in a session of its own.

The start of a rank takes seconds (the interpreter, the framework, the data); a session takes a tenth of a second. The
measurement of many strategies over a few steps each therefore keeps the ranks. Each row still joins, prepares a fresh
model from the same seed, trains and leaves, as a script would. Orders go to every process over its connection. The
ranks report as in ``processes``, whose ``RowWatch`` makes the row.

After a failure the state of the ranks is unknown: they are ended, and the next row starts new ones. All ranks are
workers, so strategies with separate server processes are not supported.

``python -m syncline_bench.warm SEATS`` is one rank.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, cast

from rich.console import Console

from syncline.costs.cluster import Cluster
from syncline.errors import SynclineError
from syncline.launch.environment import recognise
from syncline.launch.local import LocalRun
from syncline.nouns import Layer, Spec

from .calibration.command import calibrated
from .calibration.request import Request
from .cases import Case
from .frameworks import Training, framework_of
from .launchers import LOCAL
from .messages import Connection, Job, Mailbox, Message, connect
from .predict.networks import parse_network, to_json
from .processes import Progress, RowWatch
from .report.rows import Row
from .site import HERE, Site
from .train import side_of, train
from .workloads import Workload, load

SCRIPT = ("-m", "syncline_bench.warm")
START_LIMIT_S = 120.0
"""The time limit for the ranks to load the framework and the workload."""

_POLL_S = 0.05
_KEPT_LINES = 12


@dataclass(frozen=True)
class Seats:
    """The arguments of every rank: workload and framework, and the address of each rank's connection."""

    workload: str
    framework: str
    reports: tuple[str, ...]


@dataclass(frozen=True)
class Trained:
    """A row, and the ``layers`` with their times if rank 0's schedule has measured them."""

    row: Row
    layers: tuple[Layer, ...] = ()


class WarmRanks:
    """The workers of one workload. As a context manager it ends them."""

    def __init__(self, workers: int, workload: str, framework: str, display: Progress, site: Site = HERE) -> None:
        self._workers, self._workload, self._framework = workers, workload, framework
        self._display, self._site = display, site
        self._stack: ExitStack | None = None
        self._mailbox: Mailbox
        self._run: LocalRun
        self._printed: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self._heard: Callable[[int, str], None] = self._note

    def __enter__(self) -> WarmRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        else:
            self.end_at_once()

    def start(self) -> float:
        """Start the ranks unless they run. Returns the seconds until all are ready; raises SynclineError on failure."""
        if self._stack is not None:
            return 0.0
        begun = time.monotonic()
        with ExitStack() as stack:
            self._mailbox = stack.enter_context(Mailbox(self._workers))
            seats = Seats(self._workload, self._framework, self._mailbox.addresses)
            command = [sys.executable, *SCRIPT, json.dumps(asdict(seats))]
            env = framework_of(self._framework).capabilities["environ"]
            run = self._site.run(
                LOCAL, command, self._workers, env=env, on_output=lambda rank, line: self._heard(rank, line)
            )
            self._run = stack.enter_context(run)
            self._collect("ready", range(self._workers), START_LIMIT_S, "starting")
            self._stack = stack.pop_all()
        return time.monotonic() - begun

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers in rank order."""
        return self._run.pids

    def end(self) -> None:
        """End the ranks in an orderly way. The next row starts new ones."""
        if self._stack is not None:
            self._mailbox.close_orders()  # each rank ends when its orders end
            stack, self._stack = self._stack, None
            limit = time.monotonic() + 5.0
            while self._run.poll(_POLL_S) is None and time.monotonic() < limit:
                self._mailbox.receive(0.0)
            stack.close()

    def train(
        self, case: Case, seed: int, limit_s: float, *, warmup: int | None = None, scored: bool = False
    ) -> Trained:
        """Train one row. A failure is in the row's ``error``, and ends the ranks.

        The row fails if no rank reports anything for ``limit_s`` seconds. ``warmup`` and ``scored`` are those of
        ``Job``.
        """
        self._display.begin(case.name, case.workers, case.iterations)
        watch = RowWatch(case, self._display, limit_s, stay=True)
        self._heard = watch.output
        job = Job(
            self._workload, case.strategy, case.batch, case.iterations, seed, (), case.evaluate_every,
            framework=self._framework, warmup=warmup, scored=scored,
        )  # fmt: skip
        try:
            self.start()
            self._order("train", asdict(job))
            watch.follow(self._mailbox, self._run)
        except (SynclineError, OSError) as error:
            watch.failure = str(error)
        row = watch.row()
        self._heard = self._note
        if row.error is not None:
            self.end_at_once()
        self._display.end("done" if row.error is None else "failed")
        return Trained(row, _layers(watch.told.get(0, {})))

    def calibrate(self, request: Request, limit_s: float) -> Cluster:
        """Measure the network between the ranks as ``syncline calibrate`` does. Raises SynclineError if that fails."""
        self.start()
        try:
            self._order("calibrate", {"request": request.to_json()})
            told = self._collect("calibrated", range(self._workers), limit_s, "measuring the network")
        except (SynclineError, OSError):
            self.end_at_once()
            raise
        return parse_network(str(told[0]["network"]), "measured here")

    def end_at_once(self) -> None:
        """End the ranks without waiting for their work."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()

    def _order(self, kind: str, content: Mapping[str, Any]) -> None:
        self._mailbox.tell({"kind": kind, **content})

    def _collect(self, kind: str, ranks: range, limit_s: float, what: str) -> dict[int, Message]:
        """Receive one message of ``kind`` from each rank. Raises SynclineError if a rank fails or exceeds the limit."""
        found: dict[int, Message] = {}
        limit = time.monotonic() + limit_s
        while len(found) < len(ranks):
            outcome = self._run.poll()
            for rank, message in self._mailbox.receive(_POLL_S):
                if message["kind"] == "error":
                    raise SynclineError(f"{what}: rank {rank}: {message['text']}")
                if message["kind"] == kind:
                    found[rank] = message
            if outcome is not None and len(found) < len(ranks):
                said = "".join(f"\nrank {rank}: {line}" for rank, line in self._printed)
                raise SynclineError(f"{what}: {outcome.text}{said}")
            if time.monotonic() > limit:
                missing = ", ".join(str(rank) for rank in ranks if rank not in found)
                raise SynclineError(f"{what}: rank {missing} did not answer within {limit_s:.0f} s")
        return found

    def _note(self, rank: int, line: str) -> None:
        self._printed.append((rank, line))


def _layers(told: Message) -> tuple[Layer, ...]:
    return tuple(
        Layer(Spec(name, tuple(shape), dtype), forward_s, backward_s)
        for name, shape, dtype, forward_s, backward_s in told.get("layers", ())
    )


# The process of a rank.


def main(text: str) -> None:
    """Run one rank until the orders end. A failure is reported and ends the rank."""
    told = json.loads(text)
    rank = recognise().rank
    seats = Seats(told["workload"], told["framework"], tuple(told["reports"]))
    with closing(connect(seats.reports)) as connection:
        try:
            cast("type[Training]", framework_of(seats.framework).target).loaded()
            workload = load(seats.workload)
            connection.send("ready")
            while order := connection.hear():
                _carry_out(order, workload, connection, rank)
                gc.collect()  # hooks keep models of hundreds of megabytes in reference cycles
                gc.freeze()  # the remaining objects were loaded once and stay
        except Exception as error:
            connection.fail(error)
            raise


def _carry_out(order: dict[str, Any], workload: Workload, connection: Connection, rank: int) -> None:
    if order.pop("kind") == "calibrate":
        found = calibrated(Request.from_json(order["request"]), recognise(), Console(quiet=True))
        connection.send("calibrated", network=None if found is None else to_json(found.cluster))
        return
    job = replace(Job(**{**order, "reports": ()}), workload=workload.name)
    begun = time.perf_counter()
    side = side_of(job.strategy)
    train(job, side, connection, time.perf_counter() - begun, rank, workload, _measured_layers)


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
    main(sys.argv[1])
