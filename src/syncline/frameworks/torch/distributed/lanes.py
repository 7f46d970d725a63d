"""Threads that carry what has to be reduced, each over a process group of its own, made once.

What is given to one lane is done there one after the other. So where all ranks give the same things to the same lanes
in the same order, each lane's collectives and messages follow each other alike on all ranks, however far these are
apart and whatever the other lanes do: nothing can come between, and nothing can wait in a circle, since a lane waits
for the same lane of others alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from ....compression.reducers import Reducer, Round
from ....engine.reducing import OPEN
from .carrier import Carrier

LANES = 2
"""A bucket is encoded while the messages of the one before travel; each lane costs a process group of its own."""

_END_S = 2.0
"""How long a lane may take to end; one that waits for a rank that is gone takes longer, and is left alone."""

Task = Callable[[Carrier], None]


class Lanes:
    """The lanes of the ranks of ``group``, all of which make them; they end with this object."""

    def __init__(self, group: Any) -> None:
        self._carriers = [Carrier(group) for _ in range(LANES)]
        self.rank, self.world = self._carriers[0].rank, self._carriers[0].world
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in self._carriers]
        self._threads: dict[int, threading.Thread] = {}
        weakref.finalize(self, _end, self._queues, self._threads)

    def add(self, number: int, task: Task) -> None:
        """Do something in lane ``number`` (of any size) behind what that has; a task deals with its own errors."""
        lane = number % len(self._queues)
        self._queues[lane].put(task)
        if lane not in self._threads:
            what = self._queues[lane], self._carriers[lane]
            self._threads[lane] = threading.Thread(target=_run, args=what, name=f"syncline-hook-{lane}", daemon=True)
            self._threads[lane].start()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on all; while no lane has anything to do."""
        return self._carriers[0].gather(data)


def _run(queue: SimpleQueue[Task | None], carrier: Carrier) -> None:
    while (task := queue.get()) is not None:
        task(carrier)
        del task  # it may hold what holds these lanes


def _end(queues: Sequence[SimpleQueue[Task | None]], threads: Mapping[int, threading.Thread]) -> None:
    """End the threads, and see them end: one that let go of its group while the interpreter ends would abort it."""
    for queue in queues:
        queue.put(None)
    for thread in threads.values():
        if thread is not threading.current_thread():
            thread.join(_END_S)


def drive(pieces: Sequence[Callable[[], Reducer]], carrier: Carrier) -> None:
    """Let reducers compute, each while the messages of others travel, and carry what they ask for."""
    begun, under_way = 0, deque[tuple[int, Reducer, Callable[[], list[int]]]]()
    while begun < len(pieces) or under_way:
        if begun < len(pieces) and len(under_way) < OPEN:
            number, reducer, lengths = begun, pieces[begun](), None
            begun += 1
        else:
            number, reducer, finish = under_way.popleft()
            lengths = finish()
        if (waits := _advance(number, reducer, lengths, carrier)) is not None:
            under_way.append((number, reducer, waits))


def _advance(number: int, reducer: Reducer, lengths: Any, carrier: Carrier) -> Callable[[], list[int]] | None:
    """Let a reducer go on until it has to wait; what waits, None at its end."""
    while True:
        try:
            asked = reducer.send(lengths)
        except StopIteration:
            return None
        if not isinstance(asked, Round):
            carrier.add(asked.array)
        elif asked.sends or asked.receives:
            return carrier.begin(asked, number)
        lengths = []
