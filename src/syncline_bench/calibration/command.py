"""Runs ``syncline calibrate``: checks the request, starts the ranks, measures, writes the file and prints the table.

Without a launcher, this process starts the ranks on this machine or in a lab; each runs the same command. Under
torchrun, ``syncline run``, mpirun or srun, this process is a rank itself. Ranks meet as in a training. All but rank 0
leave after the measurement of the links; rank 0 then times the work of one thread, and writes and prints the result.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from syncline import api, registry
from syncline.errors import UsageError
from syncline.launch.environment import Environment, recognise
from syncline.launch.local import LEFT_S, Placing, here, launch
from syncline.nouns import Rate
from syncline.session.session import Session
from syncline.strategy.grammar import read_part, write_value
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO

from ..collectives.request import MOST_RANKS
from ..display import Display, console_beside
from ..machine import provenance
from ..messages import Task
from ..predict.networks import to_json
from ..report.files import STANDARD_OUTPUT, replace_text, result_paths
from ..report.predictions import render_constants
from . import computing, links, overlap, stepping
from .computing import ways_of
from .fits import Estimate
from .links import BUDGET_S, Timed
from .network import Calibration, Hosts, calibration_of

DEFAULT_RANKS = 2


@dataclass(frozen=True)
class Request(Task):
    """The checked arguments of a calibration, which each rank receives.

    ``ranks`` is the number of ranks to start on this machine, or in a lab with links of ``lab_rate`` and ``per_host``
    ranks on each host; None if the user gave no number. The ranks meet with ``strategy``. ``ways`` are codecs with or
    without error feedback. ``budget_s`` is the approximate time for the messages of one kind of link. ``asked`` is the
    command that ran, ``output`` the path of the network file.
    """

    ranks: int | None
    per_host: int
    lab_rate: float | None
    strategy: str
    ways: tuple[tuple[str, bool], ...]
    budget_s: float
    asked: str
    output: str | None

    @property
    def path(self) -> Path | None:
        """The path of the network file, or None. Raises UsageError if it cannot be written."""
        return result_paths({"-o": self.output})[0]


def request_of(
    *,
    ranks: int | None = None,
    nodes: Sequence[int] = (),
    lab_rate: Rate | None = None,
    transport: str = "auto",
    codecs: Sequence[str] = (),
    budget_s: float = BUDGET_S,
    output: Path | None = None,
) -> Request:
    """Check all arguments. Raises UsageError with the remedy.

    ``nodes`` are the numbers of ranks on the hosts of a lab; if empty, each host has one.
    """
    if lab_rate is not None and lab_rate <= 0:
        raise UsageError(f"--lab needs the rate of its links, such as 1gbit, got {lab_rate:g} bit/s")
    if nodes and lab_rate is None:
        raise UsageError("--nodes describes the hosts of a lab: give the rate of its links too, such as --lab 1gbit")
    if len(set(nodes)) > 1:
        raise UsageError(f"all hosts of a lab have the same number of ranks, got {', '.join(map(str, nodes))}")
    if nodes and ranks is not None and ranks != sum(nodes):
        raise UsageError(f"--ranks {ranks} and --nodes disagree: the nodes have {sum(nodes)} ranks")
    count = sum(nodes) or ranks
    if count is None and lab_rate is not None:
        count = DEFAULT_RANKS  # a number, so that run() refuses --lab under a launcher
    if count is not None and not 1 <= count <= MOST_RANKS:
        raise UsageError(f"--ranks has to be 1 to {MOST_RANKS}, got {count}")
    if lab_rate is not None and count == 1:
        raise UsageError("--lab sets the links between hosts, and one rank has none: use --ranks 2, or leave --lab out")
    strategy = _meeting_by(transport)
    _check_transport(strategy, lab_rate is not None)
    options = {
        "--ranks": ranks,
        "--lab": None if lab_rate is None else write_value(lab_rate, Rate),
        "--nodes": f"{len(nodes)}x{nodes[0]}" if nodes else None,
        "--transport": None if strategy.transport == AUTO else transport,
        "--codecs": ",".join(codecs) or None,
        "--seconds": None if budget_s == BUDGET_S else f"{budget_s:g}",
    }
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    asked = shlex.join(["syncline", "calibrate", *given])
    path = None if output is None else str(output)
    per_host = nodes[0] if nodes else 1
    return Request(count, per_host, lab_rate, str(strategy), ways_of(codecs), budget_s, asked, path)


def _meeting_by(transport: str) -> Strategy:
    """The strategy of the ranks: one with the transport's own collectives inside hosts, if it has some."""
    name = read_part(transport).name
    known = name in registry.names("transports")
    native = known and registry.get("transports", name).capabilities.get("collectives")
    architecture = "hierarchical(inside=native)" if native else "ring schedule=wait_free"  # as ``stepping`` needs it
    return Strategy.parse(f"{architecture} transport={transport}")


def _check_transport(strategy: Strategy, lab: bool) -> None:
    """Raise UsageError if the transport cannot connect processes, or in a lab, hosts."""
    if strategy.transport == AUTO:
        return
    entry = registry.get("transports", strategy.transport.name)
    if entry.capabilities.get("connection") is None:
        raise UsageError(f"transport={entry.name} does not reach other processes: use auto, tcp or shm")
    if lab and entry.capabilities.get("one_host"):
        raise UsageError(f"transport={entry.name} works inside one host, and a lab has several: use auto or tcp")


