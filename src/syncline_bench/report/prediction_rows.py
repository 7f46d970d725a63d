"""The result file of ``syncline predict --collective``: what every number in it means, and its JSON form.

Owns the names, units and JSON of a ``CollectivePrediction`` and its rows; the rules of ``result_file`` hold here. Does
not know how anything was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .result_file import ResultFile, reader


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of an array of so many ``bytes`` among so many workers, of which a host has ``per_node``.

    ``comm_s`` is its time in seconds, ``low_s`` and ``high_s`` those with every constant of the network at the fastest
    and at the slowest end of its range. ``model`` says whether its plan was timed, message by message, or its closed
    formula was taken.
    """

    algorithm: str
    bytes: int
    workers: int
    comm_s: float
    low_s: float
    high_s: float
    per_node: int = 1
    model: str = "plan"

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """As in nccl-tests, for an allreduce; None where nothing is sent."""
        if self.comm_s <= 0:
            return None
        return 2 * (self.workers - 1) / self.workers * self.bytes / self.comm_s


@dataclass(frozen=True, kw_only=True)
class CollectivePrediction(ResultFile):
    """Collectives on a network, of which ``constants`` has every number with its range and source.

    ``assumed`` are the names of those that nobody has measured, ``notes`` what the answer cannot depend on.
    """

    verb: ClassVar = "predict --collective"
    lists: ClassVar = {"rows": reader(CollectiveRow)}

    network: str
    about: str
    source: str
    date: str
    topology: str
    ports_per_host: int
    constants: Mapping[str, Mapping[str, Any]]
    assumed: list[str]
    notes: list[str] = field(default_factory=list)
    rows: tuple[CollectiveRow, ...] = ()
