"""A group of workers and its collectives. A process may be in several overlapping groups; one contains all workers.

A communicator has its own ranks from 0, its own keys, which separate its messages from others, and plans between its
ranks only. Several communicators can therefore be active at the same time, each in one thread. Every collective begins
with an exchange of tickets (``tickets``). In a group of one every collective is the identity.

Algorithms plan for ranks 0, 1, ...; ``among`` replaces these by process numbers. Compiled plans are cached. Servers
take part in ``Everyone`` only.
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..collectives import Collective
from ..engine.engine import Engine
from ..engine.order import NOW, UNANNOUNCED, Order, Sign, Work
from ..errors import MismatchError, PeerTimeout, PlanError, ProtocolError, UsageError, within
from ..nouns import Group
from ..plans.check import phases
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan
from . import tickets
from .member import Membership
from .tickets import BUCKET_KEYS, CALLS, CALLS_IN_FLIGHT, Callers, CallKeys, Meeting, Ticket

Array = NDArray[Any]
NOTHING: Array = np.empty(0, np.uint8)
Planner = Callable[[Group, int], Plan | Collective]

_GROUP_MESSAGES = 5 << 61
"""The highest three bits of the tags of single messages in a communicator. Rounds of reducers have other bits."""
_TOPIC_BITS = 51

_TOLD_KEY, _SHARE_KEY = BUCKET_KEYS, BUCKET_KEYS + 1
_MOST_TOLD_BYTES, _MOST_SHARED_BYTES = 1 << 32, 1 << 44


@lru_cache(maxsize=256)
def compiled(plan: Plan, index: int) -> Program:
    """The program of one process of a plan."""
    return compile_program(plan, index)


@lru_cache(maxsize=256)
def planned(algorithm: str, group: Group) -> Plan:
    """The plan of an algorithm without arguments."""
    plan: Plan = registry.get("algorithms", algorithm).target(group)
    return plan


@lru_cache(maxsize=64)
def phases_of(plan: Plan) -> tuple[Plan, Plan] | None:
    """The reduce-scatter and the all-gather of an allreduce, None for a plan without these halves."""
    try:
        return phases(plan)
    except PlanError:
        return None


@lru_cache(maxsize=64)
def broadcast_plan(world: int, root: int) -> Plan:
    """The plan of a broadcast to the first ``world`` processes."""
    plan: Plan = registry.get("algorithms", "broadcast").target(Group(world), root=root)
    return plan


@lru_cache(maxsize=256)
def among(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """A plan between the processes ``ranks``."""
    return plan if ranks == tuple(range(plan.world)) else plan.among(ranks)


class Communicator:
    """The workers with the process numbers ``ranks``, in this order. This process may be one of them.

    ``plan`` returns the plan of an allreduce of a group and a size in bytes, or the message library's own collective.
    ``number`` is the same on all ranks, and no other communicator of these ranks has it: keys follow from it.
    """

    def __init__(self, member: Membership, ranks: Sequence[int], plan: Planner, number: int = 0) -> None:
        self.member, self.ranks, self.number = member, tuple(ranks), number
        self.process = member.process
        self.index = member.index
        """The number of this process in the run."""
        self.is_worker = self.index in self.ranks
        """Whether this process is one of the ranks, not a server."""
        self.world_size = len(self.ranks)
        """The number of workers."""
        self.rank = self.ranks.index(self.index) if self.is_worker else self.world_size - 1
        """This worker's rank. A server has the last worker's rank, so that scripts can divide data by it."""
        nodes = member.group.nodes
        self._group = Group(self.world_size, nodes=tuple(nodes[place] for place in self.ranks) if nodes else ())
        self._plan = plan
        self.callers = Callers(self.titled)
        self._calls = 0
        self.keys = CallKeys(number, self._wait)
        """The keys of calls. All workers take the same number of keys for each call."""
        self._programs: dict[str, Program] = {}  # by name of an algorithm without arguments
        if self.process.flight is not None and self.world_size > 1:
            scope = None if member.unchecked is None else member.unchecked.scope
            first = self.keys.first + (0 if scope is None else scope.first_key)
            self.process.flight.group(first, CALLS_IN_FLIGHT, [member.number(process) for process in self.ranks])

    @property
    def engine(self) -> Engine:
        """The engine. Raises ClosedError after the end, in forked children, and in a world of one worker."""
        return self.member.engine

    def topic(self, topic: int) -> int:
        """The tag of single messages between these workers. ``topic`` has up to 51 bits."""
        return _GROUP_MESSAGES | self.number << _TOPIC_BITS | topic

    def name(self, rank: int) -> str:
        """The name of a rank in messages."""
        return self.member.name(self.ranks[rank])

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some of these ranks, None on the others. All ranks call it with the same ``ranks``.

        It uses the same algorithms as this one. Raises UsageError if the message library's own collective replaces the
        plan, and for too many communicators.
        """
        chosen = self.chosen(ranks)
        number = self.agree_on_group(chosen)
        if self.rank not in chosen:
            return None
        return Communicator(self.member, [self.ranks[rank] for rank in chosen], self._plan, number)

    def found(self, ranks: Sequence[int], name: str, timeout: float | None = None) -> Communicator:
        """A communicator of some of these ranks, including this one. They make it without the others.

        They pass the same ranks and ``name``, and make overlapping groups in one order. PeerTimeout names ranks that do
        not call it within ``timeout`` seconds.
        """
        chosen = self.chosen(ranks)
        number = self.agree_within(chosen, name, timeout)
        return Communicator(self.member, [self.ranks[rank] for rank in chosen], self._plan, number)

    def chosen(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Check that these ranks can be a group. Raises UsageError otherwise."""
        chosen = tuple(map(operator.index, ranks))
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.world_size)):
            raise UsageError(f"ranks {chosen}: name ranks from 0 to {self.world_size - 1}, each once")
        if not isinstance(self._plan(self._group, 1), Plan):
            raise UsageError("the message library's own collective needs all ranks: choose ring, or another plan")
        return chosen

    # Numbers of groups.

    def agree_on_group(self, chosen: tuple[int, ...], timeout: float | None = None) -> int:
        """The number for a group of these ranks, which all workers make at the same point of their scripts.

        No rank of the group has used the number, except for an ended group of the same ranks. MismatchError names ranks
        that make another group; PeerTimeout names ranks that do not arrive.
        """
        process, processes = self.process, self._processes(chosen)
        try:
            with process.splitting:
                free = process.given_back.get(processes, [])
                asked = tickets.making(chosen, process.communicators, free[-1][0] if free else 0)
                shown = self.agree(tickets.SPLIT, zlib.crc32(str(chosen).encode()), timeout, asked)
                numbers = [tickets.numbers_of(shown[rank]) for rank in chosen]
                number, again = max(new for new, _ in numbers), {old for _, old in numbers}
                if len(again) == 1 and 0 not in again:
                    return free.pop()[0] if process.index in processes else again.pop()
                tickets.check_number(number)
                if process.index in processes:
                    process.communicators = number + 1
                return number
        except BaseException as error:
            process.interrupted(error)
            raise

    def agree_within(self, chosen: tuple[int, ...], name: str, timeout: float | None = None) -> int:
        """The number for a group that these ranks make without the others.

        They must pass the same ranks and ``name``, and make overlapping groups in one order. PeerTimeout names ranks
        that have not arrived within ``timeout`` seconds. A number is reused if all have given it back after the same
        number of calls: then all messages of the old group have arrived.
        """
        process = self.process
        with process.splitting:
            free = process.given_back.get(self._processes(chosen), [])
            mine = process.communicators, *(free[-1] if free else (0, 0))
            peers = [self.ranks[rank] for rank in chosen if self.ranks[rank] != self.index]
            label, tag = f"making the group {name}", tickets.FOUNDING_TAGS | zlib.crc32(f"{name} {chosen}".encode())
            told = [mine, *self._founding(peers, tag, tickets.FOUNDING.pack(*mine), label, timeout)]
            if free and len({tuple(old) for _, *old in told}) == 1:
                return free.pop()[0]
            number = max(new for new, *_ in told)
            tickets.check_number(number)
            process.communicators = number + 1
            return number

    def _founding(
        self, peers: Sequence[int], tag: int, data: bytes, label: str, timeout: float | None
    ) -> list[tuple[int, ...]]:
        """Exchange the numbers of a new group with its other processes."""
        if not peers:
            return []
        engine = self.engine
        sent = [engine.send(peer, tag, data, label) for peer in peers]
        heard = {peer: engine.recv(peer, tag, tickets.FOUNDING.size, label) for peer in peers}
        try:
            engine.wait(*sent, *heard.values(), timeout=timeout)
        except PeerTimeout:
            if timeout is None or engine.error is not None:
                raise
            raise self.late(label, [peer for peer, work in heard.items() if not work.done], timeout) from None
        return [tickets.FOUNDING.unpack(work.result) for work in heard.values()]

    def give_back_number(self, ranks: Iterable[int], number: int, calls: int = 0) -> None:
        """Release the number of a group without calls in flight. ``calls`` were made in it since its ranks agreed on
        the number."""
        self.process.given_back.setdefault(self._processes(ranks), []).append((number, calls))

    def _processes(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The process numbers of these ranks in the run."""
        return tuple(self.member.number(self.ranks[rank]) for rank in ranks)

    # Collectives.

    def meet(
        self,
        kind: int,
        argument: int = 0,
        weight: float = 0.0,
        flags: int = 0,
        announce: bool = True,
        brings: NDArray[np.uint8] | None = None,
        room: int = 0,
        signed: bool = False,
    ) -> Meeting:
        """Start to exchange tickets with all workers; ``announce`` as in ``When``.

        Each worker may add up to ``room`` bytes. ``room`` must be the same in all calls that could meet this one. In
        ``signed`` calls all workers add the same number of bytes, because an exchange with signs has no other room.
        """
        mine, key = self.come(kind, argument, weight, flags)
        program = self._program("direct_all_gather")
        shown = signed and self.shows(program, NOTHING)
        if shown:
            room = 0 if brings is None else brings.size
        table = tickets.ticket_table(self.world_size, self.rank, mine, room)
        if brings is not None:
            table[self.rank, tickets.TICKET_BYTES : tickets.TICKET_BYTES + brings.size] = brings
        work = None
        if self.world_size > 1:
            engine = self.member.unchecked
            assert engine is not None  # there are other workers
            sign = self.sign(mine) if shown else None
            order = Order(program, table.reshape(-1), key, CALLS[kind], sign=sign)
            work = engine.start(order, NOW if announce else UNANNOUNCED)
            self.keys.hold(key, work)
        return Meeting(work, table, mine, lambda rank, theirs: self.mismatch(rank, theirs, mine))

    def come(self, kind: int, argument: int = 0, weight: float = 0.0, flags: int = 0) -> tuple[Ticket, int]:
        """Begin the next call: its ticket, and the key of its first exchange."""
        self.process.check_usable()
        if not self.is_worker:
            raise UsageError(
                f"{self.member.name(self.index)} takes no part in {CALLS[kind]}: servers run the script up to"
                " syncline.prepare(), so make collective calls after it"
            )
        self._calls += 1
        ticket = Ticket(kind, self._calls, argument & 0xFFFFFFFFFFFFFFFF, weight, flags)
        return ticket, self.keys.take() if self.world_size > 1 else -1

    def shows(self, program: Program | Collective, array: Array) -> bool:
        """Whether an exchange itself shows the calls of the other workers, so that no exchange of tickets is needed."""
        return self.world_size > 1 and self.engine.shows(program, array)

    def sign(self, ticket: Ticket) -> Sign:
        """A ticket as the sign of an exchange."""

        def differs(process: int, theirs: tuple[int, ...]) -> MismatchError:
            kind, argument, call, flags = theirs
            return self.mismatch(self.ranks.index(process), Ticket(kind, call, argument, 0.0, flags), ticket)

        return Sign((ticket.kind, ticket.argument, ticket.call, ticket.flags), differs)

    def agree(self, kind: int, argument: int = 0, timeout: float | None = None, flags: int = 0) -> tuple[Ticket, ...]:
        """Exchange tickets and wait until all workers have made the same call."""
        for catch_up in self.member.before_calls.values():
            catch_up()
        if not self.member.alone:
            self.engine.check_not_driving()  # before the call begins
        meeting = self.meet(kind, argument, flags=flags, announce=False)
        self.await_all(meeting, CALLS[kind], timeout)
        return meeting.tickets()

    def await_all(self, meeting: Meeting, label: str, timeout: float | None = None) -> None:
        """Wait until all workers have come to a meeting. PeerTimeout names those missing after ``timeout`` seconds."""
        if meeting.work is None:
            return
        try:
            self.engine.wait(meeting.work, timeout=timeout)
        except PeerTimeout:
            if timeout is None or self.engine.error is not None:
                raise  # the progress limit, whose error names the missing ranks
            awaited = self.engine.awaited
            missing = [self.ranks[rank] for rank in meeting.missing() if self.ranks[rank] in awaited]
            raise self.late(label, missing, timeout) from None

    def late(self, label: str, missing: Sequence[int], timeout: float) -> PeerTimeout:
        """The error for processes that have not come in time. Reports it to all."""
        names = ", ".join(self.member.name(index) for index in missing)
        first = self.member.number(missing[0]) if missing else -1
        late = PeerTimeout(f"{self.titled(label)}: not reached {within(timeout)} by {names}", rank=first)
        return self.process.fail(late)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until all workers call this. PeerTimeout names those missing after ``timeout`` seconds. Servers pass."""
        if self.is_worker:
            with self.callers.inside():
                self.agree(tickets.BARRIER, timeout=timeout)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call of several exchanges. An exception of a signal handler between them must end the run."""
        with self.callers.inside():
            try:
                yield
            except BaseException as error:
                self.process.interrupted(error)
                raise

    def allreduce(self, array: Array, average: bool = True) -> None:
        """Replace ``array`` (one-dimensional, contiguous) by the workers' mean, or sum, in place."""
        if array.dtype.kind not in "fiuV" or array.dtype == np.bool_:
            raise UsageError(f"allreduce cannot sum elements of type {array.dtype}")
        if average and array.dtype.kind in "iu":
            raise UsageError(f"the mean of {array.dtype} is of another type: use op='sum'")
        with self._call():
            self.agree(tickets.ALLREDUCE, tickets.fingerprint(array, average), flags=tickets.size_of(array))
            if self.world_size > 1:
                self.run(self.allreduce_program(array.nbytes), array, "allreduce")
            if average:
                np.divide(array, array.dtype.type(self.world_size), out=array)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace ``array`` on every worker by the array of ``root``."""
        if not 0 <= root < self.world_size:
            raise UsageError(f"there is no rank {root} in a world of {self.world_size}")
        with self._call():
            self.agree(tickets.BROADCAST, tickets.fingerprint(array, root), flags=tickets.size_of(array))
            if self.world_size > 1:
                self.run(self.broadcast_program(root), array, "broadcast")

    def gather(self, data: bytes) -> list[bytes]:
        """Every worker's bytes, in rank order, on every worker."""
        with self._call():
            return self._gather(data)

    def _gather(self, data: bytes) -> list[bytes]:
        self.agree(tickets.GATHER)
        if self.world_size == 1:
            return [data]
        gather = self._program("all_gather")
        sizes = np.zeros(self.world_size, np.int64)
        sizes[self.rank] = len(data)
        self.engine.run(Order(gather, sizes, self.keys.take(), "gather"))
        widest = max(1, int(sizes.max()))
        table = np.zeros(self.world_size * widest, np.uint8)
        table[self.rank * widest : self.rank * widest + len(data)] = np.frombuffer(data, np.uint8)
        self.engine.run(Order(gather, table, self.keys.take(), "gather"))
        return [table[rank * widest : rank * widest + int(size)].tobytes() for rank, size in enumerate(sizes)]

    def tell_all(self, data: bytes, root: int = 0) -> bytes:
        """The bytes of ``root`` on every worker; ``data`` of other workers is ignored."""
        size = np.array([len(data)], np.int64)
        with self._call():
            self.broadcast(size, root)
            body = np.zeros(int(size[0]), np.uint8)
            if self.rank == root:
                body[:] = np.frombuffer(data, np.uint8)
            self.broadcast(body, root)
            return body.tobytes()

    def run(self, program: Program | Collective, array: Array, label: str) -> None:
        """Run a plan or a library's collective over the workers' arrays. All workers call it."""
        self.engine.run(Order(program, array, self.keys.take(), label))

    # Programs.

    def allreduce_program(self, nbytes: int) -> Program | Collective:
        """This process's program of an allreduce of the workers, or the message library's own collective."""
        found = self._plan(self._group, nbytes)
        return compiled(among(found, self.ranks), self.index) if isinstance(found, Plan) else found

    def phase_program(self, phase: Literal["reduce_scatter", "all_gather"], nbytes: int) -> Program:
        """This process's program of one half of an allreduce of ``nbytes``; rank r has part r in between.

        A ring replaces an algorithm without halves.
        """
        found = self._plan(self._group, nbytes)
        halves = phases_of(found) if isinstance(found, Plan) else None
        if halves is not None:
            half = halves[phase == "all_gather"]
            if half.owners == tuple(range(self.world_size)):
                return compiled(among(half, self.ranks), self.index)
        return self._program(phase)

    def broadcast_program(self, root: int = 0) -> Program:
        """This process's program of a broadcast to the workers."""
        return compiled(among(broadcast_plan(self.world_size, root), self.ranks), self.index)

    def mismatch(self, rank: int, theirs: Ticket, ours: Ticket) -> MismatchError:
        """The error for workers that make different calls. Reports it to all."""
        text = f"{self.name(rank)} is {theirs.text} while {self.name(self.rank)} is {ours.text}"
        return self.process.fail(MismatchError(self.titled(f"{text}; {tickets.remedy(theirs, ours)}")))

    def titled(self, text: str) -> str:
        """A message, with the name of the group unless it contains all workers."""
        return f"{self.member.title}: {text}" if self.member.title else text

    def _program(self, algorithm: str) -> Program:
        found = self._programs.get(algorithm)
        if found is None:
            plan = among(planned(algorithm, Group(self.world_size)), self.ranks)
            found = self._programs[algorithm] = compiled(plan, self.index)
        return found

    def give_back(self) -> None:
        """Let these ranks reuse the number, unless calls are still in flight."""
        if self.number and not self.keys.held:
            self.give_back_number(range(self.world_size), self.number, self._calls)

    def _wait(self, work: Work) -> None:
        """Wait for a work that holds a key."""
        self.engine.wait(work)


class Heard(NamedTuple):
    """A server's posted receive of the next ``tell``: its size, once the work is done."""

    work: Work
    size: Array


class Everyone:
    """The exchanges of all processes of ``group``, including servers."""

    def __init__(self, member: Membership, group: Group) -> None:
        self._member, self._group = member, group

    def broadcast(self, array: Array, key: int, label: str, tolerant: bool = False) -> Work:
        """Start a broadcast from worker 0. Every process calls it."""
        program = compiled(broadcast_plan(self._group.processes, 0), self._member.index)
        return self._member.engine.start(Order(program, array, key, label, tolerant))

    def tell(self, data: bytes, label: str) -> bytes:
        """The bytes of worker 0 on every process; ``data`` of other processes is ignored."""
        try:
            size = np.array([len(data)], np.int64)
            self._member.engine.wait(self.broadcast(size, _TOLD_KEY, label))
            return self._told(size, data, label)
        except BaseException as error:
            self._member.process.interrupted(error)
            raise

    def listen(self, label: str) -> Heard:
        """Post a server's part in the next ``tell``. It never completes if the workers leave."""
        size = np.zeros(1, np.int64)
        return Heard(self.broadcast(size, _TOLD_KEY, label, tolerant=True), size)

    def hear(self, heard: Heard) -> bytes:
        """The bytes of worker 0's ``tell``, once the work of ``listen`` is done."""
        return self._told(heard.size, b"", heard.work.label)

    def _told(self, size: Array, data: bytes, label: str) -> bytes:
        self._check_size(int(size[0]), 0, _MOST_TOLD_BYTES, label)
        told = np.zeros(int(size[0]), np.uint8)
        if self._member.index == 0:
            told[:] = np.frombuffer(data, np.uint8)
        self._member.engine.wait(self.broadcast(told, _TOLD_KEY, label))
        return told.tobytes()

    def _check_size(self, size: int, process: int, most: int, label: str) -> None:
        if not 0 <= size <= most:
            raise ProtocolError(
                f"{label}: {self._member.name(process)} announces {size} bytes, which is not a valid size",
                rank=self._member.number(process),
            )

    def meet(self, label: str) -> None:
        """Wait until all processes call this."""
        if self._member.alone:
            return
        program = compiled(planned("direct_all_gather", Group(self._group.processes)), self._member.index)
        self._member.engine.run(Order(program, np.zeros(self._group.processes, np.uint8), _TOLD_KEY, label))

    def share(self, processes: Sequence[int], data: bytes, label: str) -> Iterator[bytes]:
        """The data of each of these processes in turn, on all of them. Every call must have the same processes."""
        ranks, here = tuple(processes), processes.index(self._member.index)
        if len(ranks) == 1:
            yield data
            return
        engine = self._member.engine
        sizes = np.zeros(len(ranks), np.int64)
        sizes[here] = len(data)
        gather = compiled(among(planned("direct_all_gather", Group(len(ranks))), ranks), self._member.index)
        engine.run(Order(gather, sizes, _SHARE_KEY, label))
        for place, size in enumerate(sizes):
            self._check_size(int(size), ranks[place], _MOST_SHARED_BYTES, label)
            body = np.frombuffer(data, np.uint8).copy() if place == here else np.zeros(int(size), np.uint8)
            program = compiled(among(broadcast_plan(len(ranks), place), ranks), self._member.index)
            engine.run(Order(program, body, _SHARE_KEY, label))
            yield body.tobytes()
