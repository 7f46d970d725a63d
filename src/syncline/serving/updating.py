"""An owner's updates by what all workers have pushed: each bucket's as soon as it may be made.

It may when the push of the bucket is there and the owner knows the values that the update needs (learning rate and so
on), which may come before the first push of a step or behind the last. No bucket waits for another, so weights go back
to the workers while gradients still come. Only an optimizer of which nobody knows whether it updates tensors by
themselves updates all buckets at once, behind the last push.

Updates are made in the thread that drives, between two turns of the exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ..engine.engine import Engine
from ..engine.order import Work
from .protocol import ALL

Update = Callable[[int], None]
"""Updates a bucket, or ``ALL``, with the values of one step."""


class Updating:
    """The updates of so many ``buckets``, ``apart`` from each other or all at once, step by step."""

    def __init__(self, engine: Engine, buckets: int, apart: bool) -> None:
        self._engine, self._apart = engine, apart
        self._expected = [0] * buckets  # steps that each bucket has been handed over for
        self._told = 0  # steps whose values have been told
        self._lock = threading.Lock()  # values are told in another thread than pushes end in
        self._steps: dict[int, _Step] = {}  # of which something is left to update
        self._closed = False

    def after(self, number: int, came: Sequence[Work], call: Callable[[], None] = lambda: None) -> Work:
        """Update a bucket for the next step that it has not been handed over for, once all of ``came`` is done.

        The work is done behind ``call``, which is called then.
        """
        count = self._expected[number]
        self._expected[number] += 1
        step, label = self._step(count), f"update of bucket {number}"
        if self._apart:
            return self._engine.then(label, [*came, step.said], partial(self._one, count, number, call), tolerant=True)
        step.came += came
        step.handed_over += 1
        if step.over is None:
            step.over = self._engine.promise("the update of all buckets", tolerant=True)
        updated = self._engine.then(label, [step.over], partial(self._go_on, call), tolerant=True)
        if step.handed_over == len(self._expected):
            self._engine.then("update", [*step.came, step.said], partial(self._all, count), tolerant=True)
        return updated

    def say(self, update: Update) -> Callable[[], None]:
        """Know what updates the buckets of the next step: it does once the answer of this has been called."""
        count = self._told
        self._told += 1
        step = self._step(count)
        step.update = update
        return step.open

    def close(self) -> None:
        """Update nothing more: what waits for values that nobody will tell is done without, and nothing follows it.

        Called by who tells values, behind the last update.
        """
        with self._lock:
            self._closed = True
            steps, self._steps = list(self._steps.values()), {}
        for step in steps:
            step.open()
            if step.over is not None:
                self._engine.fulfil(step.over)

    def _step(self, count: int) -> _Step:
        with self._lock:
            if count not in self._steps:
                self._steps[count] = _Step(self._engine, len(self._expected))
            return self._steps[count]

    def _one(self, count: int, number: int, call: Callable[[], None]) -> None:
        if self._closed:
            return
        step = self._steps[count]
        step.update(number)
        step.left -= 1
        if step.left == 0:
            del self._steps[count]
        call()

    def _all(self, count: int) -> None:
        if self._closed:
            return
        step = self._steps.pop(count)
        step.update(ALL)
        assert step.over is not None
        self._engine.fulfil(step.over)

    def _go_on(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()


class _Step:
    """What is known of one step."""

    def __init__(self, engine: Engine, buckets: int) -> None:
        self._engine, self._opened = engine, False
        self.said = engine.promise("the values of a step", tolerant=True)
        self.over: Work | None = None
        self.update: Update = _nothing
        self.left = buckets
        self.came: list[Work] = []
        self.handed_over = 0

    def open(self) -> None:
        """Let what waits for the values go on, if it does not already."""
        if not self._opened:
            self._opened = True
            self._engine.fulfil(self.said)


def _nothing(bucket: int) -> None:
    raise AssertionError(f"bucket {bucket} is updated by what nobody has told")
