"""Works and futures as torch knows them, over calls and works of the engine.

A future's callbacks are the script's, or DistributedDataParallel's, and may wait for further collectives: so futures
are completed in threads of their own, one of which waits for the next work while another one calls back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Work as TorchWork
from torch.futures import Future

from ....engine.engine import Engine
from ....engine.work import Work
from ....session.communicator import Communicator
from .calls import await_works


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
        self._engine = None if work is None else us.engine
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
                self._future = Future()
                if self.is_success():
                    self._future.set_result(self._outputs)
                else:
                    self._completer.add(self, self._future)
            return self._future

    @property
    def engine(self) -> Engine:
        """What drives it, also after its end."""
        assert self._engine is not None
        return self._engine

    def outcome(self) -> Any:
        """The tensors of a work that has ended; an error where its time is over. For futures."""
        self.wait(timedelta(0) if self.is_completed() else timedelta(microseconds=1))
        return self._outputs


class Completer:
    """Completes futures, each once its work is done, whatever others wait for.

    One thread at a time waits. Before it calls back it lets another one wait: a callback may wait for a work itself.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[GroupWork, Future[Any], float]] = []
        self._added = 0
        self._changed = threading.Lock()
        self._led = False

    def add(self, work: GroupWork, future: Future[Any]) -> None:
        """Complete ``future`` when ``work`` is done, or fail it when the run has ended or the work's time is over."""
        with self._changed:
            self._waiting.append((work, future, time.monotonic() + work.timeout_s))
            self._added += 1
            begin, self._led = not self._led, True
        if begin:
            self._start()

    def _start(self) -> None:
        threading.Thread(target=self._lead, name="syncline-futures", daemon=True).start()

    def _lead(self) -> None:
        leading = True
        while leading:
            work, future = self._next()
            settle = _settled(work, future)
            with self._changed:
                self._led = bool(self._waiting)
                succeeded = self._led
            if succeeded:
                self._start()
            settle()
            with self._changed:
                leading = bool(self._waiting) and not self._led
                self._led = self._led or leading

    def _next(self) -> tuple[GroupWork, Future[Any]]:
        """Wait until one of the works has ended, or its time has."""
        while True:
            with self._changed:
                waiting, known = list(self._waiting), self._added
            now = time.monotonic()
            for one in waiting:
                work, future, deadline = one
                if work.is_completed() or now >= deadline:
                    with self._changed:
                        self._waiting.remove(one)
                    return work, future
            first = min(deadline for *_, deadline in waiting)
            works = [work.work for work, *_ in waiting if work.work is not None]
            with contextlib.suppress(Exception):  # which ends them all
                waiting[0][0].engine.wait_any(works, partial(self._has_come, known, first))

    def _has_come(self, known: int, deadline: float) -> bool:
        """Whether there is more to wait for, or less time than none."""
        return self._added != known or time.monotonic() >= deadline


def _settled(work: GroupWork, future: Future[Any]) -> Callable[[], None]:
    """What completes the future of a work that has ended, or whose time is over."""
    try:
        outputs = work.outcome()
    except Exception as error:
        failure = error
        return lambda: future.set_exception(failure)
    return lambda: future.set_result(outputs)
