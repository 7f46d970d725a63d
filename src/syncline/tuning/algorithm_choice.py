"""``architecture=auto``: chooses the algorithm for each size by measurements of all workers when a run starts.

Rank 0 makes every decision and tells all, because ranks that ran different plans would wait for each other forever.
Only algorithms that all ranks have, with equal plans, are candidates. ``cache`` keeps the table for the next run on the
same machines. ``SYNCLINE_TUNING`` is ``on`` (measure once per set of machines), ``fresh`` (measure again) or ``off``
(choose by topology alone, ``Strategy.resolve``); it must be equal on all ranks.

Measuring takes about a second, on the engine that will run the algorithms. Three short runs of a ring's halves give
alpha, beta and gamma (``costs.plans``). Algorithms that the model finds hopeless at all sizes are never run. The others
run from small to large sizes, taking turns, as often as the remaining budget allows; an algorithm's time is the median
over repetitions of the slowest rank's time. Before a size is measured, each algorithm's time there is extrapolated: its
time at the smaller size, times the model's ratio between both. Algorithms that would be far behind are not run. If the
budget does not suffice for two candidates, as with large arrays on slow links, the extrapolation takes the place of the
measurement.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..compression.reducers.ways import way_of
from ..costs.cluster import Cluster
from ..costs.plans import fit_ring, plan_s
from ..errors import PlanError, UsageError
from ..nouns import Group
from ..plans.check import check, order_of_additions
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan
from ..session.session import Session
from ..strategy.choice import Choice, choose
from ..strategy.strategy import SAME_BITS, Strategy
from ..strategy.words import AUTO
from . import cache

Decision = TypeVar("Decision")

SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)
"""The sizes in bytes at which algorithms are measured."""

BUDGET_S = 1.0
HOPELESS = 3.0
"""An algorithm that is expected to be this many times slower than the best is not run."""

_PROBE_BYTES = (1 << 10, 16 << 10, 256 << 10)
_PROBE_S = 0.02
_BATCH_S = 0.5e-3
"""A small array is exchanged several times per measurement, to take about this long."""

_MOST_CALLS = 16
_MOST_ROUNDS = 9
_LEAST_ROUNDS = 2


@dataclass(frozen=True)
class Course:
    """The runs at one size: ``rounds`` times ``calls`` exchanges by each of ``names``, none if that is empty."""

    names: tuple[str, ...]
    calls: int = 1
    rounds: int = 1


def plan_course(foreseen_s: Mapping[str, float], remaining_s: float, sizes_left: int, meeting_s: float = 0.0) -> Course:
    """How to spend the budget at the next of ``sizes_left`` sizes, given the expected time of one exchange.

    Drops the slowest candidates until two rounds fit into the remaining time. Before each measurement the ranks meet at
    a barrier, for ``meeting_s``, and make one exchange that does not count, which brings them closer together. With
    long exchanges one of these suffices for all rounds.
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
    """The measurements at one start, made by all workers together."""

    def __init__(self, session: Session, plans: Mapping[str, Plan], budget_s: float = BUDGET_S) -> None:
        self._session = session
        self._plans = plans
        self._budget_s = budget_s
        # In the same memory as a training run's buckets. Sums of zeros stay zero, so repetitions cannot overflow.
        self._array: NDArray[np.float32] = session.engine.allocate(SIZES[-1], np.dtype(np.float32))

    def times(self) -> dict[str, list[float]]:
        """Seconds at each of SIZES, measured or extrapolated, for every algorithm that was not hopeless at once.

        Algorithms keep the order of the plans. On ranks other than 0 the numbers may differ in the last bits.
        """
        cluster, meeting_s = self._probe()
        began = time.perf_counter()
        model = {name: [plan_s(plan, size, cluster) for size in SIZES] for name, plan in self._plans.items()}
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

    def _probe(self) -> tuple[Cluster, float]:
        """The cluster's alpha, beta and gamma, from a ring's halves at the largest quick size; and a barrier's time."""
        group, rank = Group(self._session.world_size), self._session.rank
        gather, scatter = (
            compile_program(registry.get("algorithms", name).target(group), rank)
            for name in ("all_gather", "reduce_scatter")
        )
        self._run([gather, scatter], _PROBE_BYTES[0], 1, 1)  # the first use loads code and maps memory
        small = _PROBE_BYTES[0], self._run([gather], _PROBE_BYTES[0], 4, 3)[0]
        middle = _PROBE_BYTES[1], self._run([gather], _PROBE_BYTES[1], 1, 3)[0]
        fits = middle[1] * _PROBE_BYTES[2] / _PROBE_BYTES[1] <= _PROBE_S
        size = self._agree(_PROBE_BYTES[2 if fits else 1])
        large, reduced = self._run([gather, scatter], size, 1, 3)
        return fit_ring(group.workers, small, (size, large), (size, reduced)), small[1]

    def _run(self, programs: Sequence[Program], nbytes: int, calls: int, rounds: int) -> list[float]:
        """Seconds of an exchange by each program: the median over rounds of the slowest rank's mean over calls."""
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
        """Rank 0's decision, in place of this rank's."""
        told: Decision = json.loads(self._session.tell_all(json.dumps(mine).encode()))
        return told


