"""The program of each rank of ``syncline bench gradients``: ``python -m ...gradients.gradient_ranks WORK LINES``.

Owns the course of a repetition: the turns of the forms, the timing and the checks. Forms take turns in an order that is
drawn again for every repetition. Gradients are written again before each form, as backward writes them. The time that a
form adds is its time minus the time of ``bare`` in the same repetition.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from syncline.launch.connecting import connect_session
from syncline.launch.environment import Environment, recognise
from syncline.launch.rendezvous import Rendezvous
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

from ..collectives.probes import MemoryProbe
from ..ranks import Line, Table
from ..report.bench import BARE
from .gradient_cases import WARM_UP, Model, Work

STRATEGY = "auto transport=shm schedule=fifo"
"""One exchange of all gradients after backward, as in the source, by the fastest algorithm."""


def main(text: str, lines: str) -> None:
    """Measure the models of WORK in the starter's order. An error is reported before it ends the process."""
    work, environment = Work.from_json(text), recognise()
    line = Line(lines, environment)
    with line.telling():
        bench = _Bench(work, environment, line)
        for order in line.orders():
            bench.measure(order["model"])
        bench.close()


class _Bench:
    """One rank. Each model is measured in a session of its own, whose memory is freed with it."""

    def __init__(self, work: Work, environment: Environment, line: Line) -> None:
        import torch

        torch.set_num_threads(1)
        self._work, self._environment, self._line = work, environment, line
        self._point = Rendezvous(environment)

    def measure(self, number: int) -> None:
        """Measure all forms on the gradients of one model."""
        run = f"{self._environment.run_id}/gradients/{number}"
        session = connect_session(Strategy.parse(STRATEGY), self._point, run)
        try:
            _Measurement(self._work, self._line).run(number, self._work.models[number], session)
        finally:
            session.shutdown()

    def close(self) -> None:
        """End when all ranks are done."""
        self._line.wait()
        self._point.close()


def order_of(repetition: int, count: int) -> list[int]:
    """The order of the forms in a repetition, equal on all ranks. It varies, so no form has a fixed predecessor."""
    return [int(at) for at in np.random.default_rng(repetition).permutation(count)]


class _Measurement:
    """The repetitions of one model."""

    def __init__(self, work: Work, line: Line) -> None:
        self._work, self._line = work, line

    def run(self, number: int, model: Model, session: Session) -> None:
        """Measure all forms on a model, and report."""
        from .iterations import Ground, iteration_of

        self._ground = Ground(session, model.shapes)
        self._session = session
        self._forms = [iteration_of(name, self._ground) for name in self._work.forms]
        count = len(self._forms)
        times = np.zeros((self._work.repetitions, count))
        sent, used = np.zeros(count), np.zeros(count)
        correct = [form.exchanged_bytes == model.nbytes for form in self._forms]
        memory, speeds = MemoryProbe(self._line, 2 * model.nbytes), []
        for repetition in range(-WARM_UP, self._work.repetitions):
            for at in order_of(repetition + WARM_UP, count):
                self._begin(at, model.nbytes)
                if repetition < 0:
                    correct[at] &= self._check(at, repetition + WARM_UP)
                elapsed, cpu, moved = self._time(at)
                if repetition >= 0:
                    times[repetition, at] = elapsed
                    used[at] += cpu / len(times)
                    sent[at] += moved / len(times)
                if repetition == self._work.repetitions - 1:
                    correct[at] &= self._check(at, repetition + WARM_UP)
            speeds.append(memory.measure())
        right = self._line.gather(*map(float, correct)).all(axis=0)
        self._report(number, times, {"cpu_s": used, "sent_bytes": sent}, right, float(np.median(speeds)))

    def _check(self, at: int, seed: int) -> bool:
        form = self._forms[at]
        self._ground.fill(seed)
        form.ready()
        self._line.wait()  # one-sided transports may write into a peer's memory as soon as they run
        form.run()
        right = form.is_right(seed)
        self._line.wait()
        return right

    def _time(self, at: int) -> tuple[float, float, float]:
        """The slowest rank's seconds, all ranks' processor seconds, and the most bytes that a rank has sent."""
        form = self._forms[at]
        self._ground.fill_alike()
        form.ready()
        before = self._sent()
        self._line.wait()
        used, begun = time.process_time(), time.perf_counter()
        form.run()
        elapsed, used = time.perf_counter() - begun, time.process_time() - used
        found = self._line.gather(elapsed, used, self._sent() - before)
        return float(found[:, 0].max()), float(found[:, 1].sum()), float(found[:, 2].max())

    def _sent(self) -> int:
        sent, _ = self._session.engine.transport.traffic()
        return sum(sent.values())

    def _report(self, number: int, times: Table, means: dict[str, Table], correct: Any, bytes_per_s: float) -> None:
        bare = times[:, self._work.forms.index(BARE)]
        for at in range(len(self._forms) if self._line.rank == 0 else 0):
            self._line.send(
                "measured",
                model=number,
                form=at,
                times_s=times[:, at].tolist(),
                added_s=(times[:, at] - bare).tolist(),
                **{name: float(values[at]) for name, values in means.items()},
                correct=bool(correct[at]),
                bytes_per_s=bytes_per_s,
            )

    def _begin(self, form: int, nbytes: int) -> None:
        """Report which form starts."""
        if self._line.rank == 0:
            self._line.send("turn", form=form, bytes=nbytes)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
