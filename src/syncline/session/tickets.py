"""The common part of all collectives of a group: tickets that workers exchange, keys, numbers, and calling threads.

A ticket has the kind of the call, its number, a value that must agree, and the weight of the worker's batch. Workers
that make different calls at the same point get an error that names the calls, instead of a hang or wrong numbers.
Tickets are exchanged as a table with one row per worker, and with room for further data behind each.

Keys separate the messages of exchanges in flight. The lowest keys belong to models' buckets, the next to messages among
all processes and to models' weights; above them each communicator has a block for its calls. A group with models of its
own has a block above all these (``engine.scope``).

Keys follow from a communicator's number, which is larger than every number that its ranks have used. Groups that share
a process thus have different numbers; other groups may share one. Either all ranks make groups together and detect a
rank that makes another one, or the ranks of a group make it without the others. Threads of a process make groups one
after the other.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine.order import Work
from ..errors import UsageError

COMMUNICATORS = 1 << 10
"""The maximum number of communicators of a process."""

BUCKET_KEYS = 1 << 20
WEIGHT_KEYS = 2 * BUCKET_KEYS
CALL_KEYS = 4 * BUCKET_KEYS
"""The first key for calls of all workers; further communicators follow."""
CALLS_IN_FLIGHT = 1 << 12
"""The number of keys for the calls of one communicator."""
assert CALL_KEYS + COMMUNICATORS * CALLS_IN_FLIGHT <= 8 * BUCKET_KEYS


class CallKeys:
    """The keys of the calls of communicator ``number``, in turn. ``wait`` waits for a work that still holds a key."""

    def __init__(self, number: int, wait: Callable[[Work], None]) -> None:
        self._wait = wait
        self.first, self._in_flight = CALL_KEYS + number * CALLS_IN_FLIGHT, CALLS_IN_FLIGHT
        self._next = 0
        self._holders: dict[int, Work] = {}

    def take(self) -> int:
        """The next key, once no work holds it any more."""
        self._next = (self._next + 1) % self._in_flight
        key = self.first + self._next
        holder = self._holders.pop(key, None)
        if holder is not None and not holder.done:
            self._wait(holder)
        return key

    def hold(self, key: int, work: Work) -> None:
        """Reserve a key until a work that continues in the background is done."""
        self._holders[key] = work

    @property
    def held(self) -> bool:
        """Whether any work in the background holds a key."""
        return not all(work.done for work in self._holders.values())


_TICKET = struct.Struct("<QQQdQ")
TICKET_BYTES = _TICKET.size
_STEPS = (1 << 40) - 1

STEP, ALLREDUCE, BROADCAST, BARRIER, GATHER, NORM, COMMIT, JOINED, TABLE, SPLIT, LAYOUT = range(1, 12)
AVERAGE, CONSOLIDATE = 12, 13
ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SCATTER, REDUCE = range(14, 19)
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
    SPLIT: "making a group",
    LAYOUT: "replacing the buckets",
    AVERAGE: "averaging weights",
    CONSOLIDATE: "consolidate",
    ALL_GATHER: "all-gather",
    REDUCE_SCATTER: "reduce-scatter",
    ALL_TO_ALL: "all-to-all",
    SCATTER: "scatter",
    REDUCE: "reduce",
}


ELEMENT_TYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128", "another type"),
)
"""The element types that tickets can name."""

_OF_STEPS = {STEP, NORM, COMMIT, AVERAGE}
"""The calls in which a worker without batches takes part."""
_WITH_TENSORS = {ALLREDUCE, BROADCAST, GATHER, *range(ALL_GATHER, REDUCE + 1)}
"""The calls whose flags may describe their tensors."""


_NUMBER_BITS, _RANKS_AT, _NAMED_RANKS = 16, 32, 32
"""Flags for making a group: the bits of each of two numbers, the position of the bits for ranks, and their number."""


class Ticket(NamedTuple):
    """A worker's part of the table at a collective call: its kind and number, the value that must agree, its weight."""

    kind: int
    call: int
    argument: int
    weight: float
    flags: int

    @property
    def text(self) -> str:
        """The call, for messages."""
        if self.kind in (STEP, AVERAGE, CONSOLIDATE):
            return f"at {CALLS[self.kind]} (call {self.call}, step {step_of(self)})"
        if self.kind == SPLIT and self.flags >> _RANKS_AT:
            ranks = [rank for rank in range(_NAMED_RANKS) if self.flags >> _RANKS_AT + rank & 1]
            return f"at {CALLS[SPLIT]} of ranks {', '.join(map(str, ranks))} (call {self.call})"
        return f"at {described(self.kind, self.call, self.flags if self.kind in _WITH_TENSORS else 0)}"