PROGRESS_S = 60.0
"""The time limit for progress between the ranks."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def run(request: Request, console: Console | None = None) -> int:
    """Measure, write and print. Returns the exit status; raises UsageError before any process starts."""
    environment = recognise()
    launched = environment.launcher != "none"
    if launched and request.ranks is not None:
        raise UsageError(f"{environment.launcher} has started the ranks: leave --ranks, --lab and --nodes out")
    if launched or request.ranks == 1:
        _take_part(request, environment, console)
        return 0
    _ = request.path  # raises UsageError for a path that cannot be written, before any rank starts
    return _start(request, console or Console(stderr=True))


def _start(request: Request, console: Console) -> int:
    """Start the ranks with the request as their argument, and wait for their end."""
    told = replace(request, ranks=None)
    command = [sys.executable, "-m", "syncline", "calibrate", "--request", told.to_json()]
    ranks = DEFAULT_RANKS if request.ranks is None else request.ranks
    with ExitStack() as stack:
        place: Placing = here
        if request.lab_rate is not None:
            from ..lab import Lab  # loads modules that only a lab needs

            lab = stack.enter_context(Lab(ranks // request.per_host, Rate(request.lab_rate)))
            place = partial(lab.placement, per_host=request.per_host)
        outcome = launch(command, ranks, place=place, stop_s=LEFT_S)
    if outcome.status == 128 + signal.SIGINT:
        raise KeyboardInterrupt  # Ctrl-C also reaches the ranks, and one of them may end first
    if outcome.status:
        console.print(Text(f"syncline: {outcome.text}"), soft_wrap=True)
    return outcome.status


class _Found(NamedTuple):
    """The times that ranks have measured together: between hosts, inside a host, and of a library inside a host.

    A text in place of an estimate is the reason why there is none.
    """

    place: Hosts
    between: Sequence[Timed] = ()
    inside: Sequence[Timed] = ()
    slowdown: Estimate | str = ""
    native: Sequence[Timed] = ()
    tensor: Estimate | str = ""


def _take_part(request: Request, environment: Environment, console: Console | None) -> None:
    """Run one rank. Rank 0 also writes the file and prints the table."""
    found = calibrated(request, environment, console)
    if found is not None:
        _tell(found, request.path, console or console_beside(request.path))


def calibrated(request: Request, environment: Environment, console: Console | None = None) -> Calibration | None:
    """Join the other ranks and measure. Returns the calibration on rank 0, which works on alone, else None."""
    if environment.world > 1:
        found = _joined(request, environment, console)
        if environment.rank > 0:
            return None
    else:
        found = _Found(Hosts((0,), _cores(), True, ""))
    path = request.path
    console = console or console_beside(path)
    with Display(console) as display, display.task("computing", 1.0) as task:
        computed = computing.measure(request.ways, task.at)
    name = "calibrated" if path is None or path == STANDARD_OUTPUT else path.stem
    links_s, origin = (found.between, found.inside), provenance()
    more = found.native, found.tensor
    return calibration_of(name, found.place, *links_s, found.slowdown, computed, origin, request.asked, *more)


_NATIVE = "the message library inside a host"


def _joined(request: Request, environment: Environment, console: Console | None) -> _Found:
    """Join the other ranks, measure the links with them, and leave."""
    api.init(request.strategy, progress=PROGRESS_S)
    try:
        leads = environment.rank == 0
        if leads:
            console = console or console_beside(request.path)
        session = api.session()
        place = _place(session, request.lab_rate)
        found: dict[str, list[Timed]] = {}
        # Rank 0 shows the progress of all ranks.
        with Display(
            console if console is not None and leads else Console(quiet=True, force_terminal=False)
        ) as display:
            named = {f"links, {place.text}": place.between, "links inside a host": place.inside}
            if session.strategy.native_inside:
                named[_NATIVE] = place.native
            for title, ranks in named.items():
                native = title == _NATIVE
                with display.task(title, 1.0) as task:
                    timed = links.measure(session, ranks, request.budget_s, task.at, native=native) if ranks else []
                found[title] = timed
            with display.task("computing beside messages", 1.0) as task:
                tensor = stepping.measure(session, request.budget_s, task.at)
                slowdown = overlap.measure(session, place.between, request.budget_s, task.at)
        between, inside, *_ = found.values()
        return _Found(place, between, inside, slowdown, found.get(_NATIVE, []), tensor)
    finally:
        api.shutdown()  # also reports an exception in flight to the other ranks


def _place(session: Session, lab_rate: float | None) -> Hosts:
    """The hosts, cores and transport of all ranks. All ranks call it together."""
    mine = {"boot": _BOOT.read_text().strip(), "cores": _cores()}
    every = [json.loads(told) for told in session.gather(json.dumps(mine).encode())]
    one_machine = len({told["boot"] for told in every}) == 1
    cores = [int(told["cores"]) for told in every]
    assert session.roll is not None  # a session of several ranks has one
    rate = None if lab_rate is None else Rate(lab_rate)
    carrier = session.engine.transport.name
    return Hosts(session.roll.nodes, max(cores) if one_machine else min(cores), one_machine, carrier, rate)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _tell(found: Calibration, path: Path | None, console: Console) -> None:
    """Write the file, and print the table with a line on its use."""
    if path is not None:
        replace_text(path, to_json(found.cluster))
    kept = path is not None and path != STANDARD_OUTPUT
    usage = f"To predict with it: syncline predict --network {path if kept else 'FILE.json'} ..."
    usage = usage if path is not None else f"Nothing was written; with -o FILE.json, {usage[0].lower()}{usage[1:]}"
    remarks = (*found.remarks, usage)
    console.print(render_constants(found.rows, found.cluster.about, remarks))
