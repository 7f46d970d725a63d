"""Tuning: what ``architecture=auto`` runs at which size is measured when a run starts, by all workers together.

Owns the course of it: which algorithms can be chosen, whether the table of an earlier run on the same machines still
holds (``cache``), the measuring (``measuring``), and that all workers end with the same table. Every decision is made
by rank 0 and told to all, for two ranks that run different plans would wait for each other forever; only what all ranks
have, and have alike, is chosen from.

``SYNCLINE_TUNING`` is ``on`` (measure once per set of machines), ``fresh`` (measure anew) or ``off`` (the choice by
topology alone, ``Strategy.resolve``); all ranks need the same.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping

import numpy as np

from .. import registry
from ..compression.reducers.ways import way_of
from ..errors import PlanError, UsageError
from ..nouns import Group
from ..plans.check import check
from ..plans.plan import Plan
from ..plans.sums import order_of_additions
from ..session.session import Session
from ..strategy.choice import Choice, choose
from ..strategy.strategy import SAME_BITS, Strategy
from ..strategy.words import AUTO
from . import cache
from .measuring import SIZES, Measuring

log = logging.getLogger("syncline")

VARIABLE = "SYNCLINE_TUNING"
_MODES = ("on", "fresh", "off")


def mode() -> str:
    """What ``SYNCLINE_TUNING`` says; raises UsageError for anything but on, fresh or off."""
    found = os.environ.get(VARIABLE) or "on"
    if found not in _MODES:
        raise UsageError(f"{VARIABLE}={found!r}: choose {', '.join(_MODES)}")
    return found


def is_wanted(asked: Strategy, resolved: Strategy, workers: int) -> bool:
    """Whether there is something to choose by measuring: for ``auto``, among plans, between workers."""
    if way_of(resolved.codec_object()).carrier is not None:
        return False  # no plan carries such payloads
    return asked.architecture == AUTO and workers > 1 and resolved.collective is None and mode() != "off"


def tune(session: Session) -> None:
    """Give the session its table of algorithms; all workers call it together, before anything else.

    Takes a few small collectives when rank 0 has the table of an earlier run, else about a second.
    """
    with session.engine.uncounted():  # starting is no communication of the training
        plans = _common(session, _plans(session.strategy, session.group))
        kept = _kept(session, plans) if session.rank == 0 and mode() != "fresh" else None
        table = json.loads(session.tell_all(json.dumps([] if kept is None else kept.table).encode()))
        choice = Choice.read(table) if table else _measure(session, plans)
    session.run_by(choice)
    log.info("rank %d: architecture=auto runs %s", session.rank, choice)


SLOWER = 0.03
"""How much longer large arrays may take where schedules are tried, since trials win a few percent of an iteration."""

_ONE_PASS_BYTES = 1 << 20
"""Arrays in shared memory from this size on: nothing moves less than one pass, whatever a noisy moment measured."""


def candidates(strategy: Strategy, group: Group) -> dict[str, Plan]:
    """The plans to choose from by name, no two the same; the choice by topology comes first.

    ``strategy`` is resolved. Algorithms that need arguments, or have servers, are left out.
    """
    plans = _plans(strategy, group)
    return {name: plans[name] for name in _distinct(plans)}


def _plans(strategy: Strategy, group: Group) -> dict[str, Plan]:
    """Every allreduce that can be planned: topology's choice, then what comes with Syncline, plainer names first."""
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
    """Those that add in one order wherever an element lies: which of them runs, in whatever buckets, changes no bit.

    Of several such orders that of halving-doubling, which sends a ring's bytes; empty where nothing has one.
    """
    orders = {name: found for name, plan in plans.items() if (found := order_of_additions(plan)) is not None}
    if not orders:
        return {}
    first = SAME_BITS if SAME_BITS in orders else next(iter(orders))
    names = sorted(orders, key=lambda name: name != first)
    return {name: plans[name] for name in names if orders[name] == orders[first]}


def _plan(entry: registry.Entry, group: Group) -> Plan | None:
    """The plan of an algorithm, None where it has none for that group.

    Nobody asked for those of other packages: they are proved before they may be chosen, and a fault leaves them out.
    """
    try:
        plan: Plan = entry.target(group)
    except UsageError:
        return None
    except Exception as error:
        if entry.own:
            raise
        log.warning("architecture=auto leaves out %s: %s: %s", entry.name, type(error).__name__, error)
        return None
    if not entry.own:
        try:
            check(plan)
        except PlanError as error:
            log.warning("architecture=auto leaves out %s: its plan is wrong: %s", entry.name, error)
            return None
    return plan


def _distinct(plans: Mapping[str, Plan]) -> list[str]:
    """Of plans of the same transfers, in whatever order they are listed, the first: two levels on a node are a ring."""
    first: dict[tuple[int, bytes], str] = {}
    for name, plan in plans.items():
        rows = plan.rows
        first.setdefault((plan.chunks, rows[np.lexsort(rows.T[::-1])].tobytes()), name)
    return list(first.values())


def _common(session: Session, plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """The distinct plans that all ranks have, and have alike, in rank 0's order: hosts differ in what is installed."""
    mine = json.dumps({name: plan.digest for name, plan in plans.items()}).encode()
    first, *others = (json.loads(told) for told in session.gather(mine))
    common = dict(first)
    for rank, theirs in enumerate(others, 1):
        for name in [name for name in common if theirs.get(name) != common[name]]:
            del common[name]
            if session.rank == 0:
                why = "has another algorithm of that name, or one that lists its transfers in another order"
                log.warning(
                    "architecture=auto leaves out %s: %s %s",
                    name,
                    session.name(rank),
                    why if name in theirs else "does not have it",
                )
    return {name: plans[name] for name in _distinct({name: plans[name] for name in common})}


def _kept(session: Session, plans: Mapping[str, Plan]) -> Choice | None:
    """The table of an earlier run, when it names nothing else than can run here."""
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
    table = session.tell_all(json.dumps(choice.table).encode())  # rank 0's, whatever others would round to
    if session.rank == 0:
        cache.write(_key(session, plans), choice, SIZES, times_s)
    return Choice.read(json.loads(table))


def _worth_trials(times_s: Mapping[str, list[float]], plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    """The times of plans of one order; none where large arrays take clearly longer by these than by others."""
    alike = {name: times_s[name] for name in of_one_order(plans) if name in times_s}
    if not alike or min(found[-1] for found in alike.values()) > (1 + SLOWER) * min(t[-1] for t in times_s.values()):
        return {}
    return alike


def _key(session: Session, plans: Mapping[str, Plan]) -> str:
    assert session.roll is not None
    places = [(member.host, member.machine, member.cores) for member in session.roll.members]
    digests = {name: plan.digest for name, plan in plans.items()}
    return cache.key_of(str(session.strategy.transport), places, digests, tries=session.strategy.budget_s > 0)
