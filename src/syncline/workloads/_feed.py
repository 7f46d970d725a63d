"""How batches come to a model: read and prepared, ahead of time where asked for, then copied to the device.

Owns the times of an input pipeline and the thread that works ahead of the training. Does not know what a batch is.

The model is that of Shi and Chu (arXiv 1711.05979), in which an iteration takes max(loading, everything else) where the
next batches are prepared beside it, and the sum of both where they are not. The times of a pipeline are floors: what
really happens meanwhile, taking samples and moving them, is part of them, and the rest is sleep. So a pipeline that is
not there, a disk that has to be read or a link to a GPU, can be tried on any machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ..errors import SynclineError, UsageError
from ..nouns import Seconds

T = TypeVar("T")

GREATEST_S = 3600.0
"""More than an hour per batch is a mistake in the unit."""
_STUCK_S = 1800.0
"""So much longer than it should take, a batch may be under way before whoever waits for it gives up."""
_CLOSING_S = 5.0
_NO_TIME = Seconds(0.0)


@dataclass(frozen=True)
class Pipeline:
    """What a batch takes before it can be computed on.

    ``loading`` is how long it is read and prepared and ``h2d`` how long it is copied to the device, at least; ``h2d``
    left out is what a trace says, and nothing elsewhere. ``prefetch`` batches are prepared ahead by a thread beside the
    training, with 0 each when the training asks for it. Raises UsageError for values that make no sense.
    """

    loading: Seconds = _NO_TIME
    h2d: Seconds | None = None
    prefetch: int = 0

    def __post_init__(self) -> None:
        for name, value in (("loading", self.loading), ("h2d", self.h2d or 0.0)):
            if not 0 <= value <= GREATEST_S:
                raise UsageError(f"{name} must be a time from 0s to 1h, such as 5ms, got {value:g} seconds")
        if self.prefetch < 0:
            raise UsageError(f"prefetch must be a number of batches from 0 (none ahead) up, got {self.prefetch}")

    def least_s(self, compute_s: float) -> float:
        """Seconds that an iteration takes at least whose forward and backward pass take ``compute_s``."""
        rest_s = (self.h2d or 0.0) + compute_s
        return max(self.loading, rest_s) if self.prefetch else self.loading + rest_s


AT_ONCE = Pipeline()
"""Batches that are there when they are asked for."""


class Feed(Iterator[T]):
    """The batches of ``source`` as a pipeline delivers them: the next one loaded, and ``copied`` to the device.

    With ``prefetch`` the source is only used in a thread, which ``close`` ends; what it raises is raised to whoever
    asks for the batch. ``now`` and ``pause`` are a clock in seconds and what waits on it.
    """

    def __init__(
        self,
        source: Iterator[T],
        pipeline: Pipeline,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        self._source, self._pipeline, self._now = source, pipeline, now
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        limit_s = pipeline.loading + _STUCK_S
        self._ahead = _Ahead(self._load, pipeline.prefetch, self._closed, limit_s) if pipeline.prefetch else None

    def __next__(self) -> T:
        return self._load() if self._ahead is None else self._ahead.take()

    def copied(self, batch: T, move: Callable[[T], T]) -> T:
        """The batch on the device, to which ``move`` brings it."""
        return self._lasting(lambda: move(batch), self._pipeline.h2d or 0.0)

    def close(self) -> None:
        """End the thread; nothing can be taken any more."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.join()

    def _load(self) -> T:
        return self._lasting(lambda: next(self._source), self._pipeline.loading)

    def _lasting(self, work: Callable[[], T], seconds: float) -> T:
        """What ``work`` gives, not before so many seconds have passed."""
        due = self._now() + seconds
        made = work()
        left_s = due - self._now()
        if left_s > 0:
            self._pause(left_s)
        return made


class _Ahead(Generic[T]):
    """A thread that has up to ``most`` batches ready, or under way, before they are asked for."""

    def __init__(self, load: Callable[[], T], most: int, closed: threading.Event, limit_s: float) -> None:
        self._load, self._closed, self._limit_s = load, closed, limit_s
        self._room = threading.Semaphore(most)
        self._ready: SimpleQueue[list[T] | BaseException] = SimpleQueue()
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="syncline-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """The next batch, waiting until it is ready; raises what the source has raised."""
        if self._end is not None:
            raise self._end
        try:
            found = self._ready.get(timeout=self._limit_s)
        except Empty:
            raise SynclineError(
                f"the thread that prepares batches has not finished one for {self._limit_s:.0f} s: look whether its"
                " data can be read"
            ) from None
        if isinstance(found, BaseException):
            self._end = found
            raise found
        self._room.release()
        return found[0]

    def join(self) -> None:
        """Wait for the thread, which may be in the middle of a batch; it does not hold up the end of the process."""
        self._room.release()
        self._thread.join(_CLOSING_S)

    def _work(self) -> None:
        while True:
            self._room.acquire()
            if self._closed.is_set():
                return
            try:
                self._ready.put([self._load()])
            except BaseException as error:
                self._ready.put(error)
                return