def described(kind: int, call: int, flags: int) -> str:
    """A call, for messages. ``flags`` are those of ``sized``, or 0 if the tensors are unknown."""
    elements, code = divmod(flags, len(ELEMENT_TYPES) + 1)
    what = f", {elements} element{'s' * (elements != 1)} of {ELEMENT_TYPES[code - 1]}" if code else ""
    return f"{CALLS.get(kind, 'nothing known')} (call {call}{what})"


def remedy(theirs: Ticket, ours: Ticket) -> str:
    """The advice for workers that have made different calls with these tickets."""
    kinds = {theirs.kind, ours.kind}
    if kinds == {CONSOLIDATE} or (len(kinds) == 2 and kinds & {STEP, AVERAGE}):
        return "do all ranks have the same number of batches? if not, wrap the loop in `with syncline.join():`"
    if kinds == {SPLIT}:
        return "let every rank make the same groups in the same order, including groups that it is not in"
    if LAYOUT in kinds:
        return "do all ranks load a checkpoint at the same place, and the same one?"
    same = "check that every rank makes the same calls in the same order with the same sizes"
    if kinds <= _WITH_TENSORS and theirs.text == ours.text:
        same += ": they differ in the root, the reduction, or the sizes and types of the tensors one by one"
    return same


def sized(elements: int, dtype: str) -> int:
    """The flags of a ticket for a call on this number of elements of this type."""
    return elements * (len(ELEMENT_TYPES) + 1) + ELEMENT_TYPES.index(dtype) + 1


def size_of(array: NDArray[Any]) -> int:
    """The flags of a ticket for a call on one array."""
    name = array.dtype.name
    return sized(array.size, name if name in ELEMENT_TYPES else ELEMENT_TYPES[-1])


def fingerprint(array: NDArray[Any], extra: int) -> int:
    """A value that differs between arrays of different size or type."""
    return zlib.crc32(f"{array.size} {array.dtype} {int(extra)}".encode())


def making(ranks: Sequence[int], number: int, free: int) -> int:
    """The flags of a ticket for making a group: the least unused number here, and a number to reuse, or 0.

    They include the ranks, for messages, if these are few.
    """
    named = sum(1 << rank for rank in ranks) if max(ranks) < _NAMED_RANKS else 0
    return named << _RANKS_AT | free << _NUMBER_BITS | number


def numbers_of(ticket: Ticket) -> tuple[int, int]:
    """The two numbers in a ticket for making a group."""
    least = (1 << _NUMBER_BITS) - 1
    return ticket.flags & least, ticket.flags >> _NUMBER_BITS & least


def step_argument(first_key: int, step: int) -> int:
    """The value that must agree at a step: the model, by its first key, and the number of the step."""
    return first_key * (_STEPS + 1) + (step & _STEPS)


def step_of(ticket: Ticket) -> int:
    """The number of the step of a ticket."""
    return ticket.argument & _STEPS


def ticket_table(world: int, rank: int, mine: Ticket, room: int = 0) -> NDArray[np.uint8]:
    """A table (uint8) with one row per worker of TICKET_BYTES and ``room`` bytes, and this worker's ticket in it."""
    table = np.zeros((world, TICKET_BYTES + room), np.uint8)
    _TICKET.pack_into(table[rank], 0, *mine)
    return table


def read_tickets(table: NDArray[np.uint8]) -> tuple[Ticket, ...]:
    """The workers' tickets in rank order. The kind of a ticket that has not arrived is 0."""
    return tuple([Ticket(*_TICKET.unpack_from(row)) for row in table])


