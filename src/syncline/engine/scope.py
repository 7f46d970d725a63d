"""A group of processes as a scope of the engine: it behaves like a small run.

Code in a scope counts its processes from 0, uses any key and any topic, and knows no other scope. The engine translates
its orders: plans and reducers' messages to the processes of the run, keys and tags to the scope's block, and labels to
labels with the scope's name. Connections, threads and the end belong to the run. A scope counts time and bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from ..collectives import Collective
from ..compression.reducers import Lengths, Message, Reducer, Round
from ..errors import UsageError
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan, ranks_text
from ..wire.culprit import Waits
from .order import KEYS, CodedOrder, Order

BLOCK_BITS = 23
"""Every scope has a block of keys of the same size: the lowest block is for all workers, block n for scope n."""

SCOPES = KEYS >> BLOCK_BITS
"""Numbers of scopes are below this one, and above 0."""

_NUMBER_BIT = 54
"""Of the highest three bits, tags of single messages have only the first; the scope's number begins at bit 54."""


class Scope:
    """The processes ``ranks`` of a run. This process has the index ``index`` among them.

    Peers are positions in ``ranks``. No other scope of any of these processes has the same ``number``.
    """

    def __init__(self, ranks: Sequence[int], index: int, number: int) -> None:
        self.ranks, self.index = tuple(ranks), index
        self.title = f"group of {ranks_text(self.ranks)}"
        """Its name in messages and timelines."""
        self.first_key, self._tag = number << BLOCK_BITS, number << _NUMBER_BIT
        self._positions = {process: position for position, process in enumerate(self.ranks)}
        self._sent, self._received = Counter[int](), Counter[int]()
        self._counting = threading.Lock()

    def order(self, order: Order) -> Order:
        """An order of the scope, translated to the run."""
        return order._replace(program=self._counted(order), key=self._key(order.key), label=self.label(order.label))

    def coded_order(self, order: CodedOrder) -> CodedOrder:
        """A coded order of the scope, translated to the run."""
        key, label = self._key(order.key), self.label(order.label)
        return order._replace(
            pieces=partial(self._pieces, order), program=partial(self._sum, order), key=key, label=label
        )

    def tag(self, tag: int) -> int:
        """A message's tag, translated to the run."""
        return tag | self._tag if tag & 7 << 61 == 1 << 63 else tag

    def label(self, label: str) -> str:
        """A label with the scope's name."""
        return label if label.startswith(self.title) else f"{self.title}: {label}"

    def waits(self, waits: Waits) -> Waits:
        """Waits of the scope, translated to processes of the run."""
        return {self.ranks[peer]: why for peer, why in waits.items()}

    def positions(self, processes: Iterable[int]) -> set[int]:
        """The positions of those ``processes`` that belong to the scope."""
        return {self._positions[process] for process in processes if process in self._positions}

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes of arrays and payloads sent to, and received from, each process of the run in this scope."""
        return dict(self._sent), dict(self._received)

    def _key(self, key: int) -> int:
        if not 0 <= key < 1 << BLOCK_BITS:
            raise UsageError(f"{self.title}: key {key} is out of range")
        return self.first_key + key

    def _program(self, program: Program | Collective) -> Program:
        if isinstance(program, Collective):
            raise UsageError(f"{self.title}: the message library's own collective needs all ranks: choose ring")
        return _translated(program.plan, self.ranks, self.index)

    def _counted(self, order: Order) -> Callable[[], Program]:
        """The program of an order. Calling it counts the bytes."""
        asked = order.program
        known = asked if callable(asked) else self._program(asked)

        def program() -> Program:
            found = self._program(known()) if callable(known) else known
            sent, received = _shares(found.plan, self.ranks[self.index])
            self._count(self._sent, {peer: int(share * order.array.nbytes) for peer, share in sent.items()})
            self._count(self._received, {peer: int(share * order.array.nbytes) for peer, share in received.items()})
            return found

        return program

    def _pieces(self, order: CodedOrder) -> list[Callable[[], Reducer]]:
        return [partial(self._reducer, piece) for piece in order.pieces()]

    def _sum(self, order: CodedOrder, nbytes: int) -> Program:
        return self._program(order.program(nbytes))

    def _reducer(self, piece: Callable[[], Reducer]) -> Reducer:
        """A reducer whose rounds are translated to processes of the run."""
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
        totals = [
            replace(
                total,
                before=[self.ranks[peer] for peer in total.before],
                after=[self.ranks[peer] for peer in total.after],
            )
            for total in asked.totals
        ]
        return Round(self._messages(asked.sends), self._messages(asked.receives), totals, asked.after)

    def _messages(self, some: Sequence[Message]) -> list[Message]:
        return [replace(message, peer=self.ranks[message.peer]) for message in some]

    def _count_round(self, done: Round, lengths: Lengths) -> None:
        sent, received = Counter[int](), Counter[int]()
        for message in done.sends:
            sent[message.peer] += message.data.nbytes
        for message, nbytes in zip(done.receives, lengths, strict=True):
            received[message.peer] += nbytes
        for total in done.totals:
            received.update(dict.fromkeys(total.peers, total.array.nbytes))
        self._count(self._sent, sent)
        self._count(self._received, received)

    def _count(self, counted: Counter[int], nbytes: Mapping[int, int]) -> None:
        with self._counting:
            counted.update(nbytes)


@lru_cache(maxsize=256)
def _translated(plan: Plan, ranks: tuple[int, ...], index: int) -> Program:
    """A process's part in the plan of a scope, translated to the run."""
    return compile_program(plan if ranks == tuple(range(plan.world)) else plan.among(ranks), ranks[index])


@lru_cache(maxsize=256)
def _shares(plan: Plan, process: int) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """The shares of an array that a process sends to each other one by a plan, and receives from it."""
    found = []
    for here, there in ((plan.src, plan.dst), (plan.dst, plan.src)):
        moved = np.bincount(there[here == process], weights=plan.count[here == process]) / plan.chunks
        found.append({peer: float(share) for peer, share in enumerate(moved) if share})
    return found[0], found[1]
