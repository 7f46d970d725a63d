"""Everything of one process that is under way in the background of training.

The training thread hands over work (a bucket to exchange, a message to send) and later waits for it. Who drives it
meanwhile is in ``driver``; what a work is, and in which order works start, in ``order``. Single messages are ``mail``;
what is prepared for a thread that carries it out itself, again and again, is ``kept``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..plans.messages import Program
from ..transports import Bytes, Transport
from ..wire.culprit import Found, Waits, find_culprit
from .driver import LIMIT_S, Driver
from .exchange import Exchange
from .kept import Kept
from .mail import Mail
from .messages import Array, Run
from .order import NOW, UNANNOUNCED, CodedOrder, Lane, Order, When, Work
from .reducing import Reducing
from .trace import Observer, begin


class Engine(Driver):
    """What drives one transport; ``explain`` turns a fault into what the user shall see.

    ``find_culprit`` searches who is to blame when nothing moves. ``expects`` may be set: for whom this process waits
    though nothing under way says so; it is asked from any thread. An ``observer`` is told all that begins and ends.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        limit_s: float = LIMIT_S,
        explain: Callable[[Exception], Exception] = lambda error: error,
        has_left: Callable[[int], bool] = lambda _: False,
        on_raise: Callable[[], None] = lambda: None,
        find_culprit: Callable[[Waits], Found] = lambda waits: find_culprit(-1, waits, lambda _: None),
        observer: Observer | None = None,
    ) -> None:
        # The progress thread starts with the driver: what it looks at has to be there before.
        self._has_left = has_left
        self.expects: Callable[[], Waits] = dict
        self._mail = Mail(transport, has_left, observer, self.finish)
        exchange = Exchange(transport, has_left=has_left, observer=observer, handed_over=self._handed_over)
        super().__init__(exchange, limit_s, explain, on_raise, find_culprit, observer)

    def _handed_over(self) -> bool:
        """Whether the thread that drives has something to look at besides what is under way."""
        return bool(self.monitor.inbox) or self.monitor.ending

    def start(self, order: Order | CodedOrder, when: When = NOW) -> Work:
        """Exchange what an order says, behind this call."""
        monitor = self.monitor
        if monitor.error is not None:
            raise self._raised(monitor.error)
        work = Work(order.label, order.tolerant, when.priority)
        work.key = order.key
        if self._observer is not None:
            work.span = begin(self._observer, "work", order.label, key=order.key, priority=when.priority)
        task = partial(self._begin, order, work, when)
        if when.lane is not None:
            task = partial(when.lane.enter, when.gate, task, when.priority)
        elif when.gate is not None:
            task = partial(when.gate.when_done, task)
        monitor.hand_in(task, order.tolerant, when.announce)
        return work

    def _begin(self, order: Order | CodedOrder, work: Work, when: When) -> None:
        """What was handed over begins: a plan, what the transport's library does by itself, or a bucket's reducers."""
        if when.before is not None:
            when.before()
        if isinstance(order, CodedOrder):
            self._begin_reducers(order, work, when.lane)
            return
        program = order.program() if callable(order.program) else order.program
        done = partial(self.finish, work, when.lane, order.after)
        if isinstance(program, Collective):
            self._exchange.hand_over(program, order.array, order.key, work.label, done, work.span)
        else:
            what = (work.label, work.priority, done, work.tolerant, work.span, order.sign)
            self._exchange.start(Run(program, order.array, order.key, *what))

    def _begin_reducers(self, order: CodedOrder, work: Work, lane: Lane | None) -> None:
        """Begin to drive the reducers of a bucket."""

        def finished() -> None:
            self._reducing.pop(order.key, None)
            self.finish(work, lane, order.after)

        reducing = self._reducing[order.key] = Reducing(
            self._exchange,
            order.pieces(),
            order.program,
            order.key,
            order.label,
            priority=work.priority,
            on_done=finished,
            tolerant=order.tolerant,
            has_left=self._has_left,
            observer=self._observer,
            within=work.span,
        )
        reducing.start()

    def shows(self, program: Program | Collective, array: Array) -> bool:
        """Whether ranks see each other's signs of such a run; the same on all ranks."""
        return isinstance(program, Program) and self._exchange.shows(program.plan, array)

    def absent(self, key: int, processes: Iterable[int]) -> set[int]:
        """Those who have not come to a run under way that shows signs; whom anything waits for where all have."""
        return self._exchange.absent(key, processes) or self.awaited

    def run(self, order: Order, timeout: float | None = None) -> None:
        """Exchange what an order says, and return when it is done: ``start`` and ``wait`` with less in between.

        Raises PeerTimeout after ``timeout`` seconds; the run is still under way then.
        """
        self.check_not_driving()
        work, begun = Work(order.label), time.perf_counter()
        blocked = None if self._observer is None else begin(self._observer, "wait", order.label)

        def start() -> None:
            if self._observer is not None:
                work.span = begin(self._observer, "work", order.label, key=order.key)
            self._begin(order, work, NOW)

        deadline = None if timeout is None else begun + timeout
        try:
            if not self._drive_here((work,), deadline, start):
                work = self.start(order, UNANNOUNCED)
                self._drive_here((work,), deadline)  # whoever drove may have stopped before it was handed over
            if not work.done:  # another one drives, or the end came first and with it a fault
                self.monitor.wait((work,), deadline)
        except BaseException as error:
            self.left(error)
            raise
        finally:
            self.blocked.count(begun)
            if blocked is not None:
                blocked.end()
        if self.monitor.error is not None or not work.done:
            raise self.unfinished(work, timeout)

    def keep(self, program: Program, dtype: np.dtype[Any], size: int) -> Kept | None:
        """Prepare for many runs of a plan over arrays of one size and type, which shows its sign; None if not now."""
        if self._observer is not None or not self.monitor.claim(first=True):
            return None
        try:
            return Kept(self, self._exchange, program, self._exchange.keep(program.plan, dtype, size))
        finally:
            self.monitor.hand_over()

    def drop(self, kept: Kept, after: Work | None = None) -> None:
        """What was prepared is not needed any more, once the last work of it is done."""
        self.then("drop", [] if after is None else [after], partial(self._exchange.drop, kept.scripted), tolerant=True)

    def send(self, dst: int, tag: int, data: bytes | Bytes, label: str, tolerant: bool = False) -> Work:
        """Send a message, which may be to this process itself; a ``tolerant`` one to a peer that may leave.

        An array stays unchanged until the work is done.
        """
        work = self._work(label, tolerant)
        self._post(partial(self._mail.send, work, dst, tag, np.frombuffer(data, np.uint8)), tolerant)
        return work

    def recv(
        self,
        src: int,
        tag: int,
        nbytes: int,
        label: str,
        tolerant: bool = False,
        place: Bytes | None = None,
        left: Callable[[Exception], None] = lambda _: None,
    ) -> Work:
        """Receive a message of at most ``nbytes``; ``result`` is its bytes, or how many lie in ``place`` then.

        Where a ``tolerant`` one does not come because its peer has left, ``left`` is told in the thread that drives.
        """
        into = np.empty(nbytes, np.uint8) if place is None else place  # here: what cannot be made is the caller's error
        work = self._work(label, tolerant)
        self._post(partial(self._mail.recv, work, src, tag, into, place is not None, left), tolerant)
        return work

    def promise(self, label: str, tolerant: bool = False) -> Work:
        """A work that is done elsewhere, until ``fulfil`` says so."""
        work = self._work(label, tolerant)
        self.monitor.expect(tolerant)
        return work

    def fulfil(self, work: Work) -> None:
        """A promised work is done; called from any thread. After a fault nobody minds."""
        self.monitor.tell_driver(lambda: self.finish(work))

    def then(
        self, label: str, works: Sequence[Work], call: Callable[[], None] = lambda: None, *, tolerant: bool = False
    ) -> Work:
        """``call``, in the thread that drives, once all ``works`` are done, and be done after that.

        The end waits for it unless it is ``tolerant``.
        """
        work = self._work(label, tolerant)
        waiting = list(works)

        def step() -> None:
            while waiting:  # of which any number may be done: a call for each would be deep
                if not (one := waiting.pop()).done:
                    one.when_done(step)
                    return
            call()
            self.finish(work)

        self._post(step, tolerant)
        return work

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Zeroed memory that the transport moves without an extra copy, as ``nbytes // itemsize`` elements."""
        work = self._work("allocate")

        def make() -> None:
            work.result = self.transport.allocate(nbytes)
            self.finish(work)

        self._post(make)
        self.wait(work)
        memory: Bytes = work.result
        return memory.view(dtype)

    @property
    def awaited(self) -> set[int]:
        """The processes that something under way waits for."""
        return set(self.waits())

    def waits(self) -> Waits:
        """Of single messages, of what ``expects`` says, of reducers and of plans."""
        waits = {**self._mail.waiting_for, **self.expects()}
        for one in list(self._reducing.values()):
            waits |= one.waiting_for
        return waits | self._exchange.waiting_for

    def _work(self, label: str, tolerant: bool = False) -> Work:
        """A work that is handed over, but no exchange."""
        work = Work(label, tolerant)
        if self._observer is not None:
            work.span = begin(self._observer, "work", label)
        return work
