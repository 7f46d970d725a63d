"""Sync modes: when a worker may go on, what is exchanged, and what is agreed on.

A clock counts a worker's finished steps, from 0. Nothing here does I/O, waits or knows a framework: the caller asks,
and acts on the answer.

Workers exchange gradients before an update (``due``), or weights after one (``Averages``). Of weights either the
difference from those that all have agreed on last goes to all (``Agrees``), or each worker's own to some (``Mixes``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ..plans.plan import Plan

Rate = Literal["shared", "own"]
"""The learning rate of a push that is an update by itself: the optimizer's divided among the workers, or all of it."""

Momentum = Literal["shared", "own", "dana"]
"""What an optimizer keeps of pushes that are updates by themselves: of all, or of each worker's; with a look-ahead."""

Elements = Any
"""A flat array of floating-point numbers, NumPy's or of a framework, that is computed with in place."""


class SyncMode(Protocol):
    """The rules of one way to coordinate workers; what no engine does is refused when the strategy is built."""

    @property
    def merges(self) -> bool:
        """True when what all workers push for a step is one update, to which they come together and agree.

        Otherwise every worker's push is an update by itself, and nothing is agreed on.
        """
        ...

    def due(self, step: int) -> bool:
        """True when gradients are exchanged in that step (steps count from 0); else the step is the worker's own."""
        ...

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """True when a worker that has finished ``clock`` steps may start the next, the slowest being at ``slowest``."""
        ...


@runtime_checkable
class Applies(Protocol):
    """A mode whose pushes are updates by themselves and that says how one is applied; others do as ``Applied`` does."""

    @property
    def rate(self) -> Rate:
        """With which learning rate."""
        ...

    @property
    def compensate(self) -> float:
        """The lambda of delay compensation, 0 for none."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A mode whose pushes are updates by themselves and that says by which momentum; others have one of all pushes."""

    @property
    def momentum(self) -> Momentum:
        """Whose pushes the optimizer's state, which one goes by, is of."""
        ...


@dataclass(frozen=True)
class Applied:
    """How a push that is an update by itself is applied where the mode says nothing of it."""

    rate: Rate = "shared"
    compensate: float = 0.0


@runtime_checkable
class Spares(Protocol):
    """A mode whose updates do not wait for the slowest workers: a push that is late is part of the next one."""

    @property
    def backup(self) -> int:
        """How many workers an update does not wait for; 0 for none."""
        ...


def backup_of(mode: object) -> int:
    """How many workers updates do not wait for."""
    return mode.backup if isinstance(mode, Spares) else 0


def alone(mode: SyncMode) -> bool:
    """Whether every push is an update by itself: gradients are not summed, neither by a plan nor by owners."""
    return not mode.merges and not backup_of(mode)


def application_of(mode: SyncMode) -> Applies:
    """How the mode's pushes are applied."""
    return mode if isinstance(mode, Applies) else Applied()


def momentum_of(mode: SyncMode) -> Momentum:
    """Whose pushes the optimizer's state is of by which one is applied."""
    return mode.momentum if alone(mode) and isinstance(mode, Recalls) else "shared"


def wrong_application(mode: SyncMode) -> str:
    """What is wrong with how a mode says that its pushes are applied, if anything."""
    if backup_of(mode) and isinstance(mode, Applies):
        return "has backup workers, whose pushes are summed, and says how one is applied by itself (rate, compensate)"
    rate: object = application_of(mode).rate
    factor: object = application_of(mode).compensate
    momentum: object = momentum_of(mode)
    if rate not in get_args(Rate):
        return f"has rate={rate!r}, with which no owner applies a push: it is {' or '.join(map(repr, get_args(Rate)))}"
    if momentum not in get_args(Momentum):
        known = " or ".join(map(repr, get_args(Momentum)))
        return f"has momentum={momentum!r}, which no owner keeps: it is {known}"
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < float("inf"):
        return f"has compensate={factor!r}: it is the lambda of delay compensation, 0 (none) or more"
    return ""


@runtime_checkable
class Averages(Protocol):
    """A mode that exchanges weights; no step of it is ``due`` as well."""

    def averages(self, step: int) -> bool:
        """True when weights are exchanged after that step's update."""
        ...


@runtime_checkable
class Agrees(Averages, Protocol):
    """A mode whose workers agree on weights: by how much they differ from the last agreed ones is averaged over all.

    The agreed weights begin as those that all start from, and are the same on all workers bit for bit, since each
    computes them alike. What they become is a function of numbers alone, element by element.
    """

    @property
    def remembers(self) -> bool:
        """Whether ``agree`` keeps something from one agreement for the next: an array like the weights, first zeros."""
        ...

    def pull(self, workers: int) -> float:
        """The share of its difference from the agreed weights that a worker gives up.

        With 1 it takes the agreed weights over. With less they are a centre that no worker has, which is the result.
        """
        ...

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:
        """Update the agreed weights in place by the workers' mean difference, which may be overwritten."""
        ...


@runtime_checkable
class Mixes(Averages, Protocol):
    """A mode whose workers replace their weights by the mean of some workers': nothing is agreed on by all."""

    def period(self, workers: int) -> int:
        """So many exchanges have plans that bring what each has to everybody, if they are repeated."""
        ...

    def mix(self, workers: int, step: int) -> Plan:
        """Who adds whose weights after that step: a plan for a mix. Sums become means, which keep that of all."""
        ...


LOOKED_AT = 64
"""So many steps of a mode are looked at to know what it does."""


def mixes_of(mode: Mixes, workers: int) -> list[Plan]:
    """The plans of a mode's first period."""
    steps = (step for step in count() if mode.averages(step))
    return [mode.mix(workers, step) for step in islice(steps, mode.period(workers))]


def exchanges_gradients(mode: SyncMode) -> bool:
    """Whether a mode exchanges gradients in any step."""
    return any(mode.due(step) for step in range(LOOKED_AT))
