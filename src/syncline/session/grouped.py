"""A process as a member of a group of workers, and its engine there: peers are counted within the group.

A group is a run in small. Whoever communicates in it (``Session.within``) counts its processes from 0, uses any key and
any topic, and knows nothing of other groups. What it hands over is translated here: plans become plans between the
processes of the run, reducers' messages are addressed to these, keys and tags get the group's own block, and labels say
whose they are. Connections, threads and the end are the run's. Time and bytes are counted for the group alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..compression.reducers import Lengths, Message, Reducer, Room, Round, Sum
from ..engine.driver import Blocked
from ..engine.engine import Engine
from ..engine.order import KEYS, NOW, Array, CodedOrder, Order, When, Work
from ..engine.trace import Observer
from ..errors import ClosedError, UsageError
from ..nouns import Group
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan, ranks_text
from ..transports import Transport
from ..wire.culprit import Waits
from ..wire.member import Roll
from .member import Member

BLOCK_BITS = 23
"""A group has as many keys as all workers have: the lowest are those of all workers, those of group n block n."""

GROUPS = KEYS >> BLOCK_BITS
"""Numbers of groups are below this one, and above 0."""

_OF_MESSAGES, _NUMBER_BIT = 5 << 61, 54
"""Tags of single messages have the highest bit alone of the first three; the group's number is put into bits 54 on."""


