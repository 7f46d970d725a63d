"""A process's part in the plans between the ranks of a group, each compiled once.

The registry's algorithms plan for ranks 0, 1, ...; ``among`` puts the numbers of processes in their place. What is
asked for again is kept, since every call of a collective asks.
"""

from __future__ import annotations

from functools import lru_cache

from .. import registry
from ..errors import PlanError
from ..nouns import Group
from ..plans.check import phases
from ..plans.messages import Program, compile_program
from ..plans.plan import Plan


@lru_cache(maxsize=256)
def compiled(plan: Plan, index: int) -> Program:
    """A process's part in a plan."""
    return compile_program(plan, index)


@lru_cache(maxsize=256)
def planned(algorithm: str, group: Group) -> Plan:
    """The plan of an algorithm that needs no arguments."""
    plan: Plan = registry.get("algorithms", algorithm).target(group)
    return plan


@lru_cache(maxsize=64)
def phases_of(plan: Plan) -> tuple[Plan, Plan]:
    """The reduce-scatter and the all-gather of an allreduce; raises PlanError where it has none."""
    return phases(plan)


@lru_cache(maxsize=64)
def has_phases(plan: Plan) -> bool:
    """Whether it has."""
    try:
        phases_of(plan)
    except PlanError:
        return False
    return True


@lru_cache(maxsize=64)
def broadcast_plan(world: int, root: int) -> Plan:
    """The plan of a broadcast to the first ``world`` processes."""
    plan: Plan = registry.get("algorithms", "broadcast").target(Group(world), root=root)
    return plan


@lru_cache(maxsize=256)
def among(plan: Plan, ranks: tuple[int, ...]) -> Plan:
    """A plan between the processes ``ranks``."""
    return plan if ranks == tuple(range(plan.world)) else plan.among(ranks)
