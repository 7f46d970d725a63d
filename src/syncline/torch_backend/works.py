"""How a group's calls run, and what torch is handed for them: works and futures over those of the engine.

A call is made at once where torch waits for it, else behind the script, each with its time limit. A future's callbacks
are the script's, or DistributedDataParallel's, and may wait for further collectives: so futures are completed in
threads of their own, of which one always watches what is under way while others call back.
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
"""What is left to a call whose time is over."""

_STAYS_S = 10.0
"""How long a thread stays with nothing to do."""


class Running:
    """The calls of the ranks ``us``, which may take ``timeout`` where they say nothing else."""

    def __init__(self, us: Communicator, timeout: timedelta) -> None:
        self.us = us
        self.lock = threading.RLock()
        """Whoever begins a call holds it: all ranks begin theirs in one order."""
        self._completer = Completer()
        self._allowed_s = 0.0
        self.limit_to(timeout)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank in the run."""
        return self.us.member.alone

    @property
    def timeout_s(self) -> float:
        """The time limit of calls that give none."""
        return self.timeout.total_seconds()

    def limit_to(self, timeout: timedelta) -> None:
        """Let this be the time limit of calls that give none."""
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
        """Make a call: here, where torch waits for it, else behind the script."""
        limit_s = self.limit_s(opts)
        with self.lock:
            call = begin()
            if not self.alone and getattr(opts, "asyncOp", True):
                return self.under_way(call.begin(), call.label, outputs, limit_s)
        call.finish(limit_s)
        return self.over(outputs)

    def under_way(self, work: Work | None, label: str, outputs: Any, limit_s: float | None = None) -> GroupWork:
        """What torch is given for a call that goes on behind the script."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        return GroupWork(self.us, work, label, outputs, limit_s, self._completer)

    def over(self, outputs: Any) -> GroupWork:
        """What torch is given for a call that is over."""
        return GroupWork(self.us, None, "", outputs, self.timeout_s, self._completer)

    def _allow(self, limit_s: float) -> None:
        """Calls may take so long, also where nothing else in the run may."""
        self._allowed_s = limit_s
        if not self.alone:
            self.us.member.process.engine.allow(limit_s)


@eager_methods
class GroupWork(TorchWork):
    """What a group hands out for a call that goes on behind the script; ``outputs`` are the tensors it fills.

    ``work`` is None where all is done. ``source`` is for receives.
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
        self._engine = None if work is None else us.member.process.engine
        self._outputs, self.timeout_s, self._completer = outputs, timeout_s, completer
        self._future: Future[Any] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the call is done; raises what ended the run, or PeerTimeout, which ends it."""
        if self.work is not None:
            limit_s = timeout.total_seconds()
            await_works(self._us, [self.work], self._label, limit_s if limit_s > 0 else self.timeout_s)
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.work is None or self.work.done or self.engine.error is not None

    def is_success(self) -> bool:
        """Whether it is done."""
        return self.work is None or self.work.done

    def exception(self) -> Exception | None:
        """What ended the run before the call was done."""
        return None if self.work is None or self.work.done else self.engine.error

    def result(self) -> Any:
        """The tensors that it fills."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Who has sent what was received."""
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
        """What drives it, also after its end."""
        assert self._engine is not None
        return self._engine

    def outcome(self) -> Any:
        """The tensors of a work that has ended; an error where its time is over. For futures."""
        if self.work is not None:
            left_s = self.timeout_s if self.is_completed() else _AT_ONCE_S
            await_works(self._us, [self.work], self._label, left_s, self.timeout_s)
        return self._outputs


class Promise:
    """A ``future`` that is completed later, with a result or with an error.

    torch's ``set_exception`` keeps the error as the value and raises it in Python alone. The C++ of
    DistributedDataParallel takes the value for a list of tensors, and the process dies. Only an error that a callback
    raises becomes an error of the future in C++ too, so ``future`` is what a callback makes of what is told.
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

    A callback may wait for a work itself: so while one calls back and any future is open, another thread watches. That
    makes at most one thread more than there are callbacks at a time. Threads stay a while for the next futures.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Promise, tuple[GroupWork, float]] = {}  # of works under way: until when
        self._over: deque[tuple[GroupWork, Promise]] = deque()
        self._looks: dict[threading.Thread, float] = {}  # when each thread with nothing to do looks at the time next

    def add(self, work: GroupWork, promise: Promise) -> None:
        """Complete ``promise`` when ``work`` is done, or fail it when the run has ended or the work's time is over."""
        assert work.work is not None
        deadline = time.monotonic() + work.timeout_s
        with self._changed:
            if not self._looks or deadline < min(self._looks.values()):
                self._call()
            self._open[promise] = work, deadline
        work.engine.when_over(work.work, partial(self._ended, promise))

    def _ended(self, promise: Promise) -> None:
        """The work of a promise is done, or never will be; called by the thread that drives."""
        with self._changed:
            if (found := self._open.pop(promise, None)) is None:
                return
            self._over.append((found[0], promise))
            try:
                self._call()
                return
            except RuntimeError:  # no thread can be started any more: then here, rather than never
                self._over.pop()
        _settle(found[0], promise)

    def _call(self) -> None:
        """Let a thread look, one more where all are calling back."""
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
        """Wait for a work that has ended, or whose time has; None when there has been nothing to do for long."""
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
                with contextlib.suppress(RuntimeError):  # where no thread can be started this one looks when it is back
                    self._call()
            return found

    def _due(self, otherwise: float = math.inf) -> float:
        """When the time of the first open future is over."""
        return min((deadline for _, deadline in self._open.values()), default=otherwise)


def _settle(work: GroupWork, promise: Promise) -> None:
    """Complete the future of a work that has ended, or whose time is over."""
    try:
        outputs = work.outcome()
    except Exception as error:
        promise.set_exception(error)
    else:
        promise.set_result(outputs)
