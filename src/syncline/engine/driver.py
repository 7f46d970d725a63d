"""Drives the exchanges of one process and lets other threads wait for them.

One thread at a time *drives*: it owns the transport, calls ``progress`` of the exchange and runs all callbacks. Usually
this is the progress thread. A thread that has to wait drives itself if no other thread does, which saves two context
switches. ``order.Monitor`` holds the state that threads share. The time that threads spend blocked here is the exposed
communication; it is counted per thread.

A fault while driving is raised as the same exception in every thread that waits, now or later. An interrupt (Ctrl-C, or
an exception from a signal handler) in a thread that drives or waits has the same effect: a script that caught it would
continue with an incomplete step. Every wait has a time limit, and so has a stall of the whole exchange (``watchdog``).

Subclasses decide what is exchanged (``engine``).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from ..errors import ClosedError, PeerLeft, PeerLost, PeerTimeout, ProtocolError, UsageError, labelled, within
from ..transports import Transport
from ..wire.culprit import Answer, Found, Waits
from ..wire.reports import needed
from ..wire.scratch import Scratch
from .exchange import SPINS, Exchange
from .flight import Flight
from .order import Lane, Monitor, Work
from .reducing import Reducing
from .trace import Observer, begin
from .watchdog import Watchdog

LIMIT_S = 30 * 60.0
"""The default time limit for a stall."""

SPINS_HERE = 200
"""How often a waiting thread polls before it sleeps. It yields its core between two polls."""
_FLUSH_S = 10.0
_DRAIN_S = 2.0
_DRAIN_POLL_S = 0.01


class Blocked:
    """The seconds for which threads were blocked, except where they have asked not to be counted.

    ``within``, if given, counts the same seconds too.
    """

    def __init__(self, within: Blocked | None = None) -> None:
        self._within = within
        self._seconds: dict[int, float] = {}  # by thread
        self._uncounted: set[int] = set()

    @property
    def seconds(self) -> float:
        """The sum over all threads."""
        return sum(list(self._seconds.values()))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count this thread's waits inside the block as communication."""
        thread = threading.get_ident()
        self._uncounted.add(thread)
        try:
            with contextlib.nullcontext() if self._within is None else self._within.uncounted():
                yield
        finally:
            self._uncounted.discard(thread)

    def count(self, begun: float) -> float:
        """Count this thread as blocked since ``begun`` (``time.perf_counter``), until now; returns the time."""
        thread, now = threading.get_ident(), time.perf_counter()
        if thread not in self._uncounted:
            self._seconds[thread] = self._seconds.get(thread, 0.0) + now - begun
        if self._within is not None:
            self._within.count(begun)
        return now


