"""Measuring allreduce algorithms against each other in about a second, on the engine that will run them.

Owns what is run how often. Knows nothing of how the table is kept or chosen.

Course. Three short runs of a ring's halves give alpha, beta and gamma (``costs.network``). Algorithms that the model
finds hopeless at all sizes are never run. From small to large sizes, each of the others then runs in turn a number of
times that the remaining budget allows; its time is the median over repetitions of the slowest rank's. Before a size is
measured, each algorithm's time there is foreseen: the model's ratio between the two sizes, applied to what was measured
at the smaller one. Who is foreseen far behind is not run; where the budget does not suffice for two candidates, as with
large arrays on slow links, what was foreseen stands for the measurement.

All ranks make the same runs, for rank 0 decides on them by its own clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..costs.network import Network, fit_ring, plan_s
from ..nouns import Group
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan
from ..session.session import Session

Decision = TypeVar("Decision")

SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes at which algorithms are measured."""

BUDGET_S = 1.0
HOPELESS = 3.0
"""How many times slower than the best an algorithm is foreseen that is not run."""

_PROBE_BYTES = (1 << 10, 16 << 10, 256 << 10)
_PROBE_S = 0.02
_BATCH_S = 0.5e-3
"""Small arrays are exchanged several times for one time: about this long."""

_MOST_CALLS = 16
_MOST_ROUNDS = 9
_LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Course:
    """What is run at one size: ``rounds`` times ``calls`` exchanges by each of ``names``, none when that is empty."""

    names: tuple[str, ...]
    calls: int = 1
    rounds: int = 1


def plan_course(foreseen_s: Mapping[str, float], remaining_s: float, sizes_left: int, meeting_s: float = 0.0) -> Course:
    """How to spend the budget at the next of ``sizes_left`` sizes, given what one exchange is foreseen to take.

    Candidates are dropped from the slowest on until two rounds fit into what remains. Before each time is taken the
    ranks meet, for ``meeting_s``, and exchange once, which brings them closer together; with long exchanges one for all
    rounds suffices.
    """
    best = min(foreseen_s.values())
    names = [name for name in foreseen_s if foreseen_s[name] <= HOPELESS * best]
    calls = min(_MOST_CALLS, max(1, int(_BATCH_S / best)))

    def cost_s(rounds: int) -> float:
        exchanges = rounds * (calls + 1) if calls > 1 else rounds + 1
        return exchanges * sum(foreseen_s[name] for name in names) + rounds * len(names) * meeting_s

    while len(names) > 1 and cost_s(_LEAST_ROUNDS) > remaining_s:
        names.remove(max(names, key=foreseen_s.__getitem__))
    if len(names) < 2:
        return Course(())
    rounds = _MOST_ROUNDS
    while rounds > _LEAST_ROUNDS and cost_s(rounds) > remaining_s / sizes_left:
        rounds -= 1
    return Course(tuple(names), calls, rounds)


class Measuring:
    """One start's measurements; made and used by all workers together."""

    def __init__(self, session: Session, plans: Mapping[str, Plan], budget_s: float = BUDGET_S) -> None:
        self._session = session
        self._plans = plans
        self._budget_s = budget_s
        # Where a training run has its buckets. Zeros stay zeros, however often they are added.
        self._array: NDArray[np.float32] = session.engine.allocate(SIZES[-1], np.dtype(np.float32))

    def times(self) -> dict[str, list[float]]:
        """Seconds at each of SIZES, measured or foreseen, of every algorithm that was not hopeless from the start.

        Algorithms keep the order of the plans. On ranks other than 0 they may differ in the last bits.
        """
        network, meeting_s = self._probe()
        began = time.perf_counter()
        model = {name: [plan_s(plan, size, network) for size in SIZES] for name, plan in self._plans.items()}
        hopeful = self._agree(_hopeful(model))
        model = {name: model[name] for name in hopeful}
        programs = {name: compile_program(self._plans[name], self._session.rank) for name in model}
        times_s: dict[str, list[float]] = {name: [] for name in model}
        for position, nbytes in enumerate(SIZES):
            foreseen = {
                name: found[-1] * model[name][position] / model[name][position - 1] if found else model[name][position]
                for name, found in times_s.items()
            }
            left = self._budget_s - (time.perf_counter() - began)
            course = Course(**self._agree(asdict(plan_course(foreseen, left, len(SIZES) - position, meeting_s))))
            found = self._run([programs[name] for name in course.names], nbytes, course.calls, course.rounds)
            foreseen.update(zip(course.names, found, strict=True))
            for name, seconds in foreseen.items():
                times_s[name].append(seconds)
        return times_s

    def _probe(self) -> tuple[Network, float]:
        """Alpha, beta and gamma by a ring's halves, at the largest size that is quick enough; seconds of a meeting."""
        group, rank = Group(self._session.world_size), self._session.rank
        gather, scatter = (
            compile_program(registry.get("algorithms", name).target(group), rank)
            for name in ("all_gather", "reduce_scatter")
        )
        self._run([gather, scatter], _PROBE_BYTES[0], 1, 1)  # first uses load code and map memory
        small = _PROBE_BYTES[0], self._run([gather], _PROBE_BYTES[0], 4, 3)[0]
        middle = _PROBE_BYTES[1], self._run([gather], _PROBE_BYTES[1], 1, 3)[0]
        fits = middle[1] * _PROBE_BYTES[2] / _PROBE_BYTES[1] <= _PROBE_S
        size = self._agree(_PROBE_BYTES[2 if fits else 1])
        large, reduced = self._run([gather, scatter], size, 1, 3)
        return fit_ring(group.workers, small, (size, large), (size, reduced)), small[1]

    def _run(self, programs: Sequence[Program], nbytes: int, calls: int, rounds: int) -> list[float]:
        """Seconds of one exchange by each program: median over rounds of the slowest rank's mean over calls."""
        if not programs:
            return []
        array, run = self._array[: nbytes // self._array.itemsize], self._session.run
        own = np.empty((rounds, len(programs)))
        for number in range(rounds):
            for shift in range(len(programs)):
                place = (number + shift) % len(programs)
                program = programs[place]
                if number == 0 or calls > 1:
                    run(program, array, "tuning")
                self._session.barrier()
                begun = time.perf_counter()
                for _ in range(calls):
                    run(program, array, "tuning")
                own[number, place] = (time.perf_counter() - begun) / calls
        every = [np.frombuffer(data).reshape(own.shape) for data in self._session.gather(own.tobytes())]
        found: list[float] = np.median(np.max(every, axis=0), axis=0).tolist()
        return found

    def _agree(self, mine: Decision) -> Decision:
        """Rank 0's decision, whatever this rank would have decided."""
        told: Decision = json.loads(self._session.tell_all(json.dumps(mine).encode()))
        return told


def _hopeful(model: Mapping[str, Sequence[float]]) -> list[str]:
    """The algorithms that the model finds less than hopeless at one size at least."""
    best = [min(column) for column in zip(*model.values(), strict=True)]
    return [
        name
        for name, times_s in model.items()
        if any(seconds <= HOPELESS * least for seconds, least in zip(times_s, best, strict=True))
    ]
