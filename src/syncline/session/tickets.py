"""Tickets: what workers show each other at the beginning of every collective call.

A ticket says which call this is, the how manieth, an argument that must agree, and the weight of the worker's batch.
Workers that do different things at the same point therefore get an error that names them, instead of a hang or wrong
numbers. Tickets travel as one table of a row per worker; this file knows nothing of how.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.work import Work

_TICKET = struct.Struct("<QQQdQ")
TICKET_BYTES = _TICKET.size
_STEPS = (1 << 40) - 1

STEP, ALLREDUCE, BROADCAST, BARRIER, GATHER, NORM, COMMIT, JOINED, TABLE, SPLIT, LAYOUT = range(1, 12)
AVERAGE, CONSOLIDATE = 12, 13
CALLS = {
    STEP: "a training step",
    ALLREDUCE: "allreduce",
    BROADCAST: "broadcast",
    BARRIER: "barrier",
    GATHER: "gather",
    NORM: "clip_grad_norm_",
    COMMIT: "the optimizer's step",
    JOINED: "the end of its batches (join)",
    TABLE: "load_state_dict with measured algorithms",
    SPLIT: "making a smaller group",
    LAYOUT: "replacing the buckets",
    AVERAGE: "averaging weights",
    CONSOLIDATE: "consolidate",
}


_OF_STEPS = {STEP, NORM, COMMIT, AVERAGE}
"""What a worker without batches takes part in."""


class Ticket(NamedTuple):
    """What a worker shows at a collective call: which, the how manieth, an argument that must agree, its weight."""

    kind: int
    call: int
    argument: int
    weight: float
    flags: int

    @property
    def text(self) -> str:
        """For messages."""
        where = f", step {step_of(self)}" if self.kind in (STEP, AVERAGE, CONSOLIDATE) else ""
        return f"at {CALLS.get(self.kind, 'nothing known')} (call {self.call}{where})"


def step_argument(first_key: int, step: int) -> int:
    """What has to agree at a step: the model, by its first key, and the number of the step."""
    return first_key * (_STEPS + 1) + (step & _STEPS)


def step_of(ticket: Ticket) -> int:
    """The number of the step that a ticket is of."""
    return ticket.argument & _STEPS


def ticket_table(world: int, rank: int, mine: Ticket) -> NDArray[np.uint8]:
    """A table for the tickets of ``world`` workers with the own one filled in: uint8, TICKET_BYTES per worker."""
    table = np.zeros(world * TICKET_BYTES, np.uint8)
    _TICKET.pack_into(table, rank * TICKET_BYTES, *mine)
    return table


def read_ticket(table: NDArray[np.uint8], rank: int) -> Ticket:
    """A worker's row; its kind is 0 while it has not come."""
    return Ticket(*_TICKET.unpack_from(table, rank * TICKET_BYTES))


class Meeting:
    """A ticket exchange under way; ``tickets`` raises MismatchError unless all workers came for the same."""

    def __init__(
        self, work: Work | None, table: NDArray[np.uint8], mine: Ticket, mismatch: Callable[[int, Ticket], Exception]
    ) -> None:
        self.work, self._table, self._mine, self._mismatch = work, table, mine, mismatch

    def tickets(self) -> list[Ticket]:
        """All workers' tickets in rank order, once the work is done."""
        found = [read_ticket(self._table, rank) for rank in range(self._table.size // TICKET_BYTES)]
        for rank, ticket in enumerate(found):
            kinds = {ticket.kind, self._mine.kind}
            if JOINED in kinds and kinds & _OF_STEPS:
                continue
            if (ticket.kind, ticket.argument) != (self._mine.kind, self._mine.argument):
                raise self._mismatch(rank, ticket)
        return found

    def missing(self) -> list[int]:
        """Workers whose ticket has not come yet."""
        return [rank for rank in range(self._table.size // TICKET_BYTES) if read_ticket(self._table, rank).kind == 0]
