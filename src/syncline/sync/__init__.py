"""Sync modes: when a worker may go on, what workers exchange, and what they agree on.

A clock counts a worker's finished steps, from 0. Sync modes do no I/O, do not wait and know no framework: the caller
queries them and acts on the answers.

Workers exchange gradients before an update (``due``) or weights after one (``Averages``). In the latter case either all
workers average their differences from the last agreed weights (``Agrees``), or each worker mixes its weights with the
weights of some others (``Mixes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from ..plans.plan import Plan

Rate = Literal["shared", "own"]
"""The learning rate of a single push: the optimizer's divided by the number of workers, or all of it."""

Momentum = Literal["auto", "shared", "own", "dana"]
"""The optimizer's state: one for all pushes, one per worker, or one per worker with look-ahead. With ``auto`` the
optimizer decides (``momentum_with``)."""

Kept = Literal["shared", "own", "dana"]
"""A momentum that the optimizer has decided."""

Elements = Any
"""A flat array of floating-point numbers, of NumPy or a framework, for computing in place."""


class SyncMode(Protocol):
    """The rules of one way to synchronize workers. Building a strategy refuses answers that no engine supports."""

    @property
    def merges(self) -> bool:
        """Whether the pushes of all workers in a step form one update, on which they agree.

        Otherwise every worker's push is an update of its own, without any agreement.
        """
        ...

    def due(self, step: int) -> bool:
        """Whether gradients are exchanged in that step (steps count from 0). Otherwise the step is local."""
        ...

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Whether a worker that has finished ``clock`` steps may start the next while the slowest is at ``slowest``."""
        ...


@runtime_checkable
class Applies(Protocol):
    """A mode whose pushes are updates of their own and that says how they are applied; the default is ``Applied``."""

    @property
    def rate(self) -> Rate:
        """The learning rate of a push."""
        ...

    @property
    def compensate(self) -> float:
        """The lambda of delay compensation, 0 for none."""
        ...


@dataclass(frozen=True)
class Applied:
    """The default for modes whose pushes are updates of their own."""

    rate: Rate = "shared"
    compensate: float = 0.0


def backup_of(mode: object) -> int:
    """The number of workers that updates do not wait for: the mode's ``backup``, or 0.

    A push that is late becomes part of the next update.
    """
    backup: int = getattr(mode, "backup", 0)
    return backup


def alone(mode: SyncMode) -> bool:
    """Whether every push is an update of its own: neither plans nor owners sum gradients."""
    return not mode.merges and not backup_of(mode)


def application_of(mode: SyncMode) -> Applies:
    """How the mode's pushes are applied."""
    return mode if isinstance(mode, Applies) else Applied()


def momentum_of(mode: SyncMode) -> Momentum:
    """Which pushes the optimizer's state belongs to."""
    momentum: Momentum = getattr(mode, "momentum", "shared") if alone(mode) else "shared"
    return momentum


def no_look_ahead(group: Mapping[str, Any]) -> bool:
    """Whether a group of an optimizer's values has no Nesterov's momentum to look ahead with."""
    return "nesterov" not in group or not group.get("momentum") or bool(group.get("dampening"))


def momentum_with(mode: SyncMode, groups: Sequence[Mapping[str, Any]]) -> Kept:
    """The mode's momentum with an optimizer that has these groups.

    ``auto`` is ``dana`` if all groups have the values of SGD with momentum, else ``shared``: only for that optimizer
    was ``dana`` measured, and ``own`` was not better than ``shared`` for others.
    """
    momentum = momentum_of(mode)
    if momentum != "auto":
        return momentum
    sgd = groups and all("dampening" in group and not no_look_ahead(group) for group in groups)
    return "dana" if sgd else "shared"


def wrong_application(mode: SyncMode) -> str:
    """The fault in a mode's rules for applying pushes, if any."""
    if backup_of(mode) and isinstance(mode, Applies):
        return "has backup workers, whose pushes are summed: rate and compensate of single pushes do not apply"
    rate: object = application_of(mode).rate
    factor: object = application_of(mode).compensate
    momentum: object = momentum_of(mode)
    if rate not in get_args(Rate):
        return f"has rate={rate!r}, which no owner supports: it must be {' or '.join(map(repr, get_args(Rate)))}"
    if momentum not in get_args(Momentum):
        known = " or ".join(map(repr, get_args(Momentum)))
        return f"has momentum={momentum!r}, which no owner supports: it must be {known}"
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < float("inf"):
        return f"has compensate={factor!r}: the lambda of delay compensation must be 0 (none) or more"
    return ""


@runtime_checkable
class Averages(Protocol):
    """A mode that exchanges weights. None of these steps may be ``due`` as well."""

    def averages(self, step: int) -> bool:
        """Whether weights are exchanged after that step's update."""
        ...


@runtime_checkable
class Advises(Protocol):
    """A mode that needs a run of some length."""

    def advice(self, steps: int) -> str:
        """The advice for a run that was too short with so many steps; empty if it was not."""
        ...


@runtime_checkable
class Agrees(Averages, Protocol):
    """A mode whose workers agree on weights by averaging their differences from the last agreed ones.

    The agreed weights start as the common initial weights and stay the same on all workers, bit for bit, because every
    worker computes them alike, element by element.
    """

    @property
    def remembers(self) -> bool:
        """Whether ``agree`` keeps state between agreements: an array like the weights, initially zeros."""
        ...

    def pull(self, workers: int) -> float:
        """The share of its difference from the agreed weights that a worker gives up.

        With 1 it takes over the agreed weights. With less they are a centre that no worker has, the result.
        """
        ...

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:
        """Update the agreed weights in place from the workers' mean difference, which may be overwritten."""
        ...


@runtime_checkable
class Mixes(Averages, Protocol):
    """A mode whose workers replace their weights by the mean of some workers' weights, without a common agreement."""

    def period(self, workers: int) -> int:
        """The number of successive exchanges whose plans, repeated, spread every worker's weights to all."""
        ...

    def mix(self, workers: int, step: int) -> Plan:
        """The plan of the mix after that step. Its sums become means, which preserve the mean over all workers."""
        ...


TESTED_STEPS = 64
"""The number of steps that are tested to find out what a mode does."""


def mixes_of(mode: Mixes, workers: int) -> list[Plan]:
    """The plans of a mode's first period."""
    steps = (step for step in count() if mode.averages(step))
    return [mode.mix(workers, step) for step in islice(steps, mode.period(workers))]


def exchanges_gradients(mode: SyncMode) -> bool:
    """Whether a mode exchanges gradients in any step."""
    return any(mode.due(step) for step in range(TESTED_STEPS))
