"""What is under way: orders, works, the lanes in which works keep their order, and what threads share about all this.

An order says what is exchanged, and ``When`` says when that may begin. The order of a bucket is made once and given in
every step, so it holds nothing that a step decides. Both are tuples, which cost least to make. A ``Work`` stands for
what was handed over, until it is done.

A work starts once its gate is done, and in a lane when those of its priority that were handed over before it have
started and there is room for one more of them, ``in_flight`` at a time. Works of different priorities do not wait for
each other; those that may start at the same moment do so in the order of urgency. What goes first among works that have
started is decided wherever a rank chooses what to send or to do next: in ``exchange``, ``memory`` and the transports,
operation by operation. What a work does, and when it is done, is the engine's affair, which calls works and lanes from
the thread that drives.

No deadlock. Ranks hand the works of a lane over in one order, whatever order their gradients become ready in. Take the
first work of that order that has not ended on all ranks. Where it has not, all before it has: so it is the first of its
priority there, whichever priority that rank gave it, and starts as soon as its gate is done, which is no later work of
the lane. What all ranks have started ends: receives are posted, and nothing waits for the end of another run
(``memory``). So ranks need no common order among works of different priorities, and may even differ in the priorities.
A limit over all priorities together would break this: with room for one, a rank whose gate of A opens late starts the
more urgent B, another one has started A, and each waits for what the other one's lane holds back.

Threads share one lock, and two conditions to wait for (``Monitor``). These are Python's, and so Mesa's (B. W. Lampson
and D. D. Redell, "Experience with processes and monitors in Mesa", 1980): a thread that is notified does not go on at
once. What it waited for may have changed again by then, so it always looks at the condition once more.

Does not know what driving is, nor what a fault looks like to a user: that is the ``driver``'s. Of the transport it uses
two words: whether it has anything left to do by itself (``idle``), and to ``wake`` whoever drives it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ..collectives import Collective
from ..compression.reducers import Reducer
from ..plans.messages import Program
from .trace import Span

Array = NDArray[Any]

KEY_BITS = 30
KEYS = 1 << KEY_BITS
"""Keys a run may have; tags with the highest bit set are left to single messages and to reducers."""


@dataclass(frozen=True)
class Sign:
    """What a run is for, which ranks show each other where they share memory (``kernels.board``): SIGN_WORDS numbers.

    ``differs`` makes the error for a process whose first two are others, from its number and its words.
    """

    words: tuple[int, ...]
    differs: Callable[[int, tuple[int, ...]], Exception]


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


_UNTIL_S = 0.1


class Wakes(Protocol):
    """What is driven, as far as whoever does not drive has to do with it."""

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do for it."""
        ...

    def wake(self) -> None:
        """Have the thread that waits in it, if one does, look for what there is to do."""
        ...


