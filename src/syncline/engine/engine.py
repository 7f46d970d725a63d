"""Everything of one process that is under way in the background of training.

The training thread hands over work (a bucket to exchange, a message to send) and later waits for it. Who drives it
meanwhile is in ``driver``; what a work is, and in which order works start, in ``work``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..compression.reducers import Reducer
from ..errors import PeerTimeout, SynclineError
from ..plans.messages import Program
from ..transports import Bytes, Handle, Transport
from ..wire.culprit import Found, Waits, find_culprit
from .driver import LIMIT_S, LOOK_ONLY, SPINS_HERE, Driver
from .loopback import Loopback
from .messages import Exchange, labelled
from .reducing import Reducing
from .runs import Array, Run, Sign
from .scripts import ScriptedRun
from .trace import Observer, Span, begin
from .work import Lane, Work


class Kept(NamedTuple):
    """What is prepared for many runs of a plan over arrays of one size and type."""

    program: Program
    run: ScriptedRun


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
        self._loopback = Loopback()
        self._has_left = has_left
        self.expects: Callable[[], Waits] = dict
        self._messages: dict[Work, int] = {}  # single ones under way -> from or to whom
        exchange = Exchange(
            transport, has_left=has_left, observer=observer, handed_over=lambda: bool(self._monitor.inbox)
        )
        super().__init__(exchange, limit_s, explain, on_raise, find_culprit, observer)

    def exchange(
        self,
        program: Program | Collective | Callable[[], Program],
        array: Array,
        key: int,
        label: str,
        *,
        lane: Lane | None = None,
        gate: Work | None = None,
        before: Callable[[], None] | None = None,
        priority: float = 0.0,
        tolerant: bool = False,
        announce: bool = True,
        sign: Sign | None = None,
        after: Callable[[], None] | None = None,
    ) -> Work:
        """Run a plan, or a library's collective, over ``array``; it starts when ``gate`` is done, after ``before``.

        The smallest ``priority`` goes first, in whatever is under way (``work``); ranks need not agree on it.
        A program that depends on the gate's result is given as a function. A ``tolerant`` work does not mind peers
        that leave, and nobody waits for it at the end. Whoever calls ``wait`` at once need not ``announce`` it to the
        progress thread. A ``sign`` is shown where ``shows`` says so. ``after`` is called when all is exchanged, before
        the work is done.
        """
        work = self._work(label, tolerant, key, priority)

        def start() -> None:
            chosen = program() if callable(program) else program
            self._start(chosen, array, key, work, lane, sign, after)

        self._enter(work, start, lane, gate, before, announce)
        return work

    def reduce(
        self,
        pieces: Callable[[], Sequence[Callable[[], Reducer]]],
        program: Callable[[int], Program | Collective],
        key: int,
        label: str,
        *,
        lane: Lane | None = None,
        gate: Work | None = None,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] = lambda: None,
        priority: float = 0.0,
        tolerant: bool = False,
    ) -> Work:
        """Drive the reducers of a bucket; sums in it run ``program`` of their bytes. Otherwise as ``exchange``.

        ``after`` is called, in the thread that drives, when all are done.
        """
        work = self._work(label, tolerant, key, priority)

        def finished() -> None:
            self._reducing.pop(key, None)
            after()
            self._finish(work, lane)

        def start() -> None:
            self._reducing[key] = Reducing(
                self._exchange,
                pieces(),
                program,
                key,
                label,
                priority=priority,
                on_done=finished,
                tolerant=tolerant,
                has_left=self._has_left,
                observer=self._observer,
                within=work.span,
            )
            self._reducing[key].start()

        self._enter(work, start, lane, gate, before)
        return work

    def shows(self, program: Program | Collective, array: Array) -> bool:
        """Whether ranks see each other's signs of such a run; the same on all ranks."""
        return isinstance(program, Program) and self._exchange.shows(program.plan, array)

    def absent(self, key: int, processes: Iterable[int]) -> set[int]:
        """Those who have not come to a run under way that shows signs; whom anything waits for where all have."""
        return self._exchange.absent(key, processes) or self.awaited

    def run(
        self,
        program: Program | Collective,
        array: Array,
        key: int,
        label: str,
        sign: Sign | None = None,
        timeout: float | None = None,
    ) -> None:
        """Run a plan over ``array`` and return when it is done: ``exchange`` and ``wait`` with less in between.

        Raises PeerTimeout after ``timeout`` seconds; the run is still under way then.
        """
        self.check_not_driving()
        work, begun = Work(label), time.perf_counter()
        blocked = None if self._observer is None else begin(self._observer, "wait", label)

        def start() -> None:
            if self._observer is not None:
                work.span = begin(self._observer, "work", label, key=key)
            self._start(program, array, key, work, None, sign)

        deadline = None if timeout is None else begun + timeout
        try:
            if not self._drive_here((work,), deadline, start):
                work = self.exchange(program, array, key, label, announce=False, sign=sign)
                self._drive_here((work,), deadline)  # whoever drove may have stopped before it was handed over
            if not work.done:  # another one drives, or the end came first and with it a fault
                self._monitor.wait((work,), deadline)
        except BaseException as error:
            self._left(error)
            raise
        finally:
            self._blocked.count(begun)
            if blocked is not None:
                blocked.end()
        if self.error is not None:
            raise self._raised(self.error)
        if not work.done:
            raise PeerTimeout(f"{label}: not done within {timeout:.1f} s", rank=-1)

    def keep(self, program: Program, dtype: np.dtype[Any], size: int) -> Kept | None:
        """Prepare for many runs of a plan over arrays of one size and type, which shows its sign: for ``run_kept``."""
        if self._observer is not None or not self._monitor.claim(first=True):
            return None
        try:
            return Kept(program, self._exchange.keep(program.plan, dtype, size))
        finally:
            self._monitor.hand_over()

    def drop(self, kept: Kept, after: Work | None = None) -> None:
        """What was prepared is not needed any more, once the last work of it is done."""
        self.then("drop", [] if after is None else [after], partial(self._exchange.drop, kept.run), tolerant=True)

    def run_kept(self, kept: Kept, address: int, key: int, label: str, sign: Sign, timeout: float) -> bool:
        """As ``run`` over the array at ``address``, with still less in between; False where that has to be used.

        That is where another thread drives, or something else is under way.
        """
        if not self._monitor.claim(first=True):
            return False
        begun, work = time.perf_counter(), Work(label)
        try:
            code = self._exchange.prompt(kept.run, address, key, sign, SPINS_HERE)
            work.done = code == 0
            if code:
                self._take_up(kept, work, key, sign, None)
                deadline = begun + timeout
                self._drive(lambda: work.done or time.perf_counter() >= deadline, deadline, None, SPINS_HERE)
            self._motion.moved()
            self._monitor.hand_over()
            if code and not work.done:
                self._monitor.wait((work,), deadline)
        except BaseException as error:
            self._left(error)
            raise
        finally:
            self._blocked.count(begun)
        if code is None:
            return False
        if self.error is not None:
            raise self._raised(self.error)
        if not work.done:
            raise PeerTimeout(f"{label}: not done within {timeout:.1f} s", rank=-1)
        return True

    def begin_kept(self, kept: Kept, address: int, key: int, label: str, sign: Sign, memory: object) -> Work | None:
        """Begin what ``run_kept`` runs; the work, which may be done. None where ``exchange`` has to be used.

        Where all others have come this thread does it all; else it goes on behind the script. ``memory`` is kept alive.
        """
        if not self._monitor.claim(first=True):
            return None
        work = Work(label)
        work.key = key
        try:
            code = self._exchange.prompt(kept.run, address, key, sign, LOOK_ONLY)
            work.done = code == 0
            if code:
                self._take_up(kept, work, key, sign, memory)
            self._motion.moved()
            self._monitor.hand_over()
        except BaseException as error:
            self._left(error)
            raise
        return None if code is None else work

    def _take_up(self, kept: Kept, work: Work, key: int, sign: Sign, memory: object) -> None:
        """A kept run was begun and is not done: it goes on as any other."""
        self._monitor.expect(tolerant=False)

        def done(_: object = memory) -> None:
            self._finish(work, None)

        run = Run(kept.program, kept.run.array, key, work.label, on_done=done, sign=sign)
        self._exchange.take_up(kept.run, run)

    def send(self, dst: int, tag: int, data: bytes | Bytes, label: str, tolerant: bool = False) -> Work:
        """Send a message, which may be to this process itself; a ``tolerant`` one to a peer that may leave.

        An array stays unchanged until the work is done.
        """
        work = self._work(label, tolerant)
        body = np.frombuffer(data, np.uint8)

        def start() -> None:
            if dst == self.transport.rank:
                self._loopback.send(tag, bytes(data))
                self._finish(work, None)
                return
            if not tolerant:
                self._messages[work] = dst
            span = None
            if self._observer is not None:
                span = begin(self._observer, "send", label, work.span, peer=dst, nbytes=body.nbytes)
            self.transport.send(dst, tag, body, owner=lambda handle: self._arrived(work, handle, span))

        self._post(start, tolerant)
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
        work = self._work(label, tolerant)
        into: Bytes = np.empty(nbytes, np.uint8) if place is None else place

        def came(data: bytes) -> None:
            if len(data) > nbytes:
                raise SynclineError(f"{label}: a message of {len(data)} bytes does not fit a receive of {nbytes}")
            work.result = data
            if place is not None:
                place[: len(data)] = np.frombuffer(data, np.uint8)
                work.result = len(data)
            self._finish(work, None)

        def start() -> None:
            if src == self.transport.rank:
                self._loopback.recv(tag, came)
                return
            if not tolerant:
                self._messages[work] = src
            span = None
            if self._observer is not None:
                span = begin(self._observer, "receive", label, work.span, peer=src, nbytes=nbytes)

            def arrived(handle: Handle) -> None:
                work.result = into[: handle.nbytes].tobytes() if place is None else handle.nbytes
                self._arrived(work, handle, span, left)

            self.transport.recv(src, tag, into, owner=arrived)

        self._post(start, tolerant)
        return work

    def promise(self, label: str, tolerant: bool = False) -> Work:
        """A work that is done elsewhere, until ``fulfil`` says so."""
        work = self._work(label, tolerant)
        self._monitor.expect(tolerant)
        return work

    def fulfil(self, work: Work) -> None:
        """A promised work is done; called from any thread. After a fault nobody minds."""
        self._monitor.tell_driver(lambda: self._finish(work, None))

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
            self._finish(work, None)

        self._post(step, tolerant)
        return work

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Zeroed memory that the transport moves without an extra copy, as ``nbytes // itemsize`` elements."""
        work = self._work("allocate")

        def make() -> None:
            work.result = self.transport.allocate(nbytes)
            self._finish(work, None)

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
        waits = {peer: work.label for work, peer in list(self._messages.items())} | dict(self.expects())
        for one in list(self._reducing.values()):
            waits |= one.waiting_for
        return waits | self._exchange.waiting_for

    # What becomes of it.

    def _enter(
        self,
        work: Work,
        start: Callable[[], None],
        lane: Lane | None,
        gate: Work | None,
        before: Callable[[], None] | None,
        announce: bool = True,
    ) -> None:
        """Have the thread that drives start a work, after ``before``, when its gate is done and its lane has room."""

        def begin() -> None:
            if before is not None:
                before()
            start()

        def enter() -> None:
            if lane is not None:
                lane.enter(gate, begin, work.priority)
            elif gate is not None:
                gate.when_done(begin)
            else:
                begin()

        self._post(enter, work.tolerant, announce)

    def _work(self, label: str, tolerant: bool = False, key: int = -1, priority: float = 0.0) -> Work:
        """A work that is handed over."""
        work = Work(label, tolerant, priority)
        work.key = key
        if self._observer is not None:
            work.span = begin(self._observer, "work", label, key=key, priority=priority)
        return work

    def _start(
        self,
        chosen: Program | Collective,
        array: Array,
        key: int,
        work: Work,
        lane: Lane | None = None,
        sign: Sign | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Begin what ``work`` stands for: a plan, or what the transport's library does by itself."""

        def done() -> None:
            if after is not None:
                after()
            self._finish(work, lane)

        if isinstance(chosen, Collective):
            self._exchange.hand_over(chosen, array, key, work.label, done, work.span)
        else:
            what = (work.label, work.priority, done, work.tolerant, work.span, sign)
            self._exchange.start(Run(chosen, array, key, *what))

    def _arrived(
        self, work: Work, handle: Handle, span: Span | None, left: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._messages.pop(work, None)
        if handle.error is not None:
            if work.tolerant and self._has_left(handle.peer):
                left(handle.error)
                return
            raise labelled(work.label, handle.error)
        if span is not None:
            span.end()
        self._finish(work, None)
