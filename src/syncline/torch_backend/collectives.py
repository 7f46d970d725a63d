"""The collectives of a process group over a communicator: the plans or messages of each, step by step.

Every collective starts with a meeting in which ranks show what they are calling. Up to ROOM bytes of data travel with
it, so small tensors need nothing more. In shared memory the exchange itself shows each rank's call, so a collective
that is a single exchange, whose result needs all ranks, has no meeting. Sums use the strategy's plan; the halves of an
allreduce use its halves. Other reductions use owners, each of which combines its part of all ranks in rank order.
Transfers that differ between pairs of ranks (all-to-all, gather, scatter) are messages.

The part after the meeting is a generator: it computes, yields the works that it needs, and resumes when they are done.
A blocking call drives it in its own thread; otherwise the engine's driving thread does. Keys and numbers are taken at
the start of a call, in the order of the script, the same number by every call. Ranks that call different collectives
therefore meet and find out. This module knows none of torch's calls, works or options.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..engine.order import UNANNOUNCED, Order, Work
from ..errors import MismatchError, PeerTimeout, within
from ..session.communicator import Communicator
from ..session.tickets import (
    ALL_GATHER,
    ALL_TO_ALL,
    ALLREDUCE,
    BARRIER,
    BROADCAST,
    CALLS,
    ELEMENT_TYPES,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    Meeting,
    sized,
)
from ..wire.scratch import address_of
from .tensors import Array, Reduction, Sizes

Done = Callable[[], None]
Steps = Iterator[Sequence[Work]]

ROOM = 2048
"""The bytes of data that travel with a meeting."""

_MESSAGES = 1 << 50
"""The first topic of collectives' messages; the topics below belong to send and receive."""


class Single(NamedTuple):
    """The single exchange that a collective consists of, whose sign all ranks see. ``done`` is called after it."""

    order: Order
    done: Done


