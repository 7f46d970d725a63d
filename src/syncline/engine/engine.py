"""The engine: everything that one process exchanges in the background of training.

The training thread submits work (a bucket to exchange, a message to send) and waits for it later. ``driver`` makes
progress meanwhile; ``order`` defines a work and the order in which works start.

Single messages (``Mail``) travel over the transport, or through a loopback if a process sends to itself.

In a small collective most of the time is overhead. A plan can therefore be prepared for many runs over arrays of one
size and type (``PreparedRun``). The calling thread then executes a run itself; if all other ranks have arrived, it
completes the run in one call without any bookkeeping. Otherwise the run continues like any other. If another thread
drives, or any other exchange is in flight, nothing is started, and the caller uses ``Engine.run`` or ``Engine.start``
instead. The other ranks do not notice the difference.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import SynclineError, labelled
from ..plans.messages import Program
from ..transports import Bytes, Handle, Transport
from ..wire.culprit import Found, Waits, find_culprit
from ..wire.scratch import address_of
from .driver import LIMIT_S, SPINS_HERE, Blocked, Driver
from .exchange import Exchange
from .flight import Flight
from .order import NOW, UNANNOUNCED, Array, CodedOrder, Lane, Order, Run, Sign, When, Work
from .reducing import Reducing
from .scope import Scope
from .scripts import ScriptedRun
from .trace import Kind, Observer, Span, begin


class Mail:
    """Single messages in flight. Each belongs to a work; ``finish`` is called when one is done.

    ``has_left`` tells whether a process has left in an orderly way, which is no fault for a ``tolerant`` work. Only for
    the driving thread.
    """

    def __init__(
        self,
        transport: Transport,
        has_left: Callable[[int], bool],
        observer: Observer | None,
        finish: Callable[[Work], None],
    ) -> None:
        self._transport, self._has_left, self._observer, self._finish = transport, has_left, observer, finish
        self._loopback = Loopback()
        self._awaited: dict[Work, int] = {}  # the peer of each message

    @property
    def waiting_for(self) -> Waits:
        """The peers of all messages that are not tolerant. Callable from any thread."""
        return {peer: work.label for work, peer in list(self._awaited.items())}

    def send(self, work: Work, dst: int, tag: int, body: Bytes) -> None:
        """Send a message. Its memory must not change until the work is done."""
        if dst == self._transport.rank:
            self._loopback.send(tag, body.tobytes())
            self._finish(work)
            return
        span = self._begun("send", work, dst, body.nbytes)
        self._transport.send(dst, tag, body, owner=lambda handle: self._ended(work, handle, span))

    def recv(
        self, work: Work, src: int, tag: int, into: Bytes, placed: bool, left: Callable[[Exception], None]
    ) -> None:
        """Receive a message of at most ``into.nbytes``. The result is its bytes, or their number if ``placed``.

        ``left`` is called if a tolerant message does not arrive because its peer has left.
        """
        if src == self._transport.rank:
            self._loopback.recv(tag, partial(self._came_back, work, into, placed))
            return
        span = self._begun("receive", work, src, into.nbytes)

        def arrived(handle: Handle) -> None:
            work.result = handle.nbytes if placed else into[: handle.nbytes].tobytes()
            self._ended(work, handle, span, left)

        self._transport.recv(src, tag, into, owner=arrived)

    def _came_back(self, work: Work, into: Bytes, placed: bool, data: bytes) -> None:
        """Deliver a message from this process to itself."""
        if len(data) > into.nbytes:
            raise SynclineError(f"{work.label}: a message of {len(data)} bytes does not fit a receive of {into.nbytes}")
        work.result = data
        if placed:
            into[: len(data)] = np.frombuffer(data, np.uint8)
            work.result = len(data)
        self._finish(work)

    def _begun(self, kind: Kind, work: Work, peer: int, nbytes: int) -> Span | None:
        if not work.tolerant:
            self._awaited[work] = peer
        if self._observer is None:
            return None
        return begin(self._observer, kind, work.label, work.span, peer=peer, nbytes=nbytes)

    def _ended(
        self, work: Work, handle: Handle, span: Span | None, left: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._awaited.pop(work, None)
        if handle.error is not None:
            if work.tolerant and self._has_left(handle.peer):
                left(handle.error)
                return
            raise labelled(work.label, handle.error)
        if span is not None:
            span.end()
        self._finish(work)


class Loopback:
    """Messages of a process to itself, by tag: unreceived messages, and receives without a message.

    As between two processes, messages of one tag arrive in the order in which they were sent.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._asked: defaultdict[int, deque[Callable[[bytes], None]]] = defaultdict(deque)

    def send(self, tag: int, data: bytes) -> None:
        """Deliver a message to the oldest receive, or keep it."""
        if self._asked[tag]:
            self._asked[tag].popleft()(data)
        else:
            self._sent[tag].append(data)

    def recv(self, tag: int, came: Callable[[bytes], None]) -> None:
        """Call ``came`` with the next message, now or when it is sent."""
        if self._sent[tag]:
            came(self._sent[tag].popleft())
        else:
            self._asked[tag].append(came)