def _hopeful(model: Mapping[str, Sequence[float]]) -> list[str]:
    """The algorithms that are less than hopeless in the model for at least one size."""
    best = [min(column) for column in zip(*model.values(), strict=True)]
    return [
        name
        for name, times_s in model.items()
        if any(seconds <= HOPELESS * least for seconds, least in zip(times_s, best, strict=True))
    ]


log = logging.getLogger("syncline")

VARIABLE = "SYNCLINE_TUNING"
_MODES = ("on", "fresh", "off")


def mode() -> str:
    """The value of ``SYNCLINE_TUNING``; raises UsageError for anything but on, fresh or off."""
    found = os.environ.get(VARIABLE) or "on"
    if found not in _MODES:
        raise UsageError(f"{VARIABLE}={found!r}: choose {', '.join(_MODES)}")
    return found


def is_wanted(asked: Strategy, resolved: Strategy, workers: int) -> bool:
    """Whether there is something to measure: ``auto``, more than one worker, and plans to choose from."""
    if way_of(resolved.codec_object()).carrier is not None:
        return False  # no plan carries the payloads of this codec
    return asked.architecture == AUTO and workers > 1 and resolved.collective is None and mode() != "off"


def tune(session: Session) -> None:
    """Give the session its table of algorithms; all workers call this together, before anything else.

    Takes a few small collectives if rank 0 has the table of an earlier run, else about a second.
    """
    with session.engine.uncounted():  # a run's start does not count as the training's communication
        plans = _common(session, _plans(session.strategy, session.group))
        kept = _kept(session, plans) if session.rank == 0 and mode() != "fresh" else None
        table = json.loads(session.tell_all(json.dumps([] if kept is None else kept.table).encode()))
        choice = Choice.read(table) if table else _measure(session, plans)
    session.run_by(choice)
    log.info("rank %d: architecture=auto runs %s", session.rank, choice)


SLOWER = 0.03
"""How much longer large arrays may take if schedules are tried, since trials win a few percent of an iteration."""

_ONE_PASS_BYTES = 1 << 20
"""From this size on, in shared memory, topology's choice runs, which makes one pass over memory.

No other algorithm moves fewer bytes, whatever a noisy measurement said.
"""


def candidates(strategy: Strategy, group: Group) -> dict[str, Plan]:
    """The plans to choose from by name, without duplicates; topology's choice is first.

    ``strategy`` is resolved. Algorithms with required arguments or servers are left out.
    """
    plans = _plans(strategy, group)
    return {name: plans[name] for name in _distinct(plans)}


def _plans(strategy: Strategy, group: Group) -> dict[str, Plan]:
    """The plan of every allreduce algorithm: topology's choice, then Syncline's own, short names first."""
    entries = [
        entry
        for entry in registry.entries("algorithms")
        if entry.capabilities.get("goal") == "allreduce" and "roles" not in entry.capabilities
    ]
    named = strategy.architecture.name
    entries.sort(key=lambda entry: (entry.name != named, not entry.own, len(entry.name), entry.name))
    found = {
        entry.name: _plan(entry, group) for entry in entries if not any(each.required for each in entry.parameters)
    }
    return {name: plan for name, plan in found.items() if plan is not None}


