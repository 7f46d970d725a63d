"""Defines works and orders, the lanes that keep works in order, and the state that threads share about them.

An order says what is exchanged; ``When`` says when it may begin. A bucket's order is made once and reused in every
step, so it contains nothing that depends on the step. Both are tuples because tuples are the cheapest to make. A
``Work`` is the handle of something submitted.

A work starts after its gate is done. In a lane it also waits for the start of all earlier works of its priority, and
for one of ``in_flight`` places for works of that priority. Works of different priorities do not wait for each other;
works that become ready together start in order of urgency. Once started, works compete for the network operation by
operation (``exchange``, ``memory``, the transports). The engine defines what a work does and when it is done; it calls
works and lanes from the driving thread.

No deadlock. All ranks submit the works of a lane in one order, whatever the order in which gradients become ready.
Consider the first work in that order that has not ended on all ranks. On a rank where it has not ended, all works
before it have. It is therefore the first of its priority there, whichever priority that rank assigned, and starts as
soon as its gate is done; the gate is not a later work of the lane. A work that has started on all ranks ends: its
receives are posted, and it waits for the end of no other run (``memory``). Works of different priorities thus need no
common order, and ranks may even assign different priorities. A limit over all priorities together would break this.
With room for one, a rank whose gate of A opens late starts the more urgent B while another rank has started A; each
then waits for work that the other's lane holds back.

Collectives of a library (``HasCollectives``) keep this true, although a library runs them one at a time. A
reduce-scatter or an all-gather enters the library's order when all ranks of its group have reached it, so that those
before it end by themselves. In the order of their starts they would not: where host X has the all-gather of B before
the reduce-scatter of A, and host Y the all-gather of A before the reduce-scatter of B, each all-gather waits for a sum
that the other host holds back. A library's allreduces do enter in the order in which rank 0 starts them. They are whole
works that wait for nothing between their start and their end, but with them all ranks must assign the same priorities.

Threads share one lock and two condition variables (``Monitor``). Python's condition variables have Mesa semantics (B.
W. Lampson and D. D. Redell, "Experience with processes and monitors in Mesa", 1980): a notified thread does not
continue at once, and its condition may have changed again by then. Waits therefore always test the condition again.

This module does not know how to drive, nor how faults are presented to the user (``driver``). It uses two things of the
transport: whether it is ``idle``, and ``wake``, which interrupts the poll of the driving thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..compression.reducers import Reducer
from ..plans.messages import Cut, Program
from ..transports import Transport
from .trace import Span

Array = NDArray[Any]

KEY_BITS = 30
KEYS = 1 << KEY_BITS
"""The number of run keys. Tags with the highest bit set belong to single messages and to reducers."""


@dataclass(slots=True)  # not frozen: one is made for every small collective, and a frozen one takes four times as long
class Sign:
    """The identity of a run, SIGN_WORDS numbers that ranks publish to each other in shared memory (``kernels.board``).

    ``differs(rank, words)`` makes the error for a process whose first two words differ.
    """

    words: tuple[int, ...]
    differs: Callable[[int, tuple[int, ...]], Exception]


class Work:
    """The handle of something submitted; ``result`` is valid once ``done``. A ``tolerant`` work survives when peers
    leave.

    The smallest ``priority`` goes first. ``key`` is the key of an exchange, else -1. ``row`` is its number in the
    flight record, or 0; ``span`` is the observer's span. ``callbacks`` are called when the work is done.
    """

    __slots__ = ("callbacks", "done", "key", "label", "priority", "result", "row", "span", "tolerant")

    def __init__(self, label: str, tolerant: bool = False, priority: float = 0.0) -> None:
        self.label = label
        self.tolerant = tolerant
        self.priority = priority
        self.key = -1
        self.row = 0
        self.done = False
        self.result: Any = None
        self.span: Span | None = None
        self.callbacks: list[Callable[[], None]] = []

    def when_done(self, call: Callable[[], None]) -> None:
        """Call now if the work is done, else as soon as it is."""
        if self.done:
            call()
        else:
            self.callbacks.append(call)

    def call_back(self) -> None:
        """Run the callbacks of this finished work."""
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class _Queue:
    """The works of one priority: the number in flight, and the waiting ones with their gates."""

    __slots__ = ("active", "waiting")

    def __init__(self) -> None:
        self.active = 0
        self.waiting: deque[tuple[Work | None, Callable[[], None]]] = deque()


class Lane:
    """Works in order. At most ``in_flight`` of each priority are in flight."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self._queues: dict[float, _Queue] = {}
        self._gates: set[Work] = set()  # gates that have a callback of this lane

    @property
    def active(self) -> int:
        """The number of works in flight."""
        return sum(queue.active for queue in self._queues.values())

    def enter(self, gate: Work | None, start: Callable[[], None], priority: float = 0.0) -> None:
        """Add a work: ``start`` is called once ``gate`` is done and it is the work's turn."""
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = _Queue()
        queue.waiting.append((gate, start))
        self._advance(queue)

    def leave(self, priority: float = 0.0) -> None:
        """Record that a work has ended; the next one of its priority may start."""
        queue = self._queues[priority]
        queue.active -= 1
        if queue.waiting:
            self._advance(queue)
        # The callbacks of ``start`` may have left this queue and made a new one: delete only our own.
        if not (queue.active or queue.waiting) and self._queues.get(priority) is queue:
            del self._queues[priority]

    def _advance(self, queue: _Queue) -> None:
        """Start the works that may start. A started work may end at once, and others may enter meanwhile."""
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
        """Start the works behind a gate, which may belong to several priorities."""
        self._gates.discard(gate)
        for priority in sorted(self._queues):
            if (queue := self._queues.get(priority)) is not None:
                self._advance(queue)


