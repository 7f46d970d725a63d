"""How gradients come to the owners of a model's weights, and how the weights go back: plans, keys and arrays.

``Planned`` moves them as they are, ``Coded`` as a codec's payloads. The same on workers, owners or not, and on servers:
each runs its own part of the same plans. What all workers push is merged by one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ..compression.compression import Compression
from ..compression.updates import Updates
from ..engine.work import Work
from ..nouns import Bucket
from ..plans.messages import Program
from ..session.communicator import WEIGHT_KEYS, compiled
from ..session.session import Session
from .records import Array, Record, write_into
from .shard import Holding, coded, placed, planned


@dataclass(frozen=True, eq=False)
class Model:
    """A prepared model's arrays, by bucket; ``weights`` are those that all workers have.

    ``first_key`` begins the keys that tell its exchanges from those of others.
    """

    buckets: Sequence[Bucket]
    gradients: Sequence[Array]
    weights: Sequence[Array]
    compression: Compression | None
    first_key: int = 0


class Traffic(Protocol):
    """This process's part in the pushes and pulls of one model."""

    def push(self) -> list[Work]:
        """Post an owner's part in the next push, of all workers as one; it never ends when the workers leave."""
        ...

    def pull(self, number: int) -> Work:
        """Start the pull of a bucket's weights."""
        ...

    def holdings(self) -> list[Holding] | None:
        """What this process owns, None where it is no owner."""
        ...

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        ...

    def know(self, records: Sequence[Record]) -> None:
        """The workers have other weights than they were sent: these."""
        ...

    def resume_at(self, step: int) -> None:
        """Have an owner go on from that step, counted from 0."""
        ...


def traffic_of(session: Session, model: Model) -> Traffic:
    """How the strategy moves gradients and weights of that model."""
    return Planned(session, model) if model.compression is None else Coded(session, model, model.compression)


class Planned:
    """Gradients are summed by one half of the architecture's plan, weights copied by the other."""

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model = session, model
        self._plan, pull = session.strategy.halves(session.group)
        self._push, self._pull = (compiled(half, session.index) for half in (self._plan, pull))

    def push(self) -> list[Work]:
        """One exchange for each bucket."""
        return push_plan(self._session, self._push, self._model.gradients)

    def pull(self, number: int) -> Work:
        """One exchange."""
        key, label = WEIGHT_KEYS + self._model.first_key + number, f"weights of bucket {number}"
        return self._session.engine.exchange(self._pull, self._model.weights[number], key, label)

    def holdings(self) -> list[Holding] | None:
        """Chunks of the plan."""
        model, index = self._model, self._session.index
        if index not in self._plan.owners:
            return None
        return planned(model.buckets, model.gradients, model.weights, self._plan, index)

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:
        """Nothing depends on the step."""


class Coded:
    """Gradients come as a codec's payloads, and what the updates change goes so."""

    def __init__(self, session: Session, model: Model, compression: Compression) -> None:
        self._session, self._model, self._compression = session, model, compression
        self._updates = Updates(compression, model.weights)

    @property
    def keeps(self) -> bool:
        """As the codec does."""
        return self._updates.keeps

    def push(self) -> list[Work]:
        """The first half of a reduction for each bucket."""
        return push_coded(self._session, self._compression)

    def pull(self, number: int) -> Work:
        """What corresponds to the second half."""
        key, label = WEIGHT_KEYS + self._model.first_key + number, f"weights of bucket {number}"
        return self._session.pull(self._updates, number, key, label)

    def holdings(self) -> list[Holding] | None:
        """Whole blocks of the codec, with weights of the owner's."""
        if self._compression.participant.owner < 0:
            return None
        return coded(self._model.buckets, self._model.gradients, self._updates)

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says the difference to these."""
        for bucket, array in zip(self._model.buckets, self._model.weights, strict=True):
            write_into(records, [(part, array[at : at + part.elements]) for at, part in placed(bucket)])

    def resume_at(self, step: int) -> None:
        """Told to the codec behind what ``push`` has posted, in the thread that drives."""
        engine = self._session.engine
        engine.wait(engine.then("resume", (), partial(self._compression.resume_at, step)))


def push_program(session: Session) -> Program:
    """A worker's part in the push of a bucket whose gradients travel as they are."""
    return compiled(session.strategy.halves(session.group)[0], session.index)


def push_plan(session: Session, program: Program, gradients: Sequence[Array]) -> list[Work]:
    """Post a server's part in the next exchange of every bucket; it never ends when the workers leave."""
    return [
        session.engine.exchange(program, array, number, f"bucket {number}", tolerant=True)
        for number, array in enumerate(gradients)
    ]


def push_coded(session: Session, compression: Compression) -> list[Work]:
    """The same as ``push_plan`` for compressed gradients."""
    return [
        session.reduce(compression, number, number, f"bucket {number}", tolerant=True)
        for number in range(compression.buckets)
    ]