class Driver(ABC):
    """Drives an exchange over a transport. ``error`` is its first fault.

    ``explain`` turns a fault into the exception for the user. ``on_raise`` is called just before a user's thread gets
    it. ``find_culprit`` finds the rank at fault in a stall. ``flight`` keeps the last operations and waits.
    The progress thread starts in the constructor.
    """

    def __init__(
        self,
        exchange: Exchange,
        limit_s: float,
        explain: Callable[[Exception], Exception],
        on_raise: Callable[[], None],
        find_culprit: Callable[[Waits], Found],
        observer: Observer | None,
        flight: Flight | None,
    ) -> None:
        self.transport: Transport = exchange.transport
        self.blocked = Blocked()
        self._observer, self.flight = observer, flight
        self._exchange = exchange
        self._reducing: dict[int, Reducing] = {}  # by key
        self._on_raise, self._explain = on_raise, explain
        self.monitor = Monitor(self.transport)
        self.watchdog = Watchdog(limit_s, self.waits, find_culprit, lambda: self.transport.moved_bytes)
        self._thread = threading.Thread(target=self._progress, name="syncline-progress", daemon=True)
        self._thread.start()

    @abstractmethod
    def waits(self) -> Waits:
        """The processes that this one waits for, each with the label of the waiting work. Callable from any thread.

        Tolerant work waits only once a peer has joined it.
        """

    @property
    def error(self) -> Exception | None:
        """The first fault."""
        return self.monitor.error

    @property
    def observer(self) -> Observer | None:
        """The observer, if there is one."""
        return self._observer

    # For the threads that wait.

    @property
    def blocked_s(self) -> float:
        """The seconds for which threads have been blocked here, summed over threads."""
        return self.blocked.seconds

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes sent to and received from each process, headers included."""
        return self.transport.traffic()

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """Do not count this thread's waits inside the block as communication."""
        return self.blocked.uncounted()

    def wait(self, *works: Work, timeout: float | None = None) -> None:
        """Block until all works are done. Raises the engine's fault, or PeerTimeout after ``timeout`` seconds."""
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
        if self.flight is not None:
            self.flight.blocked(begun)
        deadline = None if timeout is None else begun + timeout
        try:
            self._drive_here(works, deadline)
            for work in works:
                if not work.done:  # another thread drives, or the time is over
                    came = monitor.wait(works, deadline)
                    break
        except BaseException as error:
            self.left(error)
            raise
        finally:
            self.blocked.count(begun)
            if self.flight is not None:
                self.flight.blocked(0.0)
            if blocked is not None:
                blocked.end()
        if monitor.error is not None:
            raise self._raised(monitor.error)
        if not came and (late := next((work for work in works if not work.done), None)) is not None:
            raise self.unfinished(late, timeout)

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Block until one work is done or ``until()`` holds (polled). Raises the engine's fault."""
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
        """Whether ``until()`` holds. Raises the engine's fault, except a departed peer's if the condition holds.

        ``close`` still returns such a fault.
        """
        holds, error = until(), self.error
        if error is None:
            return holds
        # the departed peer may have fulfilled the condition just before
        if isinstance(error, PeerLost | PeerLeft) and (holds or until()):
            return True
        raise self._raised(error)

    def when_over(self, work: Work, call: Callable[[], None]) -> None:
        """Call once ``work`` is done or has failed: now, or later from another thread. The call must not block."""
        self.monitor.when_over(work, call)

    def check_not_driving(self) -> None:
        """Raise UsageError for a call from inside another call of the same thread.

        Such a call would deadlock: it waits for progress that only the interrupted call can make.
        """
        if self.monitor.driver == threading.get_ident():
            raise UsageError(
                "this call comes in the middle of another call of the same thread, for example from a signal handler:"
                " let the handler set a flag, and check the flag between two steps"
            )

    @property
    def doing(self) -> str:
        """A short description of the exchanges in flight."""
        reducing = [one.label for one in list(self._reducing.values()) if one.label]
        labels = [*dict.fromkeys([*self._exchange.labels, *reducing])]
        return _first_of(labels) if labels else "no exchange"

    def allow(self, limit_s: float) -> None:
        """Raise the time limit for stalls to at least ``limit_s`` seconds."""
        self.watchdog.allow(limit_s)

    def abandon(self, works: Iterable[Work]) -> None:
        """Make works tolerant: ``close`` does not wait for them, and departing peers are no fault for them."""
        self.monitor.abandon(works)

    @property
    def room(self) -> Scratch:
        """The pool of buffers for reducers; only for the driving thread."""
        return self._exchange.scratch

    def fail(self, error: Exception) -> None:
        """Report a fault from elsewhere to all threads that wait here. Only the first fault counts."""
        self.monitor.fail(error)

    def interrupted(self, error: BaseException) -> None:
        """Fail because a call was left half-done; all later calls here raise, and the peers are informed.

        After an earlier fault the peers are not informed again, because they already know its cause.
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
        """Finish all work unless there was a fault, end the progress thread and close the transport. Returns the fault.

        ``before_end`` is called while the connections are still open.
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
        """This process's answer to a peer that searches for the cause of a stall. Callable from any thread."""
        answer = self.watchdog.answer(looking=bool(self.monitor.driver) or self.monitor.busy)
        # after the answer: the driver may have just polled, before ``awaited_looks`` was set, and be asleep
        if self.monitor.driver:
            self.transport.wake()
        return answer

    # For submitted work.

    def _post(self, task: Callable[[], None], tolerant: bool = False) -> None:
        if self.monitor.error is not None:
            raise self._raised(self.monitor.error)
        self.monitor.hand_in(task, tolerant)

    def finish(self, work: Work, lane: Lane | None = None, after: Callable[[], None] | None = None) -> None:
        """Call ``after``, then mark a work as done. Only in the driving thread."""
        if after is not None:
            after()
        if work.row and self.flight is not None:
            self.flight.end(work.row)
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
        """The exception for a work that is not done: the engine's fault, or a timeout."""
        if self.error is not None:
            return self._raised(self.error)
        assert timeout is not None  # without a limit, a wait ends only with the work or a fault
        return PeerTimeout(f"{work.label}: not done {within(timeout)}", rank=-1)

    def _raised(self, error: Exception) -> Exception:
        """Announce that a user's thread is about to get the fault."""
        self._on_raise()
        return error

    def left(self, error: BaseException) -> None:
        """Fail because a call ended early. Its thread gives up driving, so that another thread can finish."""
        try:
            self.interrupted(error)
        finally:
            if self.monitor.driver == threading.get_ident():
                self.monitor.hand_over()

    def _drive_here(
        self, works: Collection[Work], deadline: float | None, first: Callable[[], None] | None = None
    ) -> bool:
        """Drive in this thread until all works are done or the time is over. False, at once, if another thread drives.

        ``first`` starts one more work. It is refused if earlier work is still queued, which would have to go first.
        """
        if not self.monitor.claim(first is not None, 0 if first is None else 1):
            return False
        self.drive(works, deadline, first, SPINS_HERE)
        self.monitor.hand_over()
        return True

    # Driving: in the progress thread, or in one that waits.

    @needed
    def _progress(self) -> None:
        """The progress thread: drive whenever there is work and no other thread drives."""
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
        """Make progress until all ``works`` are done (forever if None), or the time is over.

        Returns early when no work is left, and after a fault, which it records.
        """
        monitor, watchdog, exchange = self.monitor, self.watchdog, self._exchange
        endless, late, left_s = works is None, list(works or ()), math.inf
        watchdog.stall = None
        try:
            if first is not None:
                first()
            while not monitor.ending:
                if monitor.inbox:
                    monitor.take_up()
                    watchdog.moves, watchdog.stall = watchdog.moves + 1, None
                if deadline is not None:
                    left_s = deadline - time.perf_counter()
                # Only the last work is tested and then popped, which makes a turn cheap however many works there are.
                while late and late[-1].done:
                    late.pop()
                if left_s <= 0.0 or not (late or endless):
                    if not self.transport.idle:  # a last chance for acknowledgements; another thread drives the rest
                        exchange.progress(0.0)
                    return
                if not (monitor.under_way or monitor.busy):
                    return
                patience_s = min((watchdog.stall or watchdog).patience_s, left_s)
                by_urgency = sorted(self._reducing.values(), key=Reducing.urgency) if self._reducing else ()
                if watchdog.looks < watchdog.awaited_looks or any(one.open_another() for one in by_urgency):
                    # a peer waits for this process to poll again, or a reducer can compute meanwhile: do not sleep
                    patience_s = 0.0
                if exchange.progress(patience_s, spins) or watchdog.bytes_moved():
                    watchdog.moves, watchdog.stall = watchdog.moves + 1, None
                else:
                    watchdog.found_nothing(needed=monitor.under_way > 0)
        except Exception as error:
            # A malformed message belongs to none of our own: name at least the exchanges in flight.
            shown = labelled(f"during {self.doing}", error) if isinstance(error, ProtocolError) else error
            with contextlib.suppress(Exception):  # an explanation that fails must not hide the fault
                shown = self._explain(shown)
            self.fail(shown)

    def _drain(self) -> None:
        """Hand the last acknowledgements to the kernel: peers wait for them."""
        deadline = time.monotonic() + _DRAIN_S
        while not self.monitor.failed and time.monotonic() < deadline:
            self._exchange.progress(0.0 if self.transport.idle else _DRAIN_POLL_S)
            if self.transport.idle:
                return


def _first_of(labels: Sequence[str]) -> str:
    """The first label and the number of others."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else "".join(labels)
