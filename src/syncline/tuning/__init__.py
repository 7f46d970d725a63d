"""Tuning: what ``architecture=auto`` runs at which size is measured when a run starts, by all workers together.

Owns the course of it: which algorithms can be chosen, whether the table of an earlier run on the same machines still
holds (``cache``), the measuring (``measuring``), and that all workers end with the same table. Every decision is made
by rank 0 and told to all, for two ranks that run different plans would wait for each other forever.

``SYNCLINE_TUNING`` is ``on`` (measure once per set of machines), ``fresh`` (measure anew) or ``off`` (the choice by
topology alone, ``Strategy.resolve``); all ranks need the same.
"""

from __future__ import annotations

import json
import logging
import os

import numpy as np

from .. import registry
from ..choice import Choice, choose
from ..errors import UsageError
from ..plan import Plan
from ..session import Session
from ..strategy import Strategy
from ..types import Group
from ..words import AUTO
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
    if resolved.codec_object().combine not in ("sum", "rounds"):
        return False  # no plan carries such payloads
    return asked.architecture == AUTO and workers > 1 and resolved.architecture.name != "native" and mode() != "off"


def tune(session: Session) -> None:
    """Give the session its table of algorithms; all workers call it together, before anything else.

    Takes a few small collectives when rank 0 has the table of an earlier run, else about a second.
    """
    blocked_s = session.engine.blocked_s
    kept = _kept(session) if session.rank == 0 and mode() != "fresh" else None
    table = json.loads(session.tell_all(json.dumps([] if kept is None else kept.table).encode()))
    choice = Choice.read(table) if table else _measure(session)
    session.run_by(choice)
    log.info("rank %d: architecture=auto runs %s", session.rank, choice)
    session.engine.blocked_s = blocked_s  # starting is no communication of the training


_ONE_PASS_BYTES = 1 << 20
"""Arrays in shared memory from this size on: nothing moves less than one pass, whatever a noisy moment measured."""


def candidates(strategy: Strategy, group: Group) -> dict[str, Plan]:
    """The plans to choose from by name: the choice by topology first, then every allreduce that is not the same.

    ``strategy`` is resolved. Algorithms that need arguments, or servers, have no plan for the group and are left out.
    """
    found: dict[str, Plan] = {}
    seen: set[bytes] = set()
    # Of equal plans the plainer name stays: two levels on one node are a ring.
    for name in dict.fromkeys([strategy.architecture.name, *sorted(_architectures(), key=len)]):
        entry = registry.get("algorithms", name)
        if any(parameter.required for parameter in entry.parameters):
            continue
        try:
            plan: Plan = entry.target(group)
        except UsageError:
            continue
        rows = plan.rows
        same = np.array([plan.chunks]).tobytes() + rows[np.lexsort(rows.T[::-1])].tobytes()
        if same not in seen:
            seen.add(same)
            found[name] = plan
    return found


def _kept(session: Session) -> Choice | None:
    """The table of an earlier run, when its algorithms still exist."""
    kept = cache.read(_key(session))
    return kept if kept is not None and kept.names <= _architectures() else None


def _architectures() -> set[str]:
    return {entry.name for entry in registry.entries("algorithms") if entry.capabilities.get("goal") == "allreduce"}


def _measure(session: Session) -> Choice:
    plans = candidates(session.strategy, session.group)
    times_s = Measuring(session, plans).times()
    choice = choose(SIZES, times_s)
    if session.strategy.transport.name == "shm":
        choice = choice.until(_ONE_PASS_BYTES, next(iter(times_s)))
    table = session.tell_all(json.dumps(choice.table).encode())  # rank 0's, whatever others would round to
    if session.rank == 0:
        cache.write(_key(session), choice, SIZES, times_s)
    return Choice.read(json.loads(table))


def _key(session: Session) -> str:
    assert session.roll is not None
    places = [(member.host, member.machine, member.cores) for member in session.roll.members]
    return cache.key_of(str(session.strategy.transport), places)
