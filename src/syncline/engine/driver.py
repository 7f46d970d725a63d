"""Who drives what is under way in one process, and how others wait for it.

One thread at a time *drives*: it owns the transport, turns the exchange and calls back. That is the progress thread
while there is work that nobody waits for; a thread that would have to wait anyway drives itself when nobody else does,
which saves two hand-overs between threads. The time that threads spend blocked here is counted, each by itself: it is
the exposed communication.

A fault while driving reaches every thread that waits, now or later, as the same exception. So does an interrupt
(Ctrl-C, an exception out of a signal handler) in a thread that drives or waits: a script that catches it and goes on
would do so with a step missing, so every later call raises what happened. Each wait has a time limit, and so has the
progress of the whole: when nothing moves for ``limit_s`` although something is under way, that is a fault that names
who is to blame (``stall``): not always whom it waits for itself.

Does not know what is handed over: that is the ``engine``'s.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ..compression.reducers import Room
from ..errors import ClosedError, PeerTimeout, ProtocolError, UsageError
from ..transports import Transport
from ..wire.culprit import ANEW, Answer, Found, Waits
from .blocked import Blocked
from .messages import SPINS, Exchange, labelled
from .reducing import Reducing
from .stall import LOOKS, Stall
from .trace import Observer, begin
from .work import Lane, Work

LIMIT_S = 30 * 60.0
"""Default limit for progress."""

_POLL_S = 1.0
SPINS_HERE = 200
"""How often a thread that waits anyway looks again before it sleeps; its core is offered to others in between."""
LOOK_ONLY = -1
"""For a thread that does not wait: looking again for a moment, without offering its core."""
_FLUSH_S = 10.0
_UNTIL_S = 0.1
_DRAIN_S = 2.0
_DRAIN_POLL_S = 0.01


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
        self._blocked = Blocked()
        self.error: Exception | None = None
        self._observer = observer
        self._exchange = exchange
        self._reducing: dict[int, Reducing] = {}  # by key
        self._on_raise, self._explain, self._find_culprit = on_raise, explain, find_culprit
        self._limit_s = limit_s
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # something is done: for those who wait for it
        self._wanted = threading.Condition(lock)  # something is to be done: for the progress thread
        self._inbox: deque[Callable[[], None]] = deque()
        self._told: dict[Work, Callable[[], None]] = {}  # who is told that a work is over
        self._under_way = 0  # works that the end waits for
        self._tolerated = 0  # works that nobody waits for
        self._driver = 0  # the thread that drives
        self._moves = self._looks = 0  # how often something has moved, and how often nothing had
        self._traffic = 0  # bytes sent and received, when nothing had moved last
        self._shown = -ANEW  # how often nothing had when that was asked last
        self._closing = False
        self._thread = threading.Thread(target=self._progress, name="syncline-progress", daemon=True)
        self._thread.start()

    @abstractmethod
    def waits(self) -> Waits:
        """For whom something under way waits, and what that is; may be asked from another thread.

        What nobody minds if it never ends waits as soon as somebody has come to it.
        """

    @property
    def observer(self) -> Observer | None:
        """Who is told all that begins and ends here, if anybody is."""
        return self._observer

    # For the threads that wait.

    @property
    def blocked_s(self) -> float:
        """Seconds for which threads have been blocked here, added up."""
        return self._blocked.seconds

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes sent to each process, and received, with all headers."""
        return self.transport.traffic()

    def uncounted(self) -> contextlib.AbstractContextManager[None]:
        """What this thread waits for inside is no communication of the training."""
        return self._blocked.uncounted()

    def wait(self, *works: Work, timeout: float | None = None) -> None:
        """Block until all are done; raises the engine's fault, or PeerTimeout after ``timeout`` seconds."""
        if self.error is None and all(work.done for work in works):
            return
        self.check_not_driving()
        begun = time.perf_counter()
        blocked = None
        if self._observer is not None:
            blocked = begin(self._observer, "wait", _first_of([work.label for work in works if not work.done]))
        deadline = None if timeout is None else begun + timeout
        try:
            came = self._drive_here(works, deadline) and all(work.done for work in works)
            came = came or self._await(works, deadline)
        except BaseException as error:
            self._left(error)
            raise
        finally:
            self._blocked.count(begun)
            if blocked is not None:
                blocked.end()
        self.check_error()
        if not came:
            late = next(work for work in works if not work.done)
            raise PeerTimeout(f"{late.label}: not done within {timeout:.1f} s", rank=-1)

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Block until one of the works is done or ``until()`` holds (looked at often); raises the engine's fault."""
        blocked = None
        if self._observer is not None:
            blocked = begin(self._observer, "wait", _first_of([work.label for work in works]))
        try:
            with self._changed:
                while not (self.error or until() or any(work.done for work in works)):
                    self._changed.wait(_UNTIL_S)
        except BaseException as error:
            self._left(error)
            raise
        finally:
            if blocked is not None:
                blocked.end()
        if self.error is not None and not until():
            raise self._raised(self.error)

    def when_over(self, work: Work, call: Callable[[], None]) -> None:
        """Call, at once or from whichever thread ends it, when a work is done or never will be; it may not wait."""
        with self._changed:
            if not (work.done or self.error):
                self._told[work] = call
                return
        call()

    def check_not_driving(self) -> None:
        """Raise UsageError for a call out of the middle of another one of the same thread.

        It would wait for what only the call that it interrupts can bring about.
        """
        if self._driver == threading.get_ident():
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
        self._limit_s = max(self._limit_s, limit_s)

    def abandon(self, works: Iterable[Work]) -> None:
        """Nobody needs these any more: the end does not wait for them, and they do not mind peers that leave."""
        with self._changed:
            for work in works:
                if not (work.done or work.tolerant):
                    work.tolerant = True
                    self._under_way -= 1
                    self._tolerated += 1
            self._changed.notify_all()

    @property
    def room(self) -> Room:
        """Buffers for reducers; for the thread that drives."""
        return self._exchange.scratch

    def fail(self, error: Exception) -> None:
        """A fault found elsewhere: whoever waits here gets it. The first one stays."""
        with self._changed:
            if self.error is None:
                self.error = error
            told, self._told = self._told, {}
            self._changed.notify_all()
            self._wanted.notify()
        self.transport.wake()  # whoever drives looks at it
        for call in told.values():
            with contextlib.suppress(Exception):  # the first fault stays, and the others have to be told
                call()

    def interrupted(self, error: BaseException) -> None:
        """Something was left in the middle: from now on every call raises that, here, and the others are told.

        After a fault nobody is: it is known already whose it was.
        """
        name = type(error).__name__
        fault: Exception = ClosedError(f"an exchange was interrupted by {name}: this session cannot go on")
        with self._changed:
            if self.error is not None:
                return
            self.error = fault
        with contextlib.suppress(Exception):  # an explanation that fails must not hide the interrupt
            self.error = self._explain(fault)
        self.fail(fault)

    def close(self, before_end: Callable[[], None] = lambda: None) -> Exception | None:
        """Finish what is under way unless there was a fault, end the thread and close the transport; the fault.

        ``before_end`` is called while the connections still stand.
        """
        if self.error is None:
            with self._changed:
                self._wanted.notify()
                self._changed.wait_for(lambda: self.error or not (self._under_way or self._inbox), _FLUSH_S)
        try:
            before_end()
        finally:
            with self._changed:
                self._closing = True
                self._wanted.notify()
        self.transport.wake()
        self._thread.join(_FLUSH_S)
        fault = self.error
        self.fail(ClosedError("this session has been shut down"))
        return fault

    def answer(self) -> Answer:
        """What this process says of itself to one that asks for whom it waits; asked from any thread."""
        moves, looks = self._moves, self._looks if self._driver or self._busy else -1
        answer = Answer(self.waits(), moves, looks)
        self._shown = looks
        if self._driver:
            self.transport.wake()
        return answer

    # For what is handed over.

    def _post(self, task: Callable[[], None], tolerant: bool = False, announce: bool = True) -> None:
        self.check_error()
        with self._changed:
            if tolerant:
                self._tolerated += 1
            else:
                self._under_way += 1
            self._inbox.append(task)
            if self._driver:
                self.transport.wake()
            elif announce:
                self._wanted.notify()

    def _finish(self, work: Work, lane: Lane | None) -> None:
        if work.span is not None:
            work.span.end()
        with self._changed:
            work.done = True
            if work.tolerant:
                self._tolerated -= 1
            else:
                self._under_way -= 1
            told = self._told.pop(work, None)
            self._changed.notify_all()
        if told is not None:
            told()
        work.call_back()
        if lane is not None:
            lane.leave(work.priority)

    def check_error(self) -> None:
        """Raise the engine's fault, if there is one."""
        if self.error is not None:
            raise self._raised(self.error)

    def _raised(self, error: Exception) -> Exception:
        """The fault is about to reach the user's thread."""
        self._on_raise()
        return error

    def _left(self, error: BaseException) -> None:
        """A call ends in the middle. Its thread drives no longer, wherever that was: another one ends what is left."""
        try:
            self.interrupted(error)
        finally:
            if self._driver == threading.get_ident():
                self._hand_over()

    def _await(self, works: Collection[Work], deadline: float | None) -> bool:
        """Wait for another thread to get the works done; False when the time is over first."""
        left = None if deadline is None else max(0.0, deadline - time.perf_counter())
        with self._changed:
            return bool(self._changed.wait_for(lambda: self.error or all(work.done for work in works), left))

    def _drive_here(
        self, works: Collection[Work], deadline: float | None, first: Callable[[], None] | None = None
    ) -> bool:
        """Drive in this thread until all works are done or the time is over; False, at once, where another one does.

        ``first`` begins one more work, which nothing that was handed over before may stand behind.
        """

        def enough() -> bool:
            return all(work.done for work in works) or (deadline is not None and time.perf_counter() >= deadline)

        with self._changed:
            if self._driver or self._ending or (first is not None and self._inbox):
                return False
            self._driver = threading.get_ident()
            self._under_way += first is not None
        self._drive(enough, deadline, first, SPINS_HERE)
        self._hand_over()
        return True

    def _claim(self) -> bool:
        """Drive from now on until ``_hand_over``, where nobody does, and nothing that was handed over stands before."""
        with self._changed:
            if self._driver or self._ending or self._inbox:
                return False
            self._driver = threading.get_ident()
            return True

    # Driving: in the progress thread, or in one that waits.

    def _progress(self) -> None:
        """The progress thread: drive whenever there is something to do and nobody does it."""
        while True:
            with self._changed:
                self._wanted.wait_for(lambda: not self._driver and (self._ending or self._busy))
                if self._ending:
                    break
                self._driver = threading.get_ident()
            self._drive(lambda: False)
            self._hand_over()
        with contextlib.suppress(Exception):
            self._drain()
        self.transport.close()

    @property
    def _ending(self) -> bool:
        return self._closing or self.error is not None

    @property
    def _busy(self) -> bool:
        return bool(self._inbox or self._under_way or self._tolerated) or not self.transport.idle

    def _hand_over(self) -> None:
        with self._changed:
            self._driver = 0
            if self._busy or self._ending:
                self._wanted.notify()

    def _drive(
        self,
        enough: Callable[[], bool],
        deadline: float | None = None,
        first: Callable[[], None] | None = None,
        spins: int = SPINS,
    ) -> None:
        """Turn the exchange until ``enough()``, until there is nothing left to do, or until a fault, which is kept."""
        look_s = min(_POLL_S, self._limit_s / LOOKS)
        stall: Stall | None = None
        try:
            if first is not None:
                first()
            while not self._ending:
                if self._inbox:
                    self._take_tasks()
                    self._moves += 1
                    stall = None
                if not self._busy:
                    return
                if enough():
                    if not self.transport.idle:  # a last chance for acknowledgements; the rest is another's to drive
                        self._exchange.progress(0.0)
                    return
                left = look_s if stall is None else stall.patience_s
                if deadline is not None:
                    left = min(left, max(0.0, deadline - time.perf_counter()))
                if self._looks < self._shown + ANEW or (self._reducing and self._open_another()):
                    left = 0.0  # who has asked wants to know soon that it was looked since
                if self._exchange.progress(left, spins) or self._crept():
                    self._moves += 1
                    stall = None
                else:
                    self._looks += 1
                    stall = self._look_on(stall, look_s)
        except Exception as error:
            # Nonsense from a peer belongs to no message of ours: say at least what it came into.
            shown = labelled(f"during {self.doing}", error) if isinstance(error, ProtocolError) else error
            with contextlib.suppress(Exception):  # an explanation that fails must not hide the fault
                shown = self._explain(shown)
            self.fail(shown)

    def _crept(self) -> bool:
        """Whether bytes have moved since this was asked last: of a message that is longer under way than any look."""
        before, self._traffic = self._traffic, sum(sum(each.values()) for each in self.transport.traffic())
        return before != self._traffic

    def _look_on(self, stall: Stall | None, look_s: float) -> Stall | None:
        """Nothing has moved; what is known of that so far. Raises PeerTimeout once it is certain who is to blame."""
        if not self._under_way:
            return None
        if stall is None:
            return Stall(self._limit_s, look_s, time.monotonic)
        found = stall.look(lambda: self._find_culprit(self.waits()))
        if found is None:
            return stall
        peers = ", ".join(f"rank {peer} ({label})" for peer, label in sorted(self.waits().items())) or "a message"
        text = f"nothing has moved for {stall.lasted_s:.1f} s, waiting for {peers}"
        if found.culprit is None:
            raise PeerTimeout(text, rank=-1)
        raise PeerTimeout(f"{text}; rank {found.culprit.rank} {found.culprit.why}", rank=found.culprit.rank)

    def _open_another(self) -> bool:
        """Let one reducer more begin, of the most urgent bucket that has one."""
        return any(one.open_another() for one in sorted(self._reducing.values(), key=Reducing.urgency))

    def _take_tasks(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        with self._changed:  # the end waits for this; a tolerant work gives no other sign
            self._changed.notify_all()

    def _drain(self) -> None:
        """The last acknowledgements have to reach the kernel, or a peer would wait for them."""
        deadline = time.monotonic() + _DRAIN_S
        while self.error is None and time.monotonic() < deadline:
            self._exchange.progress(0.0 if self.transport.idle else _DRAIN_POLL_S)
            if self.transport.idle:
                return


def _first_of(labels: Sequence[str]) -> str:
    """What is under way, in few words, however much it is."""
    return f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else "".join(labels)
