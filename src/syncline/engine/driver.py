"""Who drives what is under way in one process, and how others wait for it.

One thread at a time *drives*: it owns the transport, turns the exchange and calls back. That is the progress thread
while there is work that nobody waits for; a thread that would have to wait anyway drives itself when nobody else does,
which saves two hand-overs between threads. What threads share is in ``order``. The time that they spend blocked here
is counted, each by itself: it is the exposed communication.

A fault while driving reaches every thread that waits, now or later, as the same exception. So does an interrupt
(Ctrl-C, an exception out of a signal handler) in a thread that drives or waits: a script that catches it and goes on
would do so with a step missing, so every later call raises what happened. Each wait has a time limit, and so has the
progress of the whole (``motion``).

Does not know what is handed over: that is the ``engine``'s.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ..compression.reducers import Room
from ..errors import ClosedError, PeerLeft, PeerLost, PeerTimeout, ProtocolError, UsageError, labelled, within
from ..transports import Transport
from ..wire.culprit import Answer, Found, Waits
from .exchange import SPINS, Exchange
from .motion import Motion
from .order import Lane, Monitor, Work
from .reducing import Reducing
from .trace import Observer, begin

LIMIT_S = 30 * 60.0
"""Default limit for progress."""

SPINS_HERE = 200
"""How often a thread that waits anyway looks again before it sleeps; its core is offered to others in between."""
_FLUSH_S = 10.0
_DRAIN_S = 2.0
_DRAIN_POLL_S = 0.01


class Blocked:
    """The seconds of the threads that waited, but for what they have asked not to be counted.

    They count ``within`` others, too.
    """

    def __init__(self, within: Blocked | None = None) -> None:
        self._within = within
        self._seconds: dict[int, float] = {}  # by thread
        self._uncounted: set[int] = set()

    @property
    def seconds(self) -> float:
        """Those of all threads, added up."""
        return sum(list(self._seconds.values()))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What this thread waits for inside is no communication of the training."""
        thread = threading.get_ident()
        self._uncounted.add(thread)
        try:
            with contextlib.nullcontext() if self._within is None else self._within.uncounted():
                yield
        finally:
            self._uncounted.discard(thread)

    def count(self, begun: float) -> None:
        """This thread was blocked since then (``time.perf_counter``)."""
        thread = threading.get_ident()
        if thread not in self._uncounted:
            self._seconds[thread] = self._seconds.get(thread, 0.0) + time.perf_counter() - begun
        if self._within is not None:
            self._within.count(begun)