class GroupEngine:
    """The engine of one process as the group ``number`` of the processes ``ranks`` uses it.

    Peers are positions in ``ranks``. What is not here cannot be used in a group.
    """

    def __init__(self, of: Engine, ranks: tuple[int, ...], index: int, number: int) -> None:
        self._of, self._ranks, self._index = of, ranks, index
        self._first_key, self._tag = number << BLOCK_BITS, number << _NUMBER_BIT
        self.title = title_of(ranks)
        self._positions = {process: position for position, process in enumerate(ranks)}
        self._waited = Blocked()
        self._sent, self._received = Counter[int](), Counter[int]()
        self._counting = threading.Lock()

    # What is handed over.

    def start(self, order: Order | CodedOrder, when: When = NOW) -> Work:
        """As ``Engine.start``."""
        return self._of.start(self._reduction(order) if isinstance(order, CodedOrder) else self._order(order), when)

    def _order(self, order: Order) -> Order:
        asked = order.program
        known = asked if callable(asked) else self._program(asked)

        def program() -> Program:
            found = self._program(known()) if callable(known) else known
            self._count_plan(found.plan, order.array.nbytes)
            return found

        return order._replace(program=program, key=self._key(order.key), label=self._label(order.label))

    def _reduction(self, order: CodedOrder) -> CodedOrder:
        def pieces() -> list[Callable[[], Reducer]]:
            return [partial(self._reducer, piece) for piece in order.pieces()]

        def program(nbytes: int) -> Program:
            return self._program(order.program(nbytes))

        key, label = self._key(order.key), self._label(order.label)
        return order._replace(pieces=pieces, program=program, key=key, label=label)

    def run(self, order: Order, timeout: float | None = None) -> None:
        """As ``Engine.run``."""
        with self._blocked():
            self._of.run(self._order(order), timeout)

    def shows(self, program: Program | Collective, array: Array) -> bool:  # noqa: ARG002 - whatever it is
        """As ``Engine.shows``: ranks of a group meet before, and show nothing with an exchange itself."""
        return False

    def send(self, dst: int, tag: int, data: Any, label: str, tolerant: bool = False) -> Work:
        """As ``Engine.send``."""
        return self._of.send(self._ranks[dst], self._tagged(tag), data, self._label(label), tolerant)

    def recv(self, src: int, tag: int, nbytes: int, label: str, tolerant: bool = False, **options: Any) -> Work:
        """As ``Engine.recv``."""
        return self._of.recv(self._ranks[src], self._tagged(tag), nbytes, self._label(label), tolerant, **options)

    def promise(self, label: str, tolerant: bool = False) -> Work:
        """As ``Engine.promise``."""
        return self._of.promise(self._label(label), tolerant)

    def then(
        self, label: str, works: Sequence[Work], call: Callable[[], None] = lambda: None, *, tolerant: bool = False
    ) -> Work:
        """As ``Engine.then``."""
        return self._of.then(self._label(label), works, call, tolerant=tolerant)

    def fulfil(self, work: Work) -> None:
        """As ``Engine.fulfil``."""
        self._of.fulfil(work)

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """As ``Engine.allocate``."""
        return self._of.allocate(nbytes, dtype)

    # Waiting, and faults.

    def wait(self, *works: Work, timeout: float | None = None) -> None:
        """As ``Engine.wait``."""
        if self._of.error is None and all(work.done for work in works):
            return
        with self._blocked():
            self._of.wait(*works, timeout=timeout)

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """As ``Engine.wait_any``."""
        self._of.wait_any(works, until)

    def over(self, until: Callable[[], bool]) -> bool:
        """As ``Engine.over``."""
        return self._of.over(until)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """As ``Engine.uncounted``."""
        with self._waited.uncounted(), self._of.uncounted():
            yield

    @property
    def error(self) -> Exception | None:
        """What ended the run."""
        return self._of.error

    def check_error(self) -> None:
        """As ``Engine.check_error``."""
        self._of.check_error()

    def check_not_driving(self) -> None:
        """As ``Engine.check_not_driving``."""
        self._of.check_not_driving()

    def fail(self, error: Exception) -> None:
        """End the run of all workers."""
        self._of.fail(error)

    @property
    def awaited(self) -> set[int]:
        """The processes of the group that something under way in this process waits for."""
        return {self._positions[process] for process in self._of.awaited if process in self._positions}

    @property
    def expects(self) -> Callable[[], Waits]:
        """For whom this process waits though nothing under way says so."""
        return self._of.expects

    @expects.setter
    def expects(self, found: Callable[[], Waits]) -> None:
        before, ranks = self._of.expects, self._ranks
        self._of.expects = lambda: {**before(), **{ranks[peer]: why for peer, why in found().items()}}

    # Figures.

    @property
    def observer(self) -> Observer | None:
        """Who is told all that begins and ends in the run, if anybody is."""
        return self._of.observer

    @property
    def transport(self) -> Transport:
        """What carries the messages of the run."""
        return self._of.transport

    @property
    def room(self) -> Room:
        """As ``Engine.room``."""
        return self._of.room

    @property
    def blocked_s(self) -> float:
        """Seconds for which threads have been blocked in this group, added up."""
        return self._waited.seconds

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes of arrays and payloads sent to each process of the run, and received, in this group."""
        return dict(self._sent), dict(self._received)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited.count(begun)

    def _count_plan(self, plan: Plan, nbytes: int) -> None:
        sent, received = _shares(plan, self._ranks[self._index])
        self._count(self._sent, {peer: int(share * nbytes) for peer, share in sent.items()})
        self._count(self._received, {peer: int(share * nbytes) for peer, share in received.items()})

    def _count(self, counted: Counter[int], nbytes: Mapping[int, int]) -> None:
        with self._counting:
            counted.update(nbytes)

    # Translation.

    def _key(self, key: int) -> int:
        if not 0 <= key < 1 << BLOCK_BITS:
            raise UsageError(f"{self.title}: key {key} is out of range")
        return self._first_key + key

    def _tagged(self, tag: int) -> int:
        return tag | self._tag if tag & 7 << 61 == 1 << 63 else tag

    def _label(self, label: str) -> str:
        return label if label.startswith(self.title) else f"{self.title}: {label}"

    def _program(self, program: Program | Collective) -> Program:
        if isinstance(program, Collective):
            raise UsageError(f"{self.title}: the message library's own collective is between all ranks: choose ring")
        return _translated(program.plan, self._ranks, self._index)

    def _reducer(self, piece: Callable[[], Reducer]) -> Generator[Round | Sum, Lengths, None]:
        """A reducer whose rounds are between processes of the run."""
        reducer, lengths = piece(), Lengths()
        try:
            asked = next(reducer)
            while True:
                if isinstance(asked, Round):
                    here = self._round(asked)
                    lengths = yield here
                    self._count_round(here, lengths)
                else:
                    lengths = yield asked
                asked = reducer.send(lengths)
        except StopIteration:
            return

    def _round(self, asked: Round) -> Round:
        total = asked.total
        if total is not None:
            before, after = ([self._ranks[peer] for peer in some] for some in (total.before, total.after))
            total = replace(total, before=before, after=after)
        return Round(self._messages(asked.sends), self._messages(asked.receives), total)

    def _messages(self, some: Sequence[Message]) -> list[Message]:
        return [replace(message, peer=self._ranks[message.peer]) for message in some]

    def _count_round(self, done: Round, lengths: Lengths) -> None:
        sent, received = Counter[int](), Counter[int]()
        for message in done.sends:
            sent[message.peer] += message.data.nbytes
        for message, nbytes in zip(done.receives, lengths, strict=True):
            received[message.peer] += nbytes
        if done.total is not None:
            received.update(dict.fromkeys(done.total.peers, done.total.array.nbytes))
        self._count(self._sent, sent)
        self._count(self._received, received)


def title_of(ranks: Sequence[int]) -> str:
    """How messages and timelines call a group of these processes."""
    return f"group of {ranks_text(ranks)}"


@lru_cache(maxsize=256)
def _translated(plan: Plan, ranks: tuple[int, ...], index: int) -> Program:
    """A process's part in the plan of a group, in the run."""
    return compile_program(plan if ranks == tuple(range(plan.world)) else plan.among(ranks), ranks[index])


