"""Laws of algorithms: every plan is proved on sets of ranks, correct on numbers, and the same on all ranks.

Groups have 1 to 64 workers on nodes of many shapes, with servers: those that the algorithm declares, or unused ones.
The goal and the roles of an algorithm determine the laws that apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..algorithms import Roles
from ..errors import PlanError
from ..nouns import Group
from ..plans.check import check, phases
from ..plans.plan import Goal, Plan
from ..strategy.grammar import read_part
from ..strategy.words import bind, roles_of
from .laws import Laws, require, same

Held = list[list[NDArray[Any] | None]]
"""The chunks of every rank; None for a missing chunk."""


@dataclass(frozen=True)
class Subject:
    """An algorithm with its arguments, its declarations, and the numbers of workers to test."""

    plan: Callable[..., Plan]
    goal: Goal
    roles: Roles | None
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """An algorithm and a group, and the root of a broadcast."""

    subject: Subject
    group: Group
    root: int | None = None

    @cached_property
    def plan(self) -> Plan:
        return self.anew()

    def anew(self) -> Plan:
        """The plan, made again."""
        return self.subject.plan(self.group, **({} if self.root is None else {"root": self.root}))

    def __str__(self) -> str:
        return f"{self.group}" + ("" if self.root is None else f" and root={self.root}")


LAWS: Laws[Subject, Case] = Laws()


def check_algorithm(
    algorithm: str | Callable[..., Plan], *, goal: Goal = "allreduce", workers: Iterable[int] = range(1, 65)
) -> tuple[str, ...]:
    """Check an algorithm, or the registered one of a text such as ``"double_tree(pieces=3)"``, against all laws.

    ``goal`` is for a function that is not registered. Returns the names of the laws that apply. Raises BrokenLaw, an
    AssertionError with the law, the algorithm and the failing group.
    """
    if isinstance(algorithm, str):
        part = bind("algorithms", read_part(algorithm))
        entry, roles = registry.get("algorithms", part.name), roles_of(part)
        subject = Subject(partial(entry.target, **part.arguments), entry.capabilities["goal"], roles, tuple(workers))
        shown = algorithm
    else:
        subject, shown = Subject(algorithm, goal, None, tuple(workers)), getattr(algorithm, "__name__", str(algorithm))
    return LAWS.hold(subject, f"algorithm {shown}", 0, 0)


# Groups --------------------------------------------------------------------------------------------------------------


def node_shapes(workers: int) -> Iterator[tuple[int, ...]]:
    """Node numbers of the workers: none, one node, blocks, interleaved, a node for each, and several uneven ones."""
    yield ()
    yield (0,) * workers
    yield tuple(range(workers))
    for size in (2, 3, 8):
        yield tuple(rank // size for rank in range(workers))
        yield tuple(rank % size for rank in range(workers))
    yield tuple(int(rank.bit_length()) for rank in range(workers))
    yield tuple(7 - rank * rank % 5 for rank in range(workers))


def groups(subject: Subject, seed: int = 0, count: int = 0) -> Iterator[Case]:  # noqa: ARG001
    """All groups that the algorithm supports."""
    roles = subject.roles
    for workers in subject.workers:
        if roles is not None:
            if roles.apart or roles.owners <= workers:
                shapes = node_shapes(workers) if roles.local else [()]
                yield from (Case(subject, Group(workers, roles.servers, nodes)) for nodes in shapes)
            continue
        for nodes in node_shapes(workers):
            yield Case(subject, Group(workers, nodes=nodes))
        yield Case(subject, Group(workers, servers=2))
        if subject.goal == "broadcast":
            for root in sorted({workers // 2, workers - 1}):
                yield Case(subject, Group(workers), root)


def different(subject: Subject, seed: int, count: int) -> Iterator[Case]:
    """One group for each distinct plan of the algorithm."""
    seen = set()
    for case in groups(subject, seed, count):
        plan = case.plan
        key = plan.digest, plan.world, plan.members, plan.goal, plan.owners, plan.root
        if key not in seen:
            seen.add(key)
            yield case


def small(subject: Subject, seed: int, count: int) -> Iterator[Case]:
    """The groups of up to a dozen workers, for slow laws."""
    return different(replace(subject, workers=tuple(few for few in subject.workers if few <= 12)), seed, count)


# Laws ----------------------------------------------------------------------------------------------------------------


@LAWS.law(groups)
def the_same_group_gets_the_same_plan(case: Case) -> None:
    """A plan depends only on the group, since each rank makes its own. It has the declared goal and all workers."""
    plan, again, goal = case.plan, case.anew(), case.subject.goal
    require(plan.digest == again.digest, "a second call returns a plan with other transfers, or in another order")
    require(plan.goal == goal, f"the plan is for {plan.goal}, but the declared goal is {goal}")
    everyone = tuple(range(case.group.workers))
    require(plan.members == everyone, f"the members are {plan.members}, but the workers are {everyone}")
    wanted = case.group.processes
    require(plan.world == wanted, f"the plan is for {plan.world} of {wanted} processes: pass the group to Plan.of")


@LAWS.law(different)
def every_plan_is_proved(case: Case) -> None:
    """Every rank ends with all contributions, each once, and no transfer is useless (``plans.check``)."""
    check(case.plan)


@LAWS.law(groups, lambda case: case.group.workers == 1)
def one_worker_has_nothing_to_send(case: Case) -> None:
    transfers = len(case.plan)
    require(transfers == 0, f"the plan of one worker has {transfers} transfers")


@LAWS.law(small)
def sums_are_right_and_equal_everywhere(case: Case) -> None:
    """Run step by step on numbers, a plan gives correct exact sums, and rounded sums with equal bits everywhere."""
    plan = case.plan
    draw = np.random.default_rng(case.group.workers)
    exact = draw.integers(-99, 99, (plan.world, plan.chunks, 3)).astype(np.float64)
    held = executed(plan, exact)
    replicas = executed(plan, draw.standard_normal(exact.shape).astype(np.float32))
    for chunk in range(plan.chunks):
        holders = [plan.owners[chunk]] if plan.goal == "reduce_scatter" else plan.members
        for rank in holders:
            same(there(held, rank, chunk), wanted(plan, exact, chunk), f"chunk {chunk} of rank {rank}")
            first = there(replicas, holders[0], chunk)
            same(there(replicas, rank, chunk), first, f"chunk {chunk} of rank {rank}, beside rank {holders[0]}")


@LAWS.law(small, lambda case: case.subject.goal == "allreduce" and case.group.workers > 1 and splits(case.plan))
def halves_add_up_to_the_whole(case: Case) -> None:
    """If an allreduce splits into a reduce-scatter and an all-gather, these send the same transfers."""
    plan = case.plan
    halves = phases(plan)
    sent = sum((half.bytes_sent(1.0) for half in halves), np.zeros(plan.world))
    require(
        bool(np.allclose(sent, plan.bytes_sent(1.0))),
        "the two halves together send other numbers of bytes than the whole",
    )
    require(halves[0].owners == halves[1].owners, "the two halves have different owners")


@LAWS.law(groups, lambda case: case.subject.roles is not None)
def owners_are_at_the_declared_places(case: Case) -> None:
    """Push and pull are proved between the workers and the declared owners, also for a single worker."""
    roles = case.subject.roles
    assert roles is not None
    push, pull = roles.halves(case.group)
    places = roles.places(case.group)
    for half, goal in ((push, "reduce_scatter"), (pull, "all_gather")):
        check(half)
        require(half.goal == goal, f"{half.name} is for {half.goal}, but this half must be for {goal}")
        owners = tuple(dict.fromkeys(half.owners))
        require(owners == places, f"{half.name} has the owners {half.owners}, but the roles declare {places}")
    registry.get("algorithms", roles.beside)


# What a plan means ---------------------------------------------------------------------------------------------------


def splits(plan: Plan) -> bool:
    """Whether an allreduce has one owner per chunk, so that it has two halves."""
    try:
        phases(plan)
    except PlanError:
        return False
    return True


def executed(plan: Plan, given: NDArray[Any]) -> Held:
    """The chunks of every rank after the plan: the definition of its meaning, step by step on a copy of the state.

    ``given`` are the arrays of all ranks: (world, chunks, elements).
    """
    held = start(plan, given)
    for step in sorted({transfer.step for transfer in plan}):
        before = [list(chunks) for chunks in held]
        for transfer in plan:
            if transfer.step == step:
                for chunk in range(transfer.chunk, transfer.chunk + transfer.count):
                    come, mine = before[transfer.src][chunk], held[transfer.dst][chunk]
                    require(
                        come is not None, f"{transfer} sends chunk {chunk}, which rank {transfer.src} does not have"
                    )
                    add = transfer.op == "reduce" and mine is not None
                    held[transfer.dst][chunk] = mine + come if add else come  # type: ignore[operator]
    return held


def start(plan: Plan, given: NDArray[Any]) -> Held:
    """The chunks of every rank at the start."""

    def has(rank: int, chunk: int) -> bool:
        if plan.goal in ("allreduce", "reduce_scatter"):
            return rank in plan.members
        return rank == (plan.owners[chunk] if plan.goal == "all_gather" else plan.root)

    return [
        [given[rank, chunk] if has(rank, chunk) else None for chunk in range(plan.chunks)] for rank in range(plan.world)
    ]


def wanted(plan: Plan, given: NDArray[Any], chunk: int) -> NDArray[Any]:
    """The expected value of a chunk at the end."""
    if plan.goal in ("allreduce", "reduce_scatter"):
        total: NDArray[Any] = given[list(plan.members), chunk].sum(axis=0)
        return total
    found: NDArray[Any] = given[plan.owners[chunk] if plan.goal == "all_gather" else plan.root, chunk]
    return found


def there(held: Held, rank: int, chunk: int) -> NDArray[Any]:
    """A chunk that a rank must have."""
    found = held[rank][chunk]
    if found is None:
        raise AssertionError(f"rank {rank} ends without chunk {chunk}")
    return found