def of_one_order(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The plans that add in one common order, so that the choice among them changes no bits in any buckets.

    Among several such orders it takes the order of halving-doubling, which sends as many bytes as a ring. Empty if no
    plan has such an order.
    """
    orders = {name: found for name, plan in plans.items() if (found := order_of_additions(plan)) is not None}
    if not orders:
        return {}
    first = SAME_BITS if SAME_BITS in orders else next(iter(orders))
    names = sorted(orders, key=lambda name: name != first)
    return {name: plans[name] for name in names if orders[name] == orders[first]}


def _plan(entry: registry.Entry, group: Group) -> Plan | None:
    """The plan of an algorithm, None if it has none for this group.

    Nobody has asked for the algorithms of other packages, so their plans are proved before they may be chosen, and a
    faulty one is left out.
    """
    try:
        plan: Plan = entry.target(group)
    except UsageError:
        return None
    except Exception as error:
        if entry.own:
            raise
        log.warning("architecture=auto leaves %s out: %s: %s", entry.name, type(error).__name__, error)
        return None
    if not entry.own:
        try:
            check(plan)
        except PlanError as error:
            log.warning("architecture=auto leaves %s out: its plan is wrong: %s", entry.name, error)
            return None
    return plan


def _distinct(plans: Mapping[str, Plan]) -> list[str]:
    """The names of plans with distinct sets of transfers, the first of each: two levels on one node are a ring."""
    first: dict[tuple[int, bytes], str] = {}
    for name, plan in plans.items():
        rows = plan.rows
        first.setdefault((plan.chunks, rows[np.lexsort(rows.T[::-1])].tobytes()), name)
    return list(first.values())


def _common(session: Session, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The distinct plans that all ranks have and agree on, in rank 0's order; installations may differ."""
    mine = json.dumps({name: plan.digest for name, plan in plans.items()}).encode()
    first, *others = (json.loads(told) for told in session.gather(mine))
    common = dict(first)
    for rank, theirs in enumerate(others, 1):
        for name in [name for name in common if theirs.get(name) != common[name]]:
            del common[name]
            if session.rank == 0:
                why = "has a different algorithm of that name, or lists the transfers in another order"
                log.warning(
                    "architecture=auto leaves %s out: %s %s",
                    name,
                    session.name(rank),
                    why if name in theirs else "does not have it",
                )
    return {name: plans[name] for name in _distinct({name: plans[name] for name in common})}


def _kept(session: Session, plans: Mapping[str, Plan]) -> Choice | None:
    """The table of an earlier run, unless it names an algorithm that cannot run here."""
    kept = cache.read(_key(session, plans))
    return kept if kept is not None and kept.names <= plans.keys() else None


def _measure(session: Session, plans: Mapping[str, Plan]) -> Choice:
    times_s = Measuring(session, plans).times()
    if session.strategy.budget_s and (alike := _worth_trials(times_s, plans)):
        choice = choose(SIZES, alike)
    else:
        choice = choose(SIZES, times_s)
        if session.strategy.transport.name == "shm":
            choice = choice.until(_ONE_PASS_BYTES, next(iter(times_s)))
    table = session.tell_all(json.dumps(choice.table).encode())  # rank 0's, since other ranks may round differently
    if session.rank == 0:
        cache.write(_key(session, plans), choice, SIZES, times_s)
    return Choice.read(json.loads(table))


def _worth_trials(times_s: Mapping[str, list[float]], plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    """The times of plans of one order; empty if large arrays take clearly longer with these than with others."""
    alike = {name: times_s[name] for name in of_one_order(plans) if name in times_s}
    if not alike or min(found[-1] for found in alike.values()) > (1 + SLOWER) * min(t[-1] for t in times_s.values()):
        return {}
    return alike


def _key(session: Session, plans: Mapping[str, Plan]) -> str:
    assert session.roll is not None
    places = [(member.host, member.machine, member.cores) for member in session.roll.members]
    digests = {name: plan.digest for name, plan in plans.items()}
    return cache.key_of(str(session.strategy.transport), places, digests, tries=session.strategy.budget_s > 0)