@dataclass(eq=False)
class Call:
    """A collective in progress. ``key`` is for the exchange after its meeting; ``number`` counts calls."""

    us: Communicator
    label: str
    meeting: Meeting | Single
    key: int
    number: int
    rest: Steps

    @property
    def brought(self) -> Array:
        """The data that each rank brought to the meeting."""
        assert isinstance(self.meeting, Meeting)
        return self.meeting.brought

    def finish(self, timeout_s: float) -> None:
        """Wait in this thread until the call is done. PeerTimeout after ``timeout_s`` names the missing ranks."""
        if isinstance(self.meeting, Single):
            _run_single(self.us, self.meeting, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            self.us.await_all(self.meeting, self.label, timeout_s)
            self.meeting.tickets()
            for works in self.rest:
                await_works(self.us, works, self.label, max(0.0, deadline - time.monotonic()), timeout_s)
        except BaseException as error:
            self.us.process.interrupted(error)
            raise

    def begin(self) -> Work:
        """Continue in the background. The returned work is done when the call is."""
        engine, meeting = self.us.engine, self.meeting
        if isinstance(meeting, Single):
            work = engine.start(meeting.order._replace(after=meeting.done))
            self.us.keys.hold(meeting.order.key, work)
            return work
        promised = engine.promise(self.label)
        self.us.keys.hold(self.key, promised)

        def check() -> None:
            meeting.tickets()
            go_on()

        def go_on() -> None:
            works = next(self.rest, None)
            if works is None:
                engine.fulfil(promised)
            else:
                engine.then(self.label, works, go_on)

        engine.then(self.label, [] if meeting.work is None else [meeting.work], check)
        return promised


def _run_single(us: Communicator, single: Single, timeout_s: float) -> None:
    """Run an exchange in this thread. PeerTimeout names the missing ranks or the limit after ``timeout_s``."""
    engine = us.process.engine
    try:
        engine.run(single.order, timeout_s)
    except PeerTimeout:
        if engine.error is not None:
            raise
        raise us.late(single.order.label, sorted(engine.absent(single.order.key, us.ranks)), timeout_s) from None
    single.done()


def await_works(
    us: Communicator, works: Sequence[Work], label: str, timeout_s: float, limit_s: float | None = None
) -> None:
    """Wait for works. After ``timeout_s``, raises an error that ends the run and names the awaited ranks.

    ``limit_s`` is the limit of the whole call, of which ``timeout_s`` is left.
    """
    if not works:
        return
    engine = us.process.engine
    try:
        engine.wait(*works, timeout=timeout_s)
    except PeerTimeout:
        if engine.error is not None:
            raise
        keys = [work.key for work in works if not work.done]
        awaited = sorted(engine.absent(keys[0] if keys else -1, us.ranks))
        names = ", ".join(us.member.name(index) for index in awaited) or "a rank of the group"
        text = f"{label}: not finished {within(timeout_s if limit_s is None else limit_s)}, waiting for {names}"
        raise us.process.fail(PeerTimeout(text, rank=awaited[0] if awaited else -1)) from None


class Collectives:
    """The collectives of the ranks of ``us``. Each method returns a started call; ``done`` receives its result."""

    def __init__(self, us: Communicator) -> None:
        self.us = us
        self.calls = 0

    def barrier(self) -> Call:
        """A meeting without data."""
        return self._call(BARRIER, "", [], None, lambda _: iter(()))

    def allreduce(self, array: Array, reduction: Reduction, sizes: Sizes, done: Done) -> Call:
        """Reduce ``array``, which is flat, in place over all ranks."""
        return self._reduce(ALLREDUCE, reduction.name, array, reduction, sizes, done)

    def reduce(self, root: int, array: Array, reduction: Reduction, sizes: Sizes, done: Done) -> Call:
        """As ``allreduce``, but only rank ``root`` keeps the result."""
        kept = done if self.us.rank == root else lambda: None
        return self._reduce(REDUCE, f"{reduction.name} {root}", array, reduction, sizes, kept)

    def broadcast(self, data: Array, root: int, sizes: Sizes, done: Done) -> Call:
        """Copy bytes from ``root`` to all."""
        us = self.us

        def rest(call: Call) -> Steps:
            if data.size <= ROOM:
                data[:] = call.brought[root, : data.size]
            elif us.world_size > 1:
                yield self._run(call, us.broadcast_program(root), data)
            done()

        return self._call(BROADCAST, str(root), sizes, data, rest)

    def all_gather(self, mine: Array, table: Array, sizes: Sizes, done: Done) -> Call:
        """Copy each rank's bytes ``mine`` into the rows of ``table``, on all ranks."""
        us = self.us
        if us.world_size > 1 and mine.size:
            program, flat = us.phase_program("all_gather", table.nbytes), table.reshape(-1)
            if us.shows(program, flat):
                _fill(table[us.rank], mine)
                return self._single(ALL_GATHER, "", sizes, program, flat, done)

        def rest(call: Call) -> Steps:
            if mine.size <= ROOM:
                table[:] = call.brought[:, : mine.size]
            else:
                _fill(table[us.rank], mine)
                if us.world_size > 1:
                    yield self._run(call, us.phase_program("all_gather", table.nbytes), table.reshape(-1))
            done()

        return self._call(ALL_GATHER, "", sizes, mine, rest)

    def reduce_scatter(self, parts: Array, reduction: Reduction, sizes: Sizes, done: Callable[[Array], None]) -> Call:
        """Reduce row r of ``parts`` to rank r. ``parts`` is overwritten; ``done`` gets this rank's row."""
        us, flat = self.us, parts.reshape(-1)
        adds = us.world_size > 1 and reduction.adds(parts.dtype)

        def added() -> None:
            reduction.finish(parts[us.rank], us.world_size)
            done(parts[us.rank])

        if adds and parts.size:
            program = us.phase_program("reduce_scatter", parts.nbytes)
            if us.shows(program, flat):
                return self._single(REDUCE_SCATTER, reduction.name, sizes, program, flat, added)

        def rest(call: Call) -> Steps:
            if adds:
                yield self._run(call, us.phase_program("reduce_scatter", parts.nbytes), flat)
                added()
            elif us.world_size == 1:
                done(reduction.of([parts[0]], 1))
            else:
                come = np.empty_like(parts)
                yield from self._swap(call, _rows(parts), _rows(come))
                done(reduction.of(list(come), us.world_size))

        return self._call(REDUCE_SCATTER, reduction.name, sizes, None, rest)

    def all_to_all(self, out: Mapping[int, Array], into: Mapping[int, Array], kind: str, done: Done) -> Call:
        """Send bytes ``out[r]`` to each rank r and receive each rank's bytes into ``into``."""
        us, world = self.us, self.us.world_size
        counts = np.array([out[rank].size for rank in range(world)], np.int64)

        def rest(call: Call) -> Steps:
            if counts.nbytes <= ROOM:
                for rank in range(world):
                    theirs = int(call.brought[rank, : counts.nbytes].view(np.int64)[us.rank])
                    if theirs != into[rank].size:
                        raise self._unequal(call.label, rank, theirs, into[rank].size)
            yield from self._swap(call, out, into)
            done()

        brings = counts.view(np.uint8) if counts.nbytes <= ROOM else None
        return self._call(ALL_TO_ALL, "", [(0, kind)], brings, rest)

    def gather(self, mine: Array, root: int, table: Mapping[int, Array], sizes: Sizes, done: Done) -> Call:
        """Copy each rank's bytes to ``root``, whose ``table`` has the destinations."""

        def rest(call: Call) -> Steps:
            yield from self._swap(call, {root: mine}, table)
            done()

        return self._call(GATHER, str(root), sizes, None, rest)

    def scatter(self, table: Mapping[int, Array], root: int, mine: Array, sizes: Sizes, done: Done) -> Call:
        """Copy the entries of ``table`` of ``root`` to the ranks."""

        def rest(call: Call) -> Steps:
            yield from self._swap(call, table, {root: mine})
            done()

        return self._call(SCATTER, str(root), sizes, None, rest)

    # Shared parts

    def _call(self, kind: int, what: str, sizes: Sizes, brings: Array | None, rest: Callable[[Call], Steps]) -> Call:
        """Start a call: show ticket and data, and keep the generator for after the meeting."""
        us = self.us
        self.calls += 1
        data = None if brings is None or brings.nbytes > ROOM else brings.view(np.uint8)
        argument, flags = shown(what, sizes)
        meeting = us.meet(kind, argument, flags=flags, announce=False, brings=data, room=ROOM, signed=True)
        call = Call(us, CALLS[kind], meeting, us.keys.take(), self.calls, iter(()))
        call.rest = rest(call)
        return call

    def _single(self, kind: int, what: str, sizes: Sizes, program: Any, array: Array, done: Done) -> Call:
        """Start a collective that is a single exchange, which shows each rank's call."""
        us = self.us
        self.calls += 1
        argument, flags = shown(what, sizes)
        ticket, key = us.come(kind, argument, flags=flags)
        single = Single(Order(program, array, key, CALLS[kind], sign=us.sign(ticket)), done)
        return Call(us, CALLS[kind], single, us.keys.take(), self.calls, iter(()))

    def _reduce(self, kind: int, what: str, array: Array, reduction: Reduction, sizes: Sizes, done: Done) -> Call:
        us, world = self.us, self.us.world_size
        adds = world > 1 and reduction.adds(array.dtype)

        def added() -> None:
            reduction.finish(array, world)
            done()

        if adds and array.size:
            program = us.allreduce_program(array.nbytes)
            if us.shows(program, array):
                return self._single(kind, what, sizes, program, array, added)

        def rest(call: Call) -> Steps:
            if array.nbytes <= ROOM:  # the data came with the meeting
                rows = call.brought[:, : array.nbytes]
                array[:] = reduction.of([row.view(array.dtype) for row in rows], world)
                done()
            elif adds:
                yield self._run(call, us.allreduce_program(array.nbytes), array)
                added()
            else:
                if world > 1:
                    yield from self._by_owners(call, array, reduction)
                done()

        return self._call(kind, what, sizes, array, rest)

    def _by_owners(self, call: Call, array: Array, reduction: Reduction) -> Steps:
        """Reduce by messages: rank r combines part r of all ranks and sends it to all."""
        us, world = self.us, self.us.world_size
        parts = np.zeros((world, -(-array.size // world)), array.dtype)
        parts.reshape(-1)[: array.size] = array
        come = np.empty_like(parts)
        yield from self._swap(call, _rows(parts), _rows(come))
        parts[us.rank] = reduction.of(list(come), world)
        yield self._run(call, us.phase_program("all_gather", parts.nbytes), parts.reshape(-1).view(np.uint8))
        array[:] = parts.reshape(-1)[: array.size]

    def _run(self, call: Call, program: Any, array: Array) -> list[Work]:
        """Start a plan that all ranks have joined."""
        return [self.us.engine.start(Order(program, array, call.key, call.label), UNANNOUNCED)]

    def _swap(self, call: Call, out: Mapping[int, Array], into: Mapping[int, Array]) -> Steps:
        """Exchange bytes with ranks; each receive takes exactly its memory."""
        us, label = self.us, call.label
        topic = us.topic(_MESSAGES | (call.number & (_MESSAGES - 1)))
        if us.rank in out and us.rank in into:
            into[us.rank][:] = out[us.rank]
        works: list[Work] = []
        come: dict[int, Work] = {}
        for rank, place in into.items():
            if rank != us.rank and place.size:
                come[rank] = us.engine.recv(us.ranks[rank], topic, place.size, label, place=place)
        for rank, data in out.items():
            if rank != us.rank and data.size:
                works.append(us.engine.send(us.ranks[rank], topic, data, label))
        if works or come:
            yield [*works, *come.values()]
        for rank, work in come.items():
            if work.result != into[rank].size:
                raise self._unequal(label, rank, work.result, into[rank].size)

    def _unequal(self, label: str, rank: int, theirs: int, ours: int) -> MismatchError:
        us = self.us
        text = f"{label}: {us.name(rank)} gives {theirs} bytes for {us.name(us.rank)}, which expects {ours}"
        remedy = "check that the sizes of sends and receives match on all ranks"
        return us.process.fail(MismatchError(f"{text}; {remedy}"))


def shown(what: str, sizes: Sizes) -> tuple[int, int]:
    """The argument and the flags of the ticket for tensors of these sizes."""
    argument = zlib.crc32(f"{what} {sizes}".encode())
    if not sizes:
        return argument, 0
    kind = sizes[0][1]
    return argument, sized(sum(elements for elements, _ in sizes), kind if kind in ELEMENT_TYPES else ELEMENT_TYPES[-1])


def _fill(place: Array, data: Array) -> None:
    """Copy bytes unless they are the same memory, as for an all-gather whose input is a part of its output."""
    if address_of(place) != address_of(data):
        place[:] = data


def _rows(table: Array) -> dict[int, Array]:
    """Each row as bytes."""
    return {rank: row.view(np.uint8) for rank, row in enumerate(table)}
