"""One process's progress thread: everything that is under way in the background of training.

The training thread hands over work (a bucket to exchange, a message to send) and later waits for it; the progress
thread owns the transport, drives the exchange and calls back. The time the training thread spends blocked here is
counted: it is the exposed communication.

A fault in the progress thread reaches every thread that waits, now or later, as the same exception. Each wait has a
time limit, and so has the progress of the whole: when nothing moves for ``limit_s`` although something is under way,
that is a fault that names whom it waits for.

Works of one *lane* start in the order in which they were handed over, at most ``in_flight`` of them at a time: ranks
whose gradients become ready in different orders still serve the same buckets.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .collectives import Collective
from .errors import ClosedError, PeerTimeout, SynclineError
from .exchange import Array, Exchange, Run, labelled
from .program import Program
from .transports import Bytes, Handle, Transport

LIMIT_S = 30 * 60.0
"""Default limit for progress."""

_POLL_S = 1.0
_FLUSH_S = 10.0
_UNTIL_S = 0.1
_DRAIN_S = 2.0
_DRAIN_POLL_S = 0.01


class Work:
    """Something under way; ``result`` is set when it is done."""

    __slots__ = ("callbacks", "done", "label", "result", "tolerant")

    def __init__(self, label: str, tolerant: bool = False) -> None:
        self.label = label
        self.tolerant = tolerant
        self.done = False
        self.result: Any = None
        self.callbacks: list[Callable[[], None]] = []


class Lane:
    """An ordered queue of works of which ``in_flight`` may be under way."""

    def __init__(self, in_flight: int) -> None:
        self.in_flight = in_flight
        self.active = 0
        self.waiting: deque[tuple[Work | None, Callable[[], None]]] = deque()


class Engine:
    """The progress thread of one transport; ``explain`` turns a fault into what the user shall see."""

    def __init__(
        self,
        transport: Transport,
        *,
        limit_s: float = LIMIT_S,
        explain: Callable[[Exception], Exception] = lambda error: error,
        has_left: Callable[[int], bool] = lambda _: False,
        on_raise: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport = transport
        self.blocked_s = 0.0
        self.error: Exception | None = None
        self._exchange = Exchange(transport, has_left=has_left)
        self._has_left = has_left
        self._on_raise = on_raise
        self._limit_s = limit_s
        self._explain = explain
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._closing = False
        self._thread = threading.Thread(target=self._progress, name="syncline-progress", daemon=True)
        self._thread.start()

    # For the training thread and servers.

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
    ) -> Work:
        """Run a plan, or a library's collective, over ``array``; it starts when ``gate`` is done, after ``before``.

        A program that depends on the gate's result is given as a function. A ``tolerant`` work does not mind peers
        that leave, and nobody waits for it at the end.
        """
        work = Work(label, tolerant)

        def start() -> None:
            if before is not None:
                before()
            chosen = program() if callable(program) else program
            if isinstance(chosen, Collective):
                self._exchange.hand_over(chosen, array, key, label, lambda: self._finish(work, lane))
                return
            run = Run(chosen, array, key, label, priority, lambda: self._finish(work, lane), tolerant)
            self._exchange.start(run)

        def enter() -> None:
            if lane is None:
                self._when_done(gate, start)
            else:
                lane.waiting.append((gate, start))
                self._advance(lane)

        self._post(enter, counts=not tolerant)
        return work

    def send(self, dst: int, tag: int, data: bytes, label: str) -> Work:
        """Send a small message."""
        work = Work(label)
        body = np.frombuffer(data, np.uint8)

        def start() -> None:
            self.transport.send(dst, tag, body, owner=lambda handle: self._arrived(work, handle))

        self._post(start)
        return work

    def recv(self, src: int, tag: int, nbytes: int, label: str, tolerant: bool = False) -> Work:
        """Receive a message of at most ``nbytes``; ``result`` is its bytes."""
        work = Work(label, tolerant)
        into: Bytes = np.empty(nbytes, np.uint8)

        def arrived(handle: Handle) -> None:
            work.result = into[: handle.nbytes].tobytes()
            self._arrived(work, handle)

        def start() -> None:
            self.transport.recv(src, tag, into, owner=arrived)

        self._post(start, counts=not tolerant)
        return work

    def allocate(self, nbytes: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Zeroed memory that the transport moves without an extra copy, as ``nbytes // itemsize`` elements."""
        work = Work("allocate")

        def make() -> None:
            work.result = self.transport.allocate(nbytes)
            self._finish(work, None)

        self._post(make)
        self.wait(work)
        memory: Bytes = work.result
        return memory.view(dtype)

    def wait(self, *works: Work, timeout: float | None = None) -> None:
        """Block until all are done; raises the engine's fault, or PeerTimeout after ``timeout`` seconds."""
        if self.error is None and all(work.done for work in works):
            return
        begun = time.perf_counter()
        try:
            with self._changed:
                came = self._changed.wait_for(lambda: self.error or all(work.done for work in works), timeout)
        finally:
            self.blocked_s += time.perf_counter() - begun
        if self.error is not None:
            raise self._raised(self.error)
        if not came:
            late = next(work for work in works if not work.done)
            raise PeerTimeout(f"{late.label}: not done within {timeout:.1f} s", rank=-1)

    def wait_any(self, works: Collection[Work], until: Callable[[], bool]) -> None:
        """Block until one of the works is done or ``until()`` holds (looked at often); raises the engine's fault."""
        with self._changed:
            while not (self.error or until() or any(work.done for work in works)):
                self._changed.wait(_UNTIL_S)
        if self.error is not None and not until():
            raise self._raised(self.error)

    @property
    def doing(self) -> str:
        """What is under way, in few words."""
        labels = self._exchange.labels
        return "no exchange" if not labels else labels[0] + (f" and {len(labels) - 1} more" if len(labels) > 1 else "")

    def fail(self, error: Exception) -> None:
        """A fault found elsewhere: whoever waits here gets it. The first one stays."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def close(self, before_end: Callable[[], None] = lambda: None) -> None:
        """Finish what is under way unless there was a fault, end the thread and close the transport.

        ``before_end`` is called while the connections still stand.
        """
        if self.error is None:
            with self._changed:
                self._changed.wait_for(lambda: self.error or not (self._under_way or self._inbox), _FLUSH_S)
        before_end()
        self._closing = True
        self.transport.wake()
        self._thread.join(_FLUSH_S)
        self.fail(ClosedError("this session has been shut down"))

    def _raised(self, error: Exception) -> Exception:
        """The fault is about to reach the user's thread."""
        self._on_raise()
        return error

    # In the progress thread.

    def _post(self, task: Callable[[], None], counts: bool = True) -> None:
        if self.error is not None:
            raise self._raised(self.error)
        if counts:
            with self._changed:
                self._under_way += 1
        self._inbox.append(task)
        self.transport.wake()

    def _progress(self) -> None:
        moved = time.monotonic()
        try:
            while not self._closing and self.error is None:
                if self._inbox:
                    self._take_tasks()
                    moved = time.monotonic()
                if self._exchange.progress(_POLL_S) or not self._under_way:
                    moved = time.monotonic()
                elif time.monotonic() - moved > self._limit_s:
                    raise self._stalled()
            self._drain()
        except Exception as error:
            shown = error
            with contextlib.suppress(Exception):  # an explanation that fails must not hide the fault
                shown = self._explain(error)
            self.fail(shown)
        finally:
            self.transport.close()

    def _drain(self) -> None:
        """The last acknowledgements have to reach the kernel, or a peer would wait for them."""
        deadline = time.monotonic() + _DRAIN_S
        while self.error is None and time.monotonic() < deadline:
            self._exchange.progress(0.0 if self.transport.idle else _DRAIN_POLL_S)
            if self.transport.idle:
                return

    def _take_tasks(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        with self._changed:  # the end waits for this; a tolerant work gives no other sign
            self._changed.notify_all()

    def _stalled(self) -> SynclineError:
        waiting = self._exchange.waiting_for
        peers = ", ".join(f"rank {peer} ({label})" for peer, label in sorted(waiting.items())) or "a message"
        text = f"nothing has moved for {self._limit_s:.0f} s, waiting for {peers}"
        return PeerTimeout(text, rank=next(iter(waiting)) if len(waiting) == 1 else -1)

    def _when_done(self, gate: Work | None, start: Callable[[], None]) -> None:
        if gate is None or gate.done:
            start()
        else:
            gate.callbacks.append(start)

    def _advance(self, lane: Lane) -> None:
        while lane.waiting and lane.active < lane.in_flight:
            gate, start = lane.waiting[0]
            if gate is not None and not gate.done:
                gate.callbacks.append(lambda: self._advance(lane))
                return
            lane.waiting.popleft()
            lane.active += 1
            start()

    def _arrived(self, work: Work, handle: Handle) -> None:
        if handle.error is not None:
            if work.tolerant and self._has_left(handle.peer):
                return
            raise labelled(work.label, handle.error)
        self._finish(work, None)

    def _finish(self, work: Work, lane: Lane | None) -> None:
        with self._changed:
            work.done = True
            self._under_way -= not work.tolerant
            self._changed.notify_all()
        callbacks, work.callbacks = work.callbacks, []
        for callback in callbacks:
            callback()
        if lane is not None:
            lane.active -= 1
            self._advance(lane)
