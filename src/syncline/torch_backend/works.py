"""Runs a group's calls and wraps the engine's works as torch's works and futures.

A call runs at once if torch waits for it, else in the background, each with its time limit. A future's callbacks belong
to the script or to DistributedDataParallel and may wait for further collectives. Futures are therefore completed in
separate threads, one of which always watches the works in flight while others run callbacks.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from ..engine.engine import Engine
from ..engine.order import Work
from ..frameworks.torch.compiled import eager_methods
from ..session.communicator import Communicator
from .collectives import Call, await_works

_AT_ONCE_S = 1e-6
"""The time that remains for a call whose limit is over."""

_STAYS_S = 10.0
"""The time that an idle thread stays."""


class Running:
    """The calls of the ranks ``us``, with ``timeout`` as the default time limit."""

    def __init__(self, us: Communicator, timeout: timedelta) -> None:
        self.us = us
        self.lock = threading.RLock()
        """Held while a call starts, because all ranks must start their calls in one order."""
        self._completer = Completer()
        self._allowed_s = 0.0
        self.limit_to(timeout)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank in the run."""
        return self.us.member.alone

    @property
    def timeout_s(self) -> float:
        """The default time limit of calls."""
        return self.timeout.total_seconds()

    def limit_to(self, timeout: timedelta) -> None:
        """Set the default time limit of calls."""
        self.timeout = timeout
        self._allow(timeout.total_seconds())

    def limit_s(self, opts: Any) -> float:
        """The time limit of a call with these options."""
        found = getattr(opts, "timeout", None)
        given_s = found.total_seconds() if isinstance(found, timedelta) else 0.0
        if given_s > self._allowed_s:
            self._allow(given_s)
        return given_s if given_s > 0 else self.timeout_s

    def run(self, begin: Callable[[], Call], opts: Any, outputs: Any) -> GroupWork:
        """Run a call: here if torch waits for it, else in the background."""
        limit_s = self.limit_s(opts)
        with self.lock:
            call = begin()
            if not self.alone and getattr(opts, "asyncOp", True):
                return self.under_way(call.begin(), call.label, outputs, limit_s)
        call.finish(limit_s)
        return self.over(outputs)

    def under_way(self, work: Work | None, label: str, outputs: Any, limit_s: float | None = None) -> GroupWork:
        """The work for a call in the background."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        return GroupWork(self.us, work, label, outputs, limit_s, self._completer)

    def over(self, outputs: Any) -> GroupWork:
        """The work for a finished call."""
        return GroupWork(self.us, None, "", outputs, self.timeout_s, self._completer)

    def _allow(self, limit_s: float) -> None:
        """Let calls take that long, even if the engine's stall limit is shorter."""
        self._allowed_s = limit_s
        if not self.alone:
            self.us.process.engine.allow(limit_s)