class Monitor:
    """The state that threads share; ``driven`` is what the one among them that drives waits in.

    Whose turn it is to drive, what has been handed over and not been taken up, how many works the end waits for, who is
    told when one is over, and the first fault, which is the same exception for all.

    Every public field is written with the lock held, but for what the thread that drives takes out of ``inbox``. Each
    may be read without it, as one value: ``error`` and ``ending`` never change back, whether ``driver`` is the thread
    that asks is known to that thread alone, and what is put into ``inbox`` while it drives is followed by a ``wake``.
    ``under_way`` may be another number a moment later. What depends on several of them is decided here.
    """

    def __init__(self, driven: Wakes) -> None:
        self._driven = driven
        self._lock = threading.RLock()  # of both conditions; taken without them, which cost two calls each time
        self._changed = threading.Condition(self._lock)  # something is done: for those who wait for it
        self._wanted = threading.Condition(self._lock)  # something is to be done: for the progress thread
        self._told: dict[Work, Callable[[], None]] = {}  # who is told that a work is over
        self._tolerated = 0  # works that nobody waits for
        self._explains = 0  # the thread that is to say what the first fault is; 0 when none is
        self.inbox: deque[Callable[[], None]] = deque()
        """What has been handed over, for the thread that drives."""
        self.under_way = 0
        """Works that the end waits for."""
        self.driver = 0
        """The thread that drives; 0 when none does."""
        self.error: Exception | None = None
        """The first fault, as everybody gets it."""
        self.failed = False
        """Whether there is a fault, of which ``error`` may not be known yet."""
        self.ending = False
        """Whether there was a fault, or the end has come: nobody begins to drive any more."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to drive."""
        return bool(self.inbox or self.under_way or self._tolerated) or not self._driven.idle

    # Whose turn it is.

    def claim(self, first: bool = False, works: int = 0) -> bool:
        """Drive from now on, until ``hand_over``; False, at once, where another thread does, or the end has come.

        Whoever begins something ``first`` may not where anything was handed over before. ``works`` is how many it is.
        """
        with self._lock:
            if self.driver or self.ending or (first and self.inbox):
                return False
            self.driver = threading.get_ident()
            self.under_way += works
            return True

    def take_turn(self) -> bool:
        """Wait until there is something to drive and nobody does: then do so; False at the end."""
        with self._lock:
            self._wanted.wait_for(lambda: not self.driver and (self.ending or self.busy))
            if self.ending:
                return False
            self.driver = threading.get_ident()
            return True

    def hand_over(self) -> None:
        """Nobody drives from now on, but for the progress thread if there is anything left."""
        with self._lock:
            self.driver = 0
            if self.ending or self.busy:
                self._wanted.notify()

    # Works.

    def hand_in(self, task: Callable[[], None], tolerant: bool = False, announce: bool = True) -> None:
        """One more work, which ``task`` begins in the thread that drives. Who drives soon need not ``announce`` it."""
        with self._lock:
            if tolerant:
                self._tolerated += 1
            else:
                self.under_way += 1
            self.inbox.append(task)
            if self.driver:
                if len(self.inbox) == 1:  # else it has been woken, and looks at all of it before it sleeps again
                    self._driven.wake()
            elif announce:
                self._wanted.notify()

    def expect(self, tolerant: bool) -> None:
        """One more work, which is done elsewhere."""
        with self._lock:
            if tolerant:
                self._tolerated += 1
            else:
                self.under_way += 1

    def tell_driver(self, task: Callable[[], None]) -> None:
        """Call in the thread that drives, for a work that is under way already."""
        with self._lock:
            self.inbox.append(task)
            if self.driver:
                self._driven.wake()
            else:
                self._wanted.notify()

    def take_up(self) -> None:
        """Do what has been handed over; in the thread that drives."""
        while self.inbox:
            self.inbox.popleft()()
        with self._lock:  # the end waits for this; a tolerant work gives no other sign
            self._changed.notify_all()

    def finish(self, work: Work) -> None:
        """A work is done: whoever waits for it goes on, and whoever wanted to be told is."""
        with self._lock:
            work.done = True
            if work.tolerant:
                self._tolerated -= 1
            else:
                self.under_way -= 1
            told = self._told.pop(work, None)
            self._changed.notify_all()
        if told is not None:
            told()

    def abandon(self, works: Iterable[Work]) -> None:
        """Nobody needs these any more: the end does not wait for them."""
        with self._lock:
            for work in works:
                if not (work.done or work.tolerant):
                    work.tolerant = True
                    self.under_way -= 1
                    self._tolerated += 1
            self._changed.notify_all()

    def when_over(self, work: Work, call: Callable[[], None]) -> None:
        """Call, at once or from whichever thread ends it, when a work is done or never will be; it may not wait."""
        with self._lock:
            if not (work.done or self.error):
                self._told[work] = call
                return
        call()

    # Waiting.

    def wait(self, works: Collection[Work], deadline: float | None) -> bool:
        """Wait for other threads to get all works done, or for a fault; False when the time is over first."""
        left = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._lock:
            return bool(self._changed.wait_for(lambda: self.error or all(work.done for work in works), left))

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Wait until one of the works is done, ``until()`` holds (looked at often), or there is a fault."""
        with self._lock:
            while not (self.error or until() or any(work.done for work in works)):
                self._changed.wait(_UNTIL_S)

    def flush(self, limit_s: float) -> None:
        """Have what is left done, unless there is a fault, for no longer than that."""
        with self._lock:
            self._wanted.notify()
            self._changed.wait_for(lambda: self.error or not (self.under_way or self.inbox), limit_s)

    # The end.

    def fail(self, error: Exception) -> None:
        """A fault: whoever waits here gets the first one."""
        self.fail_first()
        self.explain(error)

    def fail_first(self) -> bool:
        """A fault: nobody begins to drive any more. False where it is not the first.

        The same thread has to ``explain`` it. Until then whoever waits goes on waiting: nobody gets anything else.
        """
        with self._lock:
            if self.failed:
                return False
            self.failed = self.ending = True
            self._explains = threading.get_ident()
            return True

    def explain(self, error: Exception) -> None:
        """What the fault is with which this thread was the first: whoever waits here gets it. Any other is dropped."""
        with self._lock:
            if self._explains != threading.get_ident():
                return
            self._explains, self.error = 0, error
            told, self._told = self._told, {}
            self._changed.notify_all()
            self._wanted.notify()
        self._driven.wake()  # whoever drives looks at it
        for call in told.values():
            with contextlib.suppress(Exception):  # the first fault stays, and the others have to be told
                call()

    def end(self) -> None:
        """The end has come, without a fault."""
        with self._lock:
            self.ending = True
            self._wanted.notify()
        self._driven.wake()