_MOST_KEPT, _MOST_BYTES = 64, 1 << 20
"""The most orders that an engine prepares because they repeat, and their most bytes: with more it saves nothing."""

LOOK_ONLY = -1
"""The number of polls for a thread that does not wait: poll briefly without yielding the core."""


class PreparedRun:
    """A prepared run. While it is in flight, ``run`` and ``begin`` start no other; ``Engine.drop`` releases it."""

    def __init__(self, driver: Driver, exchange: Exchange, scripted: ScriptedRun) -> None:
        self.program, self.scripted = scripted.of.program, scripted
        self._driver, self._exchange = driver, exchange
        self._monitor, self._watchdog, self._flight = driver.monitor, driver.watchdog, driver.flight
        self._nbytes = scripted.of.array.nbytes

    def run(self, address: int, key: int, label: str, sign: Sign | None, timeout: float | None) -> bool:
        """Run over the array at ``address`` and return when done. Returns False if the run could not start.

        Raises PeerTimeout after ``timeout`` seconds; the run is still in flight then.
        """
        if not self._monitor.claim(first=True):
            return False
        begun, work = time.perf_counter(), None
        try:
            code = self._exchange.prompt(self.scripted, address, key, sign, SPINS_HERE)
            if code:  # else nothing is left to wait for
                work = Work(label)
                self._take_up(work, key, sign, None)
                deadline = None if timeout is None else begun + timeout
                self._driver.drive((work,), deadline, None, SPINS_HERE)
            self._watchdog.moved()
            self._monitor.hand_over()
            if work is not None and not work.done:
                self._monitor.wait((work,), deadline)
        except BaseException as error:
            self._driver.left(error)
            raise
        finally:
            now = self._driver.blocked.count(begun)
        if code is None:
            return False
        if self._flight is not None and work is None:
            self._flight.begin(key, label, self._nbytes, False, begun, now)
        if self._monitor.error is not None or not (work is None or work.done):
            raise self._driver.unfinished(work or Work(label), timeout)
        return True

    def begin(self, address: int, key: int, label: str, sign: Sign, memory: object) -> Work | None:
        """Start the same run and return its work, which may already be done. None if the run could not start.

        If all other ranks have arrived, this thread completes the run; otherwise the run continues in the background.
        ``memory`` is kept alive until then.
        """
        if not self._monitor.claim(first=True):
            return None
        work = Work(label)
        work.key = key
        try:
            code = self._exchange.prompt(self.scripted, address, key, sign, LOOK_ONLY)
            work.done = code == 0  # no lock: no other thread knows the work yet
            if code:
                self._take_up(work, key, sign, memory)
            elif code is not None and self._flight is not None:
                now = time.perf_counter()
                self._flight.begin(key, label, self._nbytes, False, now, now)
            self._watchdog.moved()
            self._monitor.hand_over()
        except BaseException as error:
            self._driver.left(error)
            raise
        return None if code is None else work

    def _take_up(self, work: Work, key: int, sign: Sign | None, memory: object) -> None:
        """Let a started run continue like any other."""
        if self._flight is not None:
            work.row = self._flight.begin(key, work.label, self._nbytes)
        self._monitor.expect(tolerant=False)

        def done(_: object = memory) -> None:
            self._driver.finish(work)

        run = Run(self.program, self.scripted.of.array, key, work.label, on_done=done, sign=sign)
        self._exchange.take_up(self.scripted, run)