@eager_methods
class GroupWork(TorchWork):
    """The work of a background call. ``outputs`` are the tensors that it fills.

    ``work`` is None if all is done. ``source`` is for receives.
    """

    def __init__(
        self,
        us: Communicator,
        work: Work | None,
        label: str,
        outputs: Any,
        timeout_s: float,
        completer: Completer,
    ) -> None:
        super().__init__()
        self._us, self.work, self._label = us, work, label
        self._engine = None if work is None else us.process.engine
        self._outputs, self.timeout_s, self._completer = outputs, timeout_s, completer
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the call is done. Raises the fault that ended the run, or PeerTimeout, which ends it."""
        if self.work is not None:
            limit_s = timeout.total_seconds()
            await_works(self._us, [self.work], self._label, limit_s if limit_s > 0 else self.timeout_s)
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.work is None or self.work.done or self.engine.error is not None

    def is_success(self) -> bool:
        """Whether it ended without an error."""
        return self.work is None or self.work.done

    def exception(self) -> Exception | None:
        """The fault that ended the run before the call was done."""
        return None if self.work is None or self.work.done else self.engine.error

    def result(self) -> Any:
        """The tensors that it fills."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """The rank whose message was received."""
        self.wait()
        found = -1 if self.work is None else self.work.result
        return int(found)

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Future[Any]:
        """A future of the tensors."""
        with self._lock:
            if self._future is None:
                if self.is_success():
                    self._future = Future[Any]()
                    self._future.set_result(self._outputs)
                else:
                    promise = Promise()
                    self._completer.add(self, promise)
                    self._future = promise.future
            return self._future

    @property
    def engine(self) -> Engine:
        """The engine, also after its end."""
        assert self._engine is not None
        return self._engine

    def outcome(self) -> Any:
        """The tensors of a finished work; raises if its time is over. For futures."""
        if self.work is not None:
            left_s = self.timeout_s if self.is_completed() else _AT_ONCE_S
            await_works(self._us, [self.work], self._label, left_s, self.timeout_s)
        return self._outputs


class Promise:
    """A ``future`` that is completed later, with a result or an error.

    torch's ``set_exception`` stores the error as the value and raises it only in Python. The C++ of
    DistributedDataParallel takes the value for a list of tensors, and the process crashes. Only an error that a
    callback raises is an error in C++ too, so ``future`` is the result of a callback.
    """

    def __init__(self) -> None:
        self._told: Future[Any] = Future()
        self.future: Future[Any] = self._told.then(_raise_or_return)

    def set_result(self, result: Any) -> None:
        """Complete the future."""
        self._told.set_result((result, None))

    def set_exception(self, error: Exception) -> None:
        """Fail the future: waiting for it raises a RuntimeError with the text of ``error``."""
        self._told.set_result((None, error))


def _raise_or_return(told: Future[Any]) -> Any:
    result, error = told.value()
    if error is not None:
        raise error
    return result


class Completer:
    """Completes futures, each once its work is done or its time is over, whatever others wait for.

    A callback may itself wait for a work, so another thread watches while one runs a callback and any future is open.
    There is at most one thread more than there are concurrent callbacks. Idle threads stay for a while.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Promise, tuple[GroupWork, float]] = {}  # works in flight -> their deadlines
        self._over: deque[tuple[GroupWork, Promise]] = deque()
        self._looks: dict[threading.Thread, float] = {}  # when each idle thread wakes up next

    def add(self, work: GroupWork, promise: Promise) -> None:
        """Complete ``promise`` when ``work`` is done; fail it when the run has ended or the work's time is over."""
        assert work.work is not None
        deadline = time.monotonic() + work.timeout_s
        with self._changed:
            if not self._looks or deadline < min(self._looks.values()):
                self._call()
            self._open[promise] = work, deadline
        work.engine.when_over(work.work, partial(self._ended, promise))

    def _ended(self, promise: Promise) -> None:
        """Handle a work that is done or never will be. Called by the driving thread."""
        with self._changed:
            if (found := self._open.pop(promise, None)) is None:
                return
            self._over.append((found[0], promise))
            try:
                self._call()
                return
            except RuntimeError:  # if no thread can be started, complete the future here
                self._over.pop()
        _settle(found[0], promise)

    def _call(self) -> None:
        """Wake a thread, or start one if all are in callbacks."""
        if self._looks:
            self._changed.notify()
        else:
            thread = threading.Thread(target=self._complete, name="syncline-futures", daemon=True)
            thread.start()
            self._looks[thread] = 0.0  # at once

    def _complete(self) -> None:
        while (found := self._next()) is not None:
            _settle(*found)

    def _next(self) -> tuple[GroupWork, Promise] | None:
        """Wait for a work that has ended or whose time is over. None after a long idle time."""
        here = threading.current_thread()
        with self._changed:
            try:
                while not self._over:
                    now = time.monotonic()
                    late = [promise for promise, (_, deadline) in self._open.items() if now >= deadline]
                    self._over.extend((self._open.pop(promise)[0], promise) for promise in late)
                    if late:
                        break
                    self._looks[here] = look = self._due(now + _STAYS_S)
                    rung = self._changed.wait(min(look - now, threading.TIMEOUT_MAX))
                    if not (rung or self._open or self._over):
                        return None
            finally:
                self._looks.pop(here, None)
            found = self._over.popleft()
            if self._over or (self._open and min(self._looks.values(), default=math.inf) > self._due()):
                # if no thread can be started, this one continues after its callback
                with contextlib.suppress(RuntimeError):
                    self._call()
            return found

    def _due(self, otherwise: float = math.inf) -> float:
        """The earliest deadline of an open future."""
        return min((deadline for _, deadline in self._open.values()), default=otherwise)


def _settle(work: GroupWork, promise: Promise) -> None:
    """Complete the future of a work that has ended or whose time is over."""
    try:
        outputs = work.outcome()
    except Exception as error:
        promise.set_exception(error)
    else:
        promise.set_result(outputs)