class Order(NamedTuple):
    """An exchange of ``array`` by a plan or by a library's collective.

    ``key`` is the same on all ranks and separates its messages from others in flight. ``program`` is a function if it
    depends on the gate's result. A ``tolerant`` order does not fail when peers leave, and ``close`` does not wait for
    it. Ranks show ``sign`` to each other if ``Engine.shows`` says so. ``after`` is called in the driving thread after
    the exchange, before the work is done.
    """

    program: Program | Collective | Callable[[], Program]
    array: Array
    key: int
    label: str
    tolerant: bool = False
    sign: Sign | None = None
    after: Callable[[], None] | None = None


@dataclass(eq=False)
class Run:
    """One plan in progress over one array.

    ``key`` is the same on all ranks and separates this run's messages from those of other runs in flight. A
    ``tolerant`` run does not fail when peers leave; it then never finishes (a server that waits for a further step).
    ``span`` is first the enclosing span and, once the run has begun, its own.
    """

    program: Program
    array: Array
    key: int
    label: str
    priority: float = 0.0
    on_done: Callable[[], None] | None = None
    tolerant: bool = False
    span: Span | None = None
    sign: Sign | None = None
    cut: Cut = field(init=False, repr=False)
    opened: int = 0
    left: int = 0
    open_segments: list[Any] = field(default_factory=list)
    bytes_view: NDArray[np.uint8] = field(init=False, repr=False)

    @property
    def done(self) -> bool:
        """Whether every segment has finished."""
        return self.left == 0


class CodedOrder(NamedTuple):
    """The reducers of a bucket, made by ``pieces`` at the start. A sum of n bytes in it runs ``program(n)``."""

    pieces: Callable[[], Sequence[Callable[[], Reducer]]]
    program: Callable[[int], Program | Collective]
    key: int
    label: str
    tolerant: bool = False
    after: Callable[[], None] | None = None


class When(NamedTuple):
    """When an order begins: after ``gate`` is done and ``lane`` has room; ``before`` is called right before.

    The smallest ``priority`` goes first among everything in flight; ranks need not agree on it. A caller that waits for
    the work at once can skip waking the progress thread with ``announce=False``.
    """

    gate: Work | None = None
    before: Callable[[], None] | None = None
    lane: Lane | None = None
    priority: float = 0.0
    announce: bool = True


NOW, UNANNOUNCED = When(), When(announce=False)


class Exchanger(Protocol):
    """Exchanges a model's buckets: by plans, by a codec, or with the owners of the weights."""

    def start(self, bucket: int, when: When = NOW) -> Work:
        """Submit a bucket."""
        ...


_UNTIL_S = 0.1