class Engine(Driver):
    """Submits work over one transport. ``explain`` turns a fault into the exception for the user.

    ``find_culprit`` finds the rank at fault in a stall. ``observer`` receives a span for everything, and ``flight``
    keeps the last exchanges. Peers and keys belong to the run, or to the ``scope`` given to ``within``.
    """

    scope: Scope | None = None

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
        flight: Flight | None = None,
    ) -> None:
        # The progress thread starts in ``super().__init__``, so its fields must exist before.
        self._has_left = has_left
        self._expecting: dict[Scope | None, Callable[[], Waits]] = {}
        self._kept: dict[tuple[int, int, int, np.dtype[Any]], PreparedRun | bool] = {}
        self._mail = Mail(transport, has_left, observer, self.finish)
        exchange = Exchange(transport, has_left=has_left, observer=observer, handed_over=self._handed_over)
        super().__init__(exchange, limit_s, explain, on_raise, find_culprit, observer, flight)

    def within(self, scope: Scope) -> Engine:
        """This engine as a group of processes uses it; time and bytes are also counted for the group alone."""
        made = copy.copy(self)  # threads, connections and work in flight are shared
        made.scope, made.blocked, made._kept = scope, Blocked(self.blocked), {}
        return made

    def expect(self, found: Callable[[], Waits]) -> None:
        """``found`` names further processes for which this one waits; it is called from any thread."""
        scope = self.scope
        self._expecting[scope] = found if scope is None else lambda: scope.waits(found())

    def _handed_over(self) -> bool:
        """Whether the driving thread has something to do besides the exchanges in flight."""
        return bool(self.monitor.inbox) or self.monitor.ending

    def start(self, order: Order | CodedOrder, when: When = NOW) -> Work:
        """Start an exchange in the background."""
        monitor = self.monitor
        if monitor.error is not None:
            raise self._raised(monitor.error)
        if self.scope is not None:
            order = self.scope.coded_order(order) if isinstance(order, CodedOrder) else self.scope.order(order)
        work = Work(order.label, order.tolerant, when.priority)
        work.key = order.key
        if self.flight is not None:
            nbytes = -1 if isinstance(order, CodedOrder) else order.array.nbytes
            work.row = self.flight.begin(order.key, order.label, nbytes, order.tolerant)
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
        """Begin a submitted order: a plan, a collective of the transport's library, or a bucket's reducers."""
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
        """Start to drive the reducers of a bucket."""

        def finished() -> None:
            self._reducing.pop(order.key, None)
            self.finish(work, lane, order.after)

        reducing = self._reducing[order.key] = Reducing(
            self._exchange,
            order,
            finished,
            self._has_left,
            self.monitor.tell_driver,
            priority=work.priority,
            observer=self._observer,
            within=work.span,
        )
        reducing.start()

    def shows(self, program: Program | Collective, array: Array) -> bool:
        """Whether ranks see each other's signs in such a run; the same on all ranks. False in a scope."""
        return self.scope is None and isinstance(program, Program) and self._exchange.shows(program.plan, array)

    def absent(self, key: int, processes: Iterable[int]) -> set[int]:
        """The processes that have not joined a run with signs. If all have joined, all processes awaited here."""
        shared = self._exchange.shared
        return (set() if shared is None else shared.absent(key, processes)) or self.awaited

    def run(self, order: Order, timeout: float | None = None) -> None:
        """Exchange and return when done: ``start`` and ``wait`` with less overhead.

        Raises PeerTimeout after ``timeout`` seconds; the run is still in flight then.
        """
        self.check_not_driving()
        here = order if self.scope is None else self.scope.order(order)
        if self._exchange.shared is not None and self._repeats(here, timeout):
            return
        work, begun = Work(here.label), time.perf_counter()
        blocked = None if self._observer is None else begin(self._observer, "wait", here.label)

        def start() -> None:
            if self.flight is not None:
                work.row = self.flight.begin(here.key, here.label, here.array.nbytes)
            if self._observer is not None:
                work.span = begin(self._observer, "work", here.label, key=here.key)
            self._begin(here, work, NOW)

        if self.flight is not None:
            self.flight.blocked(begun)
        deadline = None if timeout is None else begun + timeout
        try:
            if not self._drive_here((work,), deadline, start):
                work = self.start(order, UNANNOUNCED)
                self._drive_here((work,), deadline)  # the former driver may have stopped before it saw the order
            if not work.done:  # another thread drives, or there was a fault
                self.monitor.wait((work,), deadline)
        except BaseException as error:
            self.left(error)
            raise
        finally:
            self.blocked.count(begun)
            if self.flight is not None:
                self.flight.blocked(0.0)
            if blocked is not None:
                blocked.end()
        if self.monitor.error is not None or not work.done:
            raise self.unfinished(work, timeout)

    def _repeats(self, order: Order, timeout: float | None) -> bool:
        """Run an order of a plan over an array in shared memory for the third time or a later one, prepared.

        Returns False, without side effects, for others, and if the run could not start.
        """
        array = order.array
        if array.nbytes > _MOST_BYTES or order.sign is not None or self._observer is not None:
            return False
        address = address_of(array)
        name = id(order.program), address, array.nbytes, array.dtype  # a prepared run keeps the program and its id
        kept = self._kept.get(name)
        if isinstance(kept, PreparedRun):
            return kept.run(address, order.key, order.label, None, timeout)
        if kept is None and len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        if kept is not False:
            self._kept[name] = True if kept is None else self._in_place(order)
        return False

    def _in_place(self, order: Order) -> PreparedRun | bool:
        """Prepare further runs like an order, over the same array. False if that is impossible, True if only now."""
        program, array, shared = order.program, order.array, self._exchange.shared
        if not isinstance(program, Program) or order.tolerant or program.native is not None or shared is None:
            return False
        if array.ndim != 1 or not array.flags.c_contiguous:
            return False
        if not self.monitor.claim(first=True):
            return True
        try:
            scripted = shared.keep_in_place(program, array)
        finally:
            self.monitor.hand_over()
        return scripted is not None and PreparedRun(self, self._exchange, scripted)

    def keep(self, program: Program, dtype: np.dtype[Any], size: int) -> PreparedRun | None:
        """Prepare many runs of a plan with signs over arrays of one size and type. None if that is impossible now."""
        if self._observer is not None or not self.monitor.claim(first=True):
            return None
        try:
            shared = self._exchange.shared
            assert shared is not None
            return PreparedRun(self, self._exchange, shared.keep(program, dtype, size))
        finally:
            self.monitor.hand_over()

    def drop(self, kept: PreparedRun, after: Work | None = None) -> None:
        """Release a prepared run after its last work is done."""
        shared = self._exchange.shared
        assert shared is not None
        self.then("drop", [] if after is None else [after], partial(shared.drop, kept.scripted), tolerant=True)

    def send(self, dst: int, tag: int, data: bytes | Bytes, label: str, tolerant: bool = False) -> Work:
        """Send a message, possibly to this process itself. A ``tolerant`` one may go to a peer that leaves.

        An array must not change until the work is done.
        """
        if self.scope is not None:
            dst, tag = self.scope.ranks[dst], self.scope.tag(tag)
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
        """Receive a message of at most ``nbytes``. ``result`` is its bytes, or the number written to ``place``.

        ``left`` is called in the driving thread if a ``tolerant`` message does not arrive because its peer has left.
        """
        into = np.empty(nbytes, np.uint8) if place is None else place  # allocate here: a failure is the caller's error
        if self.scope is not None:
            src, tag = self.scope.ranks[src], self.scope.tag(tag)
        work = self._work(label, tolerant)
        self._post(partial(self._mail.recv, work, src, tag, into, place is not None, left), tolerant)
        return work

    def promise(self, label: str, tolerant: bool = False) -> Work:
        """A work that something else completes by calling ``fulfil``."""
        work = self._work(label, tolerant)
        self.monitor.expect(tolerant)
        return work

    def fulfil(self, work: Work) -> None:
        """Mark a promised work as done. Callable from any thread; ignored after a fault."""
        self.monitor.tell_driver(lambda: self.finish(work))

    def then(
        self, label: str, works: Sequence[Work], call: Callable[[], None] = lambda: None, *, tolerant: bool = False
    ) -> Work:
        """Call ``call`` in the driving thread once all ``works`` are done; the returned work is done after it.

        ``close`` waits for it unless it is ``tolerant``.
        """
        work = self._work(label, tolerant)
        waiting = list(works)

        def step() -> None:
            while waiting:  # a loop: one callback per work would recurse as deep as there are finished works
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
        """The processes that anything in flight waits for; in a scope, only the scope's."""
        return set(self.waits()) if self.scope is None else self.scope.positions(self.waits())

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """The bytes sent to and received from each process, with all headers; in a scope, without headers."""
        return super().traffic() if self.scope is None else self.scope.traffic()

    def waits(self) -> Waits:
        """The waits of single messages, expected processes, reducers and plans."""
        waits = dict(self._mail.waiting_for)
        for found in list(self._expecting.values()):
            waits |= found()
        for one in list(self._reducing.values()):
            waits |= one.waiting_for
        return waits | self._exchange.waiting_for

    def _work(self, label: str, tolerant: bool = False) -> Work:
        """A work that is submitted but is not an exchange."""
        label = label if self.scope is None else self.scope.label(label)
        work = Work(label, tolerant)
        if self._observer is not None:
            work.span = begin(self._observer, "work", label)
        return work
