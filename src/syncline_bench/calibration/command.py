"""Runs ``syncline calibrate``: starts the ranks, measures with them, writes the file and prints the table.

Without a launcher, this process starts the ranks on this machine or in a lab; each runs the same command. Under
torchrun, ``syncline run``, mpirun or srun, this process is a rank itself. Ranks meet as in a training. All but rank 0
leave after the measurement of the links; rank 0 then times the work of one thread, and writes and prints the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from syncline import api
from syncline.errors import UsageError
from syncline.launch.environment import Environment, recognise
from syncline.launch.local import LEFT_S, Placing, here, launch
from syncline.nouns import Rate
from syncline.session.session import Session

from ..cases import console_beside
from ..display import Display
from ..machine import provenance
from ..predict.networks import to_json
from ..report import calibration
from ..report.files import STANDARD_OUTPUT, replace_text
from . import computing, links
from .links import Timed
from .network import Calibration, Hosts, calibration_of
from .request import DEFAULT_RANKS, Request

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
    """The times that ranks have measured together: between hosts, and inside a host."""

    place: Hosts
    between: Sequence[Timed] = ()
    inside: Sequence[Timed] = ()


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
    return calibration_of(name, *found, computed, provenance(), request.asked)


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
            for title, ranks in {f"links, {place.text}": place.between, "links inside a host": place.inside}.items():
                with display.task(title, 1.0) as task:
                    found[title] = links.measure(session, ranks, request.budget_s, task.at) if ranks else []
        return _Found(place, *found.values())
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
    console.print(calibration.render(found.rows, found.cluster.about, remarks))
