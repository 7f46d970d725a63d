"""What the engine is asked for, and when it may start: orders, works, and the lanes in which works keep their order.

An order says what is exchanged, and ``When`` says when that may begin. The order of a bucket is made once and given in
every step, so it holds nothing that a step decides. Both are tuples, which cost least to make. A ``Work`` stands for
what was handed over, until it is done.

A work starts once its gate is done, and in a lane when those of its priority that were handed over before it have
started and there is room for one more of them, ``in_flight`` at a time. Works of different priorities do not wait for
each other; those that may start at the same moment do so in the order of urgency. What goes first among works that have
started is decided wherever a rank chooses what to send or to do next: in ``exchange``, ``memory`` and the transports,
operation by operation. Knows no thread, clock or transport: what a work does, and when it is done, is the engine's
affair, which calls all of this from the thread that drives.

No deadlock. Ranks hand the works of a lane over in one order, whatever order their gradients become ready in. Take the
first work of that order that has not ended on all ranks. Where it has not, all before it has: so it is the first of its
priority there, whichever priority that rank gave it, and starts as soon as its gate is done, which is no later work of
the lane. What all ranks have started ends: receives are posted, and nothing waits for the end of another run
(``memory``). So ranks need no common order among works of different priorities, and may even differ in the priorities.
A limit over all priorities together would break this: with room for one, a rank whose gate of A opens late starts the
more urgent B, another one has started A, and each waits for what the other one's lane holds back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..collectives import Collective
from ..compression.reducers import Reducer
from ..plans.messages import Program
from .messages import Array, Sign
from .trace import Span


class Work:
    """Something under way; ``result`` is set when it is done. A ``tolerant`` one does not mind peers that leave.

    The smallest ``priority`` goes first. ``key`` is that of an exchange, -1 for anything else; ``span`` is what an
    observer has been told of it; ``callbacks`` are called when it is done.
    """

    __slots__ = ("callbacks", "done", "key", "label", "priority", "result", "span", "tolerant")

    def __init__(self, label: str, tolerant: bool = False, priority: float = 0.0) -> None:
        self.label = label
        self.tolerant = tolerant
        self.priority = priority
        self.key = -1
        self.done = False
        self.result: Any = None
        self.span: Span | None = None
        self.callbacks: list[Callable[[], None]] = []

    def when_done(self, call: Callable[[], None]) -> None:
        """Call at once, or as soon as the work is done."""
        if self.done:
            call()
        else:
            self.callbacks.append(call)

    def call_back(self) -> None:
        """Call what waits for this work, which is done."""
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class _Queue:
    """The works of one priority: how many are under way, and those that wait, with their gates."""

    __slots__ = ("active", "waiting")

    def __init__(self) -> None:
        self.active = 0
        self.waiting: deque[tuple[Work | None, Callable[[], None]]] = deque()


class Lane:
    """Works in order, of which ``in_flight`` of each priority may be under way."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self._queues: dict[float, _Queue] = {}
        self._gates: set[Work] = set()  # those that are to tell when they are done

    @property
    def active(self) -> int:
        """How many are under way."""
        return sum(queue.active for queue in self._queues.values())

    def enter(self, gate: Work | None, start: Callable[[], None], priority: float = 0.0) -> None:
        """Start one more work, once ``gate`` is done and it is its turn."""
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = _Queue()
        queue.waiting.append((gate, start))
        self._advance(queue)

    def leave(self, priority: float = 0.0) -> None:
        """A work of this lane is done: another of its priority may start."""
        queue = self._queues[priority]
        queue.active -= 1
        if queue.waiting:
            self._advance(queue)
        if not (queue.active or queue.waiting) and self._queues.get(priority) is queue:
            del self._queues[priority]

    def _advance(self, queue: _Queue) -> None:
        """Start what may; a work that starts may end at once, and others enter meanwhile."""
        while queue.waiting and queue.active < self.in_flight:
            gate, start = queue.waiting[0]
            if gate is not None and not gate.done:
                if gate not in self._gates:
                    self._gates.add(gate)
                    gate.when_done(partial(self._opened, gate))
                return
            queue.waiting.popleft()
            queue.active += 1
            start()

    def _opened(self, gate: Work) -> None:
        """A gate is done, which works of several priorities may wait for."""
        self._gates.discard(gate)
        for priority in sorted(self._queues):
            if (queue := self._queues.get(priority)) is not None:
                self._advance(queue)


class Order(NamedTuple):
    """A plan, or a library's collective, over ``array``.

    ``key`` is the same on all ranks and tells its messages from those of others in flight. A program that depends on
    the gate's result is given as a function. A ``tolerant`` order does not mind peers that leave, and nobody waits for
    it at the end. A ``sign`` is shown where ``Engine.shows`` says so. ``after`` is called, in the thread that drives,
    when all is exchanged, before the work is done.
    """

    program: Program | Collective | Callable[[], Program]
    array: Array
    key: int
    label: str
    tolerant: bool = False
    sign: Sign | None = None
    after: Callable[[], None] | None = None


class CodedOrder(NamedTuple):
    """The reducers of a bucket, which ``pieces`` makes when it begins; sums in it run ``program`` of their bytes."""

    pieces: Callable[[], Sequence[Callable[[], Reducer]]]
    program: Callable[[int], Program | Collective]
    key: int
    label: str
    tolerant: bool = False
    after: Callable[[], None] | None = None


class When(NamedTuple):
    """When an order begins: once ``gate`` is done and ``lane`` has room, right after ``before`` has been called.

    The smallest ``priority`` goes first, in whatever is under way; ranks need not agree on it. Whoever waits for the
    work at once need not ``announce`` it to the progress thread.
    """

    gate: Work | None = None
    before: Callable[[], None] | None = None
    lane: Lane | None = None
    priority: float = 0.0
    announce: bool = True


NOW, UNANNOUNCED = When(), When(announce=False)


class Exchanger(Protocol):
    """Whatever takes a model's buckets: plans, a codec, or those who hold the weights."""

    def start(self, bucket: int, when: When = NOW) -> Work:
        """Hand a bucket over."""
        ...
