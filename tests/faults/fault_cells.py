"""Every fault, under every strategy, at every point of a run: the cells, which of them have a meaning, and a covering.

``make faults`` runs cells until every pair of values has met (``covering``), or with ``--full`` all of them. With the
transport ``hosts`` every process has a host of its own in a lab, whose links can fail too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "raise": "an exception of the script",
    "exit": "os._exit, without a word",
    "reset": "all of its TCP connections are reset",
    "garbage": "random bytes on all of its TCP connections",
    "altered": "bytes of all that it sends are altered on their way (with checksum=on)",
    "truncated": "part of a frame on all of its TCP connections, then their end",
    "no descriptors": "the limit of open files is reached",
    "no file space": "files can no longer grow (RLIMIT_FSIZE)",
    "no memory": "the address space can no longer grow (RLIMIT_AS)",
    "clock": "the clock jumps by a day",
    "stranger": "a stranger calls all of its ports and sends random bytes",
    "wrong secret": "it has another secret",
    "duplicate rank": "it has the number of another process",
    "wrong world": "it counts more processes than the others",
    "partition": "its link is down",
    "one way": "its link loses all frames that it sends",
    "slow": "its link carries 1 Mbit/s",
}
STRATEGIES = (
    "ring",
    "direct codec=int8",
    "ps(servers=1)",
    "ps(servers=2, on=workers)",
    "ps(servers=1) sync=asp",
    "ring sync=local(steps=2)",
    "hierarchical schedule=wait_free",
    "backend",
)
"""``backend`` is DistributedDataParallel over the process group of Syncline."""
POINTS = ("start", "prepare", "step", "checkpoint", "end")
TRANSPORTS = ("shm", "tcp", "hosts")
"""``hosts`` is TCP between the hosts of a lab, which needs root."""

AT_START = ("stranger", "wrong secret", "duplicate rank", "wrong world")
"""Faults that only exist while a group forms: later its ports are closed and its members known."""

ENDS = ("kill", "stop", "raise", "exit", "no descriptors", "no memory")
"""Faults after which a process does nothing more."""

OF_LINKS = ("partition", "one way", "slow")
"""Faults of the link between the process's host and the others."""


class Cell(NamedTuple):
    """A fault of rank 1, the strategy and transport of all, and the point of the run at which it happens."""

    fault: str
    strategy: str
    point: str
    transport: str

    def __str__(self) -> str:
        return f"{self.fault}, {self.strategy}, {self.point}, {self.transport}"


def without_meaning(cell: Cell) -> str:
    """Why a cell cannot be tried; empty for the others."""
    if cell.fault in AT_START and cell.point != "start":
        return "after the start there are no ports to call, and members are known"
    if cell.point == "start" and cell.fault in ("reset", "garbage", "altered", "truncated"):
        return "before the start there are no connections"
    if cell.fault == "altered" and cell.transport == "shm":
        return "checksums are those of connections"
    if cell.strategy == "backend" and cell.fault == "wrong secret":
        return "torch's own store meets first, and knows no secret"
    if cell.strategy == "backend" and cell.fault in ("duplicate rank", "wrong world"):
        return "torch's own store counts processes before Syncline does"
    if cell.fault in OF_LINKS and cell.transport != "hosts":
        return "processes of one host have no link"
    if cell.strategy == "backend" and cell.point == "start" and cell.fault in (*ENDS, *OF_LINKS):
        return "only torch's own store has met, whose timeout counts clients and names no rank"
    if cell.strategy == "backend" and cell.point == "checkpoint":
        return "DistributedDataParallel has torch's own checkpoints"
    return ""


def cells() -> list[Cell]:
    """All cells that have a meaning."""
    return [
        cell
        for cell in (Cell(*values) for values in product(FAULTS, STRATEGIES, POINTS, TRANSPORTS))
        if not without_meaning(cell)
    ]


def pairs(cell: Cell) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    """The pairs of values that meet in a cell."""
    return combinations(enumerate(cell), 2)


def covering(among: Sequence[Cell]) -> list[Cell]:
    """Some of the cells, in which every pair that meets in any cell meets: greedily the one with the most new pairs."""
    left = {pair for cell in among for pair in pairs(cell)}
    found = []
    while left:
        best = max(among, key=lambda cell: sum(pair in left for pair in pairs(cell)))
        found.append(best)
        left.difference_update(pairs(best))
    return found