class Monitor:
    """The state that threads share. ``driven`` is the transport that the driving thread waits in.

    It consists of the driving thread, the submitted tasks, the number of works that ``close`` waits for, the callbacks
    of works, and the first fault, which is the same exception for all threads.

    Public fields are written with the lock held, except that the driving thread takes from ``inbox`` without it. Each
    field may be read without the lock, as a single value: ``error`` and ``ending`` never change back; whether
    ``driver`` is the current thread cannot change under that thread; and every append to ``inbox`` during driving is
    followed by ``wake``. ``under_way`` may be outdated a moment later. Decisions that depend on several fields are made
    here, under the lock.
    """

    def __init__(self, driven: Transport) -> None:
        self._driven = driven
        self._lock = threading.RLock()  # shared by both conditions and acquired directly, which saves two calls per use
        self._changed = threading.Condition(self._lock)  # some work is done; for waiting threads
        self._wanted = threading.Condition(self._lock)  # there is work; for the progress thread
        self._told: dict[Work, Callable[[], None]] = {}  # callbacks of ``when_over``
        self._tolerated = 0  # tolerant works in flight
        self._explains = 0  # the thread that must explain the first fault; 0 if none
        self.inbox: deque[Callable[[], None]] = deque()
        """Submitted tasks for the driving thread."""
        self.under_way = 0
        """The number of works that ``close`` waits for."""
        self.driver = 0
        """The id of the driving thread; 0 if none drives."""
        self.error: Exception | None = None
        """The first fault, as raised in every thread."""
        self.failed = False
        """Whether there is a fault. ``error`` is set a moment later."""
        self.ending = False
        """Whether there was a fault or the end has come. No thread starts to drive after that."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to drive."""
        return bool(self.inbox or self.under_way or self._tolerated) or not self._driven.idle

    # Driving

    def claim(self, first: bool = False, works: int = 0) -> bool:
        """Start to drive, until ``hand_over``. False, at once, if another thread drives or the end has come.

        ``first`` is for a caller that begins work of its own, ``works`` in number; it is refused while earlier work is
        queued.
        """
        with self._lock:
            if self.driver or self.ending or (first and self.inbox):
                return False
            self.driver = threading.get_ident()
            self.under_way += works
            return True

    def take_turn(self) -> bool:
        """Wait until there is work that no thread drives, then start to drive. False at the end."""
        with self._lock:
            self._wanted.wait_for(lambda: not self.driver and (self.ending or self.busy))
            if self.ending:
                return False
            self.driver = threading.get_ident()
            return True

    def hand_over(self) -> None:
        """Stop driving, and wake the progress thread if work is left."""
        with self._lock:
            self.driver = 0
            if self.ending or self.busy:
                self._wanted.notify()

    # Works

    def hand_in(self, task: Callable[[], None], tolerant: bool = False, announce: bool = True) -> None:
        """Submit a work that ``task`` begins in the driving thread. Without ``announce`` the caller drives it soon."""
        with self._lock:
            if tolerant:
                self._tolerated += 1
            else:
                self.under_way += 1
            self.inbox.append(task)
            if self.driver:
                # otherwise the driver is awake already and will see the whole queue before it sleeps
                if len(self.inbox) == 1:
                    self._driven.wake()
            elif announce:
                self._wanted.notify()

    def expect(self, tolerant: bool) -> None:
        """Count a work that something else completes."""
        with self._lock:
            if tolerant:
                self._tolerated += 1
            else:
                self.under_way += 1

    def tell_driver(self, task: Callable[[], None]) -> None:
        """Run ``task`` in the driving thread, for a work that is already counted."""
        with self._lock:
            self.inbox.append(task)
            if self.driver:
                self._driven.wake()
            else:
                self._wanted.notify()

    def take_up(self) -> None:
        """Run the submitted tasks. Only in the driving thread."""
        while self.inbox:
            self.inbox.popleft()()
        with self._lock:  # ``flush`` waits for an empty inbox, and a tolerant work has no other signal
            self._changed.notify_all()

    def finish(self, work: Work) -> None:
        """Mark a work as done, wake the waiting threads and run the work's callback."""
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
        """Make works tolerant, so that ``flush`` does not wait for them."""
        with self._lock:
            for work in works:
                if not (work.done or work.tolerant):
                    work.tolerant = True
                    self.under_way -= 1
                    self._tolerated += 1
            self._changed.notify_all()

    def when_over(self, work: Work, call: Callable[[], None]) -> None:
        """Call once ``work`` is done or has failed: now, or later from another thread. The call must not block."""
        with self._lock:
            if not (work.done or self.error):
                self._told[work] = call
                return
        call()

    # Waiting

    def wait(self, works: Collection[Work], deadline: float | None) -> bool:
        """Wait until other threads have completed all works, or for a fault. False when the time is over."""
        left = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._lock:
            return bool(self._changed.wait_for(lambda: self.error or all(work.done for work in works), left))

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Wait until one work is done, ``until()`` holds (polled), or there is a fault."""
        with self._lock:
            while not (self.error or until() or any(work.done for work in works)):
                self._changed.wait(_UNTIL_S)

    def flush(self, limit_s: float) -> None:
        """Wait up to ``limit_s`` for the remaining work, unless there is a fault."""
        with self._lock:
            self._wanted.notify()
            self._changed.wait_for(lambda: self.error or not (self.under_way or self.inbox), limit_s)

    # The end

    def fail(self, error: Exception) -> None:
        """Record a fault; threads that wait here get the first one."""
        self.fail_first()
        self.explain(error)

    def fail_first(self) -> bool:
        """Record that there is a fault, so that no thread starts to drive. False if it is not the first.

        The same thread must call ``explain`` next. Waiting threads wait until then: all get one exception.
        """
        with self._lock:
            if self.failed:
                return False
            self.failed = self.ending = True
            self._explains = threading.get_ident()
            return True

    def explain(self, error: Exception) -> None:
        """Publish the fault of the thread whose ``fail_first`` returned True; faults of other threads are dropped."""
        with self._lock:
            if self._explains != threading.get_ident():
                return
            self._explains, self.error = 0, error
            told, self._told = self._told, {}
            self._changed.notify_all()
            self._wanted.notify()
        self._driven.wake()  # the driver must notice the fault
        for call in told.values():
            with contextlib.suppress(Exception):  # a failing callback must not keep the others from being called
                call()

    def end(self) -> None:
        """End without a fault."""
        with self._lock:
            self.ending = True
            self._wanted.notify()
        self._driven.wake()