class Meeting:
    """An exchange of tickets in flight, with this worker's ticket ``mine``. Without ``work`` there is no other worker.

    ``tickets`` raises MismatchError unless all workers have made the same call. Callable from several threads.
    """

    def __init__(
        self,
        work: Work | None,
        table: NDArray[np.uint8],
        mine: Ticket,
        mismatch: Callable[[int, Ticket], Exception],
    ) -> None:
        self.work, self._table, self._mine, self._mismatch = work, table, mine, mismatch
        self._tickets: tuple[Ticket, ...] | None = None  # of all, once they have come and agree
        self._share: float | None = None

    def tickets(self) -> tuple[Ticket, ...]:
        """All workers' tickets in rank order, once the work is done."""
        if self._tickets is not None:
            return self._tickets
        done = self.work is None or self.work.done  # before they are read: what has not come yet is not kept
        found = read_tickets(self._table)
        for rank, ticket in enumerate(found):
            kinds = {ticket.kind, self._mine.kind}
            if JOINED in kinds and kinds & _OF_STEPS:
                continue
            if (ticket.kind, ticket.argument) != (self._mine.kind, self._mine.argument):
                raise self._mismatch(rank, ticket)
        if done:
            self._tickets = found
        return found

    def share(self) -> float:
        """This worker's weight in a step, once the work is done; the mean over the workers is 1.

        A worker without batches has weight 0, except in an exchange of weights.
        """
        if self._share is not None:
            return self._share
        tickets = self.tickets()
        total = sum([ticket.weight for ticket in tickets])
        counts = self._mine.kind != JOINED or any(ticket.kind == AVERAGE for ticket in tickets)
        share = self._mine.weight * len(tickets) / total if counts and total > 0 else 1.0
        if self._tickets is not None:
            self._share = share
        return share

    def missing(self) -> list[int]:
        """The workers whose ticket has not arrived."""
        return [rank for rank, ticket in enumerate(read_tickets(self._table)) if ticket.kind == 0]

    @property
    def brought(self) -> NDArray[np.uint8]:
        """The further data of all workers, one row per worker, once the work is done."""
        return self._table[:, TICKET_BYTES:]


class Callers:
    """The threads that are in calls of one group. ``titled`` adds the group's name to a message.

    No call may begin in a group that is being ended. A caller first registers and then checks; the thread that ends the
    group first marks it and then checks. At least one of the two therefore sees the other.
    """

    def __init__(self, titled: Callable[[str], str]) -> None:
        self._titled = titled
        self._inside: list[int] = []  # the threads that are in a call, once for each
        self._closing = threading.Lock()
        self._closed_by: int | None = None  # the thread that ends it

    @property
    def is_busy(self) -> bool:
        """Whether another thread of this process is in a call."""
        return any(thread != threading.get_ident() for thread in list(self._inside))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Register this thread as a caller inside the block. UsageError if another thread is ending the group."""
        thread = threading.get_ident()
        begins = thread not in self._inside
        self._inside.append(thread)
        try:
            if begins and self._closed_by not in (None, thread):
                raise UsageError(
                    self._titled("another thread is ending this group, or has ended it: make a new one and use that")
                )
            yield
        finally:
            self._inside.remove(thread)

    def close(self) -> bool:
        """Forbid calls by other threads. False, without effect, if one is in a call or has closed the group."""
        with self._closing:
            if self._closed_by is None:
                self._closed_by = threading.get_ident()
                if not self.is_busy:
                    return True
                self._closed_by = None
            return False

    def reopen(self) -> None:
        """Allow calls by other threads again."""
        self._closed_by = None


FOUNDING = struct.Struct("<IIQ")
"""The least unused number here, and a number to reuse with the calls made in its group, or zeros."""

FOUNDING_TAGS = 7 << 61
"""The tag bits of messages by which some processes make a group. Except ``LIBRARY`` no other tags have all of the
highest three bits."""


def check_number(number: int) -> None:
    """Raise UsageError if there are no keys for a group with that number."""
    if number >= COMMUNICATORS:
        raise UsageError(
            f"a process can be in up to {COMMUNICATORS} communicators in a run, and numbers of destroyed groups are"
            " used again by groups of the same ranks only: make groups once and keep them, or begin a new run"
        )
