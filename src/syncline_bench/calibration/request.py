"""The arguments of a calibration, checked before any process starts, and their JSON form for the ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from syncline import registry
from syncline.errors import UsageError
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO

from ..collectives.request import MOST_RANKS
from ..report.files import result_paths
from .computing import ways_of

DEFAULT_RANKS = 2
BUDGET_S = 5.0
"""The default time for the messages of one kind of link, approximately."""


@dataclass(frozen=True)
class Request:
    """The checked arguments of a calibration, which each rank receives as JSON.

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

    def to_json(self) -> str:
        """The request as a command-line argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read the request from a rank's command-line argument."""
        fields = json.loads(text)
        return cls(**{**fields, "ways": tuple((codec, feedback) for codec, feedback in fields["ways"])})


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
        raise UsageError("--nodes describes the hosts of a lab: give the rate of its links too, as --lab 1gbit")
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
    strategy = Strategy.parse(f"ring transport={transport}")
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


def _check_transport(strategy: Strategy, lab: bool) -> None:
    """Raise UsageError if the transport cannot connect processes, or in a lab, hosts."""
    if strategy.transport == AUTO:
        return
    entry = registry.get("transports", strategy.transport.name)
    if entry.capabilities.get("connection") is None:
        raise UsageError(f"transport={entry.name} does not reach other processes: use auto, tcp or shm")
    if lab and entry.capabilities.get("one_host"):
        raise UsageError(f"transport={entry.name} works inside one host, and a lab has several: use auto or tcp")