class Driver(ABC):
    """Drives an exchange over a transport; ``error`` is the first fault.

    ``explain`` turns a fault into what the user shall see; ``on_raise`` is called when it is about to reach a user's
    thread; ``find_culprit`` searches who is to blame when nothing moves. The progress thread starts at once.
    """

    def __init__(
        self,
        exchange: Exchange,
        limit_s: float,
        explain: Callable[[Exception], Exception],
        on_raise: Callable[[], None],
        find_culprit: Callable[[Waits], Found],
        observer: Observer | None,
    ) -> None:
        self.transport: Transport = exchange.transport
        self.blocked = Blocked()
        self._observer = observer
        self._exchange = exchange
        self._reducing: dict[int, Reducing] = {}  # by key
        self._on_raise, self._explain = on_raise, explain
        self.monitor = Monitor(self.transport)
        self.motion = Motion(limit_s, self.waits, find_culprit, self.transport)
        self._thread = threading.Thread(target=self._progress, name="syncline-progress", daemon=True)
        self._thread.start()

    @abstractmethod
    def waits(self) -> Waits:
        """For whom something under way waits, and what that is; may be asked from another thread.

        What nobody minds if it never ends waits as soon as somebody has come to it.
        """

    @property
    def error(self) -> Exception | None:
        """The first fault."""
        return self.monitor.error

    @property
    def observer(self) -> Observer | None:
        """Who is told all that begins and ends here, if anybody is."""
        return self._observer

    # For the threads that wait.

    @property
    def blocked_s(self) -> float:
        """Seconds for which threads have been blocked here, added up."""
        return self.blocked.seconds

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes sent to each process, and received, with all headers."""
        return self.transport.traffic()

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """What this thread waits for inside is no communication of the training."""
        return self.blocked.uncounted()

    def wait(self, *works: Work, timeout: float | None = None) -> None:
        """Block until all are done; raises the engine's fault, or PeerTimeout after ``timeout`` seconds."""
        monitor = self.monitor
        if monitor.error is None:
            for work in works:
                if not work.done:
                    break
            else:
                return
        if monitor.driver == threading.get_ident():
            self.check_not_driving()  # raises
        begun, came = time.perf_counter(), True
        blocked = None
        if self._observer is not None:
            blocked = begin(self._observer, "wait", _first_of([work.label for work in works if not work.done]))
        deadline = None if timeout is None else begun + timeout
        try:
            self._drive_here(works, deadline)
            for work in works:
                if not work.done:  # another one drives, or the time is over
                    came = monitor.wait(works, deadline)
                    break
        except BaseException as error:
            self.left(error)
            raise
        finally:
            self.blocked.count(begun)
            if blocked is not None:
                blocked.end()
        if monitor.error is not None:
            raise self._raised(monitor.error)
        if not came and (late := next((work for work in works if not work.done), None)) is not None:
            raise self.unfinished(late, timeout)

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Block until one of the works is done or ``until()`` holds (looked at often); raises the engine's fault."""
        blocked = None
        if self._observer is not None:
            blocked = begin(self._observer, "wait", _first_of([work.label for work in works]))
        try:
            self.monitor.wait_any(works, until)
        except BaseException as error:
            self.left(error)
            raise
        finally:
            if blocked is not None:
                blocked.end()
        self.over(until)

    def over(self, until: Callable[[], bool]) -> bool:
        """Whether ``until()`` holds. Raises the engine's fault, but not that a peer is gone once it holds.

        Where somebody was lost all the same, ``close`` returns it.
        """
        holds, error = until(), self.error
        if error is None:
            return holds
        if isinstance(error, PeerLost | PeerLeft) and (holds or until()):  # whoever is gone may have left meanwhile
            return True
        raise self._raised(error)

    def when_over(self, work: Work, call: Callable[[], None]) -> None:
        """Call, at once or from whichever thread ends it, when a work is done or never will be; it may not wait."""
        self.monitor.when_over(work, call)

    def check_not_driving(self) -> None:
        """Raise UsageError for a call out of the middle of another one of the same thread.

        It would wait for what only the call that it interrupts can bring about.
        """
        if self.monitor.driver == threading.get_ident():
            raise UsageError(
                "this call comes in the middle of another one of the same thread, as out of a signal handler: let the"
                " handler set a flag, and look at it between two steps"
            )

    @property
    def doing(self) -> str:
        """What is under way, in few words."""
        reducing = [one.label for one in list(self._reducing.values()) if one.label]
        labels = [*dict.fromkeys([*self._exchange.labels, *reducing])]
        return _first_of(labels) if labels else "no exchange"

    def allow(self, limit_s: float) -> None:
        """Something may stand still for so long from now on, where that is longer than the limit of progress."""
        self.motion.allow(limit_s)

    def abandon(self, works: Iterable[Work]) -> None:
        """Nobody needs these any more: the end does not wait for them, and they do not mind peers that leave."""
        self.monitor.abandon(works)

    @property
    def room(self) -> Room:
        """Buffers for reducers; for the thread that drives."""
        return self._exchange.scratch

    def fail(self, error: Exception) -> None:
        """A fault found elsewhere: whoever waits here gets it. The first one stays."""
        self.monitor.fail(error)

    def interrupted(self, error: BaseException) -> None:
        """Something was left in the middle: from now on every call raises that, here, and the others are told.

        After a fault nobody is: it is known already whose it was.
        """
        name = type(error).__name__
        fault: Exception = ClosedError(f"an exchange was interrupted by {name}: this session cannot go on")
        try:
            if self.monitor.fail_first():
                with contextlib.suppress(Exception):  # an explanation that fails must not hide the interrupt
                    fault = self._explain(fault)
        finally:  # nor may another interrupt
            self.monitor.explain(fault)

    def close(self, before_end: Callable[[], None] = lambda: None) -> Exception | None:
        """Finish what is under way unless there was a fault, end the thread and close the transport; the fault.

        ``before_end`` is called while the connections still stand.
        """
        if self.error is None:
            self.monitor.flush(_FLUSH_S)
        try:
            before_end()
        finally:
            self.monitor.end()
        self._thread.join(_FLUSH_S)
        fault = self.error
        self.fail(ClosedError("this session has been shut down"))
        return fault

    def answer(self) -> Answer:
        """What this process says of itself to one that asks for whom it waits; asked from any thread."""
        answer = self.motion.answer(looking=bool(self.monitor.driver) or self.monitor.busy)
        if self.monitor.driver:  # after the answer: it may have seen just before that nobody asked, and sleep
            self.transport.wake()
        return answer

    # For what is handed over.

    def _post(self, task: Callable[[], None], tolerant: bool = False) -> None:
        if self.monitor.error is not None:
            raise self._raised(self.monitor.error)
        self.monitor.hand_in(task, tolerant)

    def finish(self, work: Work, lane: Lane | None = None, after: Callable[[], None] | None = None) -> None:
        """Call ``after``; then a work is done. In the thread that drives."""
        if after is not None:
            after()
        if work.span is not None:
            work.span.end()
        self.monitor.finish(work)
        if work.callbacks:
            work.call_back()
        if lane is not None:
            lane.leave(work.priority)

    def check_error(self) -> None:
        """Raise the engine's fault, if there is one."""
        if self.monitor.error is not None:
            raise self._raised(self.monitor.error)

    def unfinished(self, work: Work, timeout: float | None) -> Exception:
        """What is raised in place of a work's end: the engine's fault, or that the time is over."""
        if self.error is not None:
            return self._raised(self.error)
        assert timeout is not None  # without a limit a wait ends with the work or a fault
        return PeerTimeout(f"{work.label}: not done {within(timeout)}", rank=-1)

    def _raised(self, error: Exception) -> Exception:
        """The fault is about to reach the user's thread."""
        self._on_raise()
        return error

    def left(self, error: BaseException) -> None:
        """A call ends in the middle. Its thread drives no longer, wherever that was: another one ends what is left."""
        try:
            self.interrupted(error)
        finally:
            if self.monitor.driver == threading.get_ident():
                self.monitor.hand_over()

    def _drive_here(
        self, works: Collection[Work], deadline: float | None, first: Callable[[], None] | None = None
    ) -> bool:
        """Drive in this thread until all works are done or the time is over; False, at once, where another one does.

        ``first`` begins one more work, which nothing that was handed over before may stand behind.
        """
        if not self.monitor.claim(first is not None, 0 if first is None else 1):
            return False
        self.drive(works, deadline, first, SPINS_HERE)
        self.monitor.hand_over()
        return True

    # Driving: in the progress thread, or in one that waits.

    def _progress(self) -> None:
        """The progress thread: drive whenever there is something to do and nobody does it."""
        while self.monitor.take_turn():
            self.drive(None)
            self.monitor.hand_over()
        with contextlib.suppress(Exception):
            self._drain()
        self.transport.close()

    def drive(
        self,
        works: Collection[Work] | None,
        deadline: float | None = None,
        first: Callable[[], None] | None = None,
        spins: int = SPINS,
    ) -> None:
        """Turn the exchange until all ``works`` are done, unless they are None, or the time is over.

        Ends too where nothing is left to do, and with a fault, which is kept.
        """
        monitor, motion, exchange = self.monitor, self.motion, self._exchange
        endless, late, left_s = works is None, list(works or ()), math.inf
        motion.stall = None
        try:
            if first is not None:
                first()
            while not monitor.ending:
                if monitor.inbox:
                    monitor.take_up()
                    motion.moves, motion.stall = motion.moves + 1, None
                if deadline is not None:
                    left_s = deadline - time.perf_counter()
                while late and late[-1].done:
                    late.pop()
                if left_s <= 0.0 or not (late or endless):
                    if not self.transport.idle:  # a last chance for acknowledgements; the rest is another's to drive
                        exchange.progress(0.0)
                    return
                if not (monitor.under_way or monitor.busy):
                    return
                patience_s = min((motion.stall or motion).patience_s, left_s)
                if motion.looks < motion.owed or (self._reducing and self._open_another()):
                    patience_s = 0.0  # who has asked wants to know soon that it was looked since
                if exchange.progress(patience_s, spins) or motion.crept():
                    motion.moves, motion.stall = motion.moves + 1, None
                else:
                    motion.looked_in_vain(needed=monitor.under_way > 0)
        except Exception as error:
            # Nonsense from a peer belongs to no message of ours: say at least what it came into.
            shown = labelled(f"during {self.doing}", error) if isinstance(error, ProtocolError) else error
            with contextlib.suppress(Exception):  # an explanation that fails must not hide the fault
                shown = self._explain(shown)
            self.fail(shown)

    def _open_another(self) -> bool:
        """Let one reducer more begin, of the most urgent bucket that has one."""
        return any(one.open_another() for one in sorted(self._reducing.values(), key=Reducing.urgency))

    def _drain(self) -> None:
        """The last acknowledgements have to reach the kernel, or a peer would wait for them."""
        deadline = time.monotonic() + _DRAIN_S
        while not self.monitor.failed and time.monotonic() < deadline:
            self._exchange.progress(0.0 if self.transport.idle else _DRAIN_POLL_S)
            if self.transport.idle:
                return


def _first_of(labels: Sequence[str]) -> str:
    """What is under way, in few words, however much it is."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else "".join(labels)
