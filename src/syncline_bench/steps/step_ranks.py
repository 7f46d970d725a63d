"""The program of each rank of ``syncline bench steps``: ``python -m syncline_bench.steps.step_ranks WORK LINES``.

Owns the course of a repetition: the bare step, the exchange and Syncline's step in turn, so that a busy moment of the
machine hits all alike. The exchange has the same parts as a step's: tickets, and one array per bucket in the
transport's memory. The result is the time of a step beyond both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncline import api
from syncline.engine.order import Order, When
from syncline.launch.environment import recognise
from syncline.process import process
from syncline.session.session import Session
from syncline.session.tickets import STEP, step_argument

from ..messages import Task
from ..ranks import Line
from .loops import LEARNING_RATE, LOOPS

WARM_UP = 20
QUIET = 5
"""The percentile of each of the three times, whose difference estimates the result of a quiet machine."""


@dataclass(frozen=True)
class Work(Task):
    """The measurement asked for. Each tensor is a bucket; an order says how many there are."""

    framework: str
    strategy: str
    elements: int
    repetitions: int


class BareExchange:
    """The exchange of a number of arrays alone, as a step would begin it."""

    def __init__(self, session: Session, arrays: int, elements: int) -> None:
        self._session, self._count = session, 0
        self._key = session.enter_model(self)
        self._arrays = [session.engine.allocate(4 * elements, np.dtype(np.float32)) for _ in range(arrays)]
        self._program = session.bucket_program(4 * elements)

    def run(self) -> None:
        """Exchange every array once: submit them all, then wait."""
        meeting = self._session.meet(STEP, step_argument(self._key, self._count), weight=1.0)
        self._count += 1
        engine, program = self._session.engine, self._program
        works = [
            engine.start(Order(program, array, self._key + number, f"bucket {number}"), When(meeting.work))
            for number, array in enumerate(self._arrays)
        ]
        engine.wait(*works)
        meeting.tickets()


def main(text: str, lines: str) -> None:
    """Measure the numbers of tensors that the starter orders. An error is reported before it ends the process."""
    work, line = Work.from_json(text), Line(lines, recognise())
    with line.telling():
        api.init(work.strategy)
        for order in line.orders():
            line.send("measured", **measure(work, order["tensors"]))
        api.shutdown()


def measure(work: Work, tensors: int) -> dict[str, Any]:
    """Medians over the repetitions, of the slowest rank in each, and whether the weights are right."""
    session = process.session
    loop = LOOPS[work.framework](tensors, work.elements)
    exchange = BareExchange(session, tensors, work.elements)
    times = np.zeros((2, work.repetitions, 3))  # seconds, and seconds of the processor
    for repetition in range(-WARM_UP, work.repetitions):
        for place, call in enumerate((loop.bare, exchange.run, loop.step)):
            session.barrier()
            found = _timed(call)
            if repetition >= 0:
                times[:, repetition, place] = found
    rows = [np.frombuffer(data).reshape(times.shape) for data in session.gather(times.tobytes())]
    slowest, used = np.max(rows, axis=0)[0], np.mean(rows, axis=0)[1]
    bare, exchanged, step = (float(one) for one in np.median(slowest, axis=0))
    wanted = 1 - (WARM_UP + work.repetitions) * LEARNING_RATE
    return {
        "bare_s": bare,
        "exchange_s": exchanged,
        "step_s": step,
        "beyond_s": float(np.median(_beyond(slowest))),
        "quiet_beyond_s": float(_beyond(np.percentile(slowest, QUIET, axis=0))),
        "cpu_beyond_s": float(np.median(_beyond(used))),
        "correct": bool(abs(loop.first() - wanted) < LEARNING_RATE / 2),
    }


def _beyond(times: Any) -> Any:
    return times[..., 2] - times[..., 1] - times[..., 0]


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    used, begun = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - begun, time.process_time() - used


if __name__ == "__main__":
    main(*sys.argv[1:])
