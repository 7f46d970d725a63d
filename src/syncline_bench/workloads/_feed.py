"""Delivers batches to a model: read and prepared, optionally in advance, then copied to the device.

It simulates the times of an input pipeline and owns the prefetching thread; it does not know what a batch is.

The model is that of Shi and Chu (arXiv 1711.05979): an iteration takes max(loading, everything else) if batches are
prepared in the background, else the sum of both. The times of a pipeline are lower bounds: taking samples and moving
them counts, and the rest is sleep. A missing pipeline, such as a disk or a link to a GPU, can thus be simulated on any
machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from syncline.errors import SynclineError, UsageError
from syncline.nouns import Seconds

T = TypeVar("T")

GREATEST_S = 3600.0
"""More than an hour per batch is a mistake in the unit."""
_STUCK_S = 1800.0
"""The extra time after which a consumer gives up waiting for a batch."""
_CLOSING_S = 5.0
_NO_TIME = Seconds(0.0)


@dataclass(frozen=True)
class Pipeline:
    """The time that a batch takes before it can be used.

    ``loading`` is the minimum time for reading and preparing it, ``h2d`` the minimum for copying it to the device. If
    ``h2d`` is omitted, it is the trace's value, or nothing. A background thread prepares ``prefetch`` batches in
    advance; with 0 each is prepared on request. Raises UsageError for invalid values.
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
        """The minimum seconds of an iteration whose forward and backward pass take ``compute_s``."""
        rest_s = (self.h2d or 0.0) + compute_s
        return max(self.loading, rest_s) if self.prefetch else self.loading + rest_s


AT_ONCE = Pipeline()
"""Batches without any delay."""


class Feed(Iterator[T]):
    """The batches of ``source`` through a pipeline: load the next one, then have it ``copied`` to the device.

    With ``prefetch`` only a thread uses the source; ``close`` ends it, and its exceptions are raised in the consumer.
    ``now`` is a clock in seconds and ``pause`` sleeps on it.
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
        """The batch on the device, copied by ``move``."""
        return self._lasting(lambda: move(batch), self._pipeline.h2d or 0.0)

    def close(self) -> None:
        """End the thread. No further batch can be taken."""
        self._closed.set()
        if self._ahead is not None:
            self._ahead.join()

    def _load(self) -> T:
        return self._lasting(lambda: next(self._source), self._pipeline.loading)

    def _lasting(self, work: Callable[[], T], seconds: float) -> T:
        """The result of ``work``, returned after at least ``seconds``."""
        due = self._now() + seconds
        made = work()
        left_s = due - self._now()
        if left_s > 0:
            self._pause(left_s)
        return made


class _Ahead(Generic[T]):
    """A thread that prepares up to ``most`` batches in advance."""

    def __init__(self, load: Callable[[], T], most: int, closed: threading.Event, limit_s: float) -> None:
        self._load, self._closed, self._limit_s = load, closed, limit_s
        self._room = threading.Semaphore(most)
        self._ready: SimpleQueue[list[T] | BaseException] = SimpleQueue()
        self._end: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="syncline-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Wait for the next batch. Raises the source's exceptions."""
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
        """Wait for the thread, which may be in the middle of a batch. It does not keep the process from exiting."""
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