@lru_cache(maxsize=256)
def _shares(plan: Plan, process: int) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """How much of an array a process sends to each other one by a plan, and receives."""
    found = []
    for here, there in ((plan.src, plan.dst), (plan.dst, plan.src)):
        moved = np.bincount(there[here == process], weights=plan.count[here == process]) / plan.chunks
        found.append({peer: float(share) for peer, share in enumerate(moved) if share})
    return found[0], found[1]


class GroupMember:
    """This process as a member of the group ``number`` of the processes ``ranks``, which it counts from 0."""

    def __init__(self, process: Member, ranks: Sequence[int], number: int) -> None:
        self.process, self.ranks = process, tuple(ranks)
        self.index = self.ranks.index(process.index)
        nodes = process.group.nodes
        self.group = Group(len(self.ranks), nodes=tuple(nodes[rank] for rank in self.ranks) if nodes else ())
        self.title = title_of(self.ranks)
        self.before_calls: dict[int, Callable[[], None]] = {}
        """As the member's, of models that were prepared in the group."""
        self.unchecked = None if len(self.ranks) == 1 else GroupEngine(process.engine, self.ranks, self.index, number)

    @property
    def roll(self) -> Roll | None:
        """Who the processes of the group are."""
        found = self.process.roll
        members = () if found is None else tuple(found.members[rank] for rank in self.ranks)
        return None if found is None else replace(found, index=self.index, members=members)

    @property
    def alone(self) -> bool:
        """True when there is nobody to exchange with."""
        return self.unchecked is None

    @property
    def engine(self) -> GroupEngine:
        """The engine within the group; raises ClosedError after the end, in forked children and in a group of one."""
        self.process.check_usable()
        if self.unchecked is None:
            raise ClosedError("a group of one worker has no engine")
        return self.unchecked

    def name(self, index: int) -> str:
        """How messages call a process: by its number in the run."""
        return self.process.name(self.ranks[index])

    def number(self, index: int) -> int:
        """The number in the run of a process of the group."""
        return self.ranks[index] if index >= 0 else index

    def left_already(self) -> frozenset[int]:
        """The processes of the group that have said goodbye, as far as that is known here."""
        left = self.process.left_already()
        return frozenset(position for position, process in enumerate(self.ranks) if process in left)


AnyEngine = Engine | GroupEngine
AnyMember = Member | GroupMember
"""Of all workers, or of a group of them."""
