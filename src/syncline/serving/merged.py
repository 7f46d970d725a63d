"""Pushes of all workers as one: a plan sums them on their way to the owners, and another copies the weights back.

``Planned`` moves them as they are, ``Coded`` as a codec's payloads. The same on workers, owners or not, and on servers:
each runs its own part of the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..compression.compression import Compression
from ..compression.updates import Updates
from ..engine.work import Work
from ..plans.messages import Program
from ..session.communicator import WEIGHT_KEYS, compiled
from ..session.session import Session
from .records import Array, Record, write_into
from .shard import Holding, coded, placed, planned
from .traffic import Model


class Merged:
    """All workers' pushes as one, all workers' pulls as one: each begins when the one before has ended."""

    def __init__(self, session: Session, traffic: Planned | Coded, buckets: int) -> None:
        self._engine, self._traffic, self._buckets = session.engine, traffic, buckets
        self._pulls: list[Work] = []
        self._pushes = traffic.post()

    def coming(self, worker: int) -> Sequence[Work]:  # noqa: ARG002
        """Nothing: the last worker's push is waited for when it is applied."""
        return ()

    def settle(self, worker: int) -> None:  # noqa: ARG002
        """Wait for what is under way."""
        self._engine.wait(*self._pushes, *self._pulls)

    def take_next(self, worker: int) -> None:  # noqa: ARG002
        """Post it."""
        self._pushes = self._traffic.post()

    def release(self, workers: Sequence[int]) -> None:  # noqa: ARG002
        """One pull, of all."""
        self._pulls = [self._traffic.pull(number) for number in range(self._buckets)]

    def rest(self) -> None:
        """Wait for the pulls."""
        self._engine.wait(*self._pulls)


class Planned:
    """Gradients are summed by one half of the architecture's plan, weights copied by the other."""

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model = session, model
        self._plan, pull = session.strategy.halves(session.group)
        self._push, self._pull = (compiled(half, session.index) for half in (self._plan, pull))

    def push(self, number: int, label: str, **options: Any) -> Work:
        """One exchange."""
        array, key = self._model.gradients[number], self._model.first_key + number
        return self._session.engine.exchange(self._push, array, key, label, **options)

    def post(self) -> list[Work]:
        """An owner's part in the next push, one exchange for each bucket."""
        return push_plan(self._session, self._push, self._model.gradients)

    def exchanges(self) -> Merged:
        """All at once."""
        return Merged(self._session, self, len(self._model.layout.buckets))

    def pull(self, number: int) -> Work:
        """One exchange."""
        key, label = WEIGHT_KEYS + self._model.first_key + number, f"weights of bucket {number}"
        return self._session.engine.exchange(self._pull, self._model.weights[number], key, label)

    def holdings(self) -> list[Holding] | None:
        """Chunks of the plan."""
        model, index = self._model, self._session.index
        if index not in self._plan.owners:
            return None
        return planned(model.layout.buckets, model.gradients, model.weights, self._plan, index)

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

    def push(self, number: int, label: str, **options: Any) -> Work:
        """The first half of a reduction."""
        return self._session.reduce(self._compression, number, self._model.first_key + number, label, **options)

    def post(self) -> list[Work]:
        """An owner's part in the next push, the first half of a reduction for each bucket."""
        return push_coded(self._session, self._compression)

    def exchanges(self) -> Merged:
        """All at once."""
        return Merged(self._session, self, len(self._model.layout.buckets))

    def pull(self, number: int) -> Work:
        """What corresponds to the second half."""
        key, label = WEIGHT_KEYS + self._model.first_key + number, f"weights of bucket {number}"
        return self._session.pull(self._updates, number, key, label)

    def holdings(self) -> list[Holding] | None:
        """Whole blocks of the codec, with weights of the owner's."""
        if self._compression.participant.owner < 0:
            return None
        return coded(self._model.layout.buckets, self._model.gradients, self._updates)

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says the difference to these."""
        for bucket, array in zip(self._model.layout.buckets, self._model.weights, strict=True):
            write_into(records, [(part, array[at : at + part.elements]) for at, part in placed(bucket)])

    def resume_at(self, step: int) -> None:
        """Told to the codec behind what ``push`` has posted, in the thread that drives."""
        engine = self._session.engine
        engine.wait(engine.then("resume", (), partial(self._compression.resume_at, step)))


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
