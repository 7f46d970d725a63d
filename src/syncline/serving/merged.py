"""Pushes of all workers as one: a plan sums them on their way to the owners, and another copies the weights back.

``Planned`` moves them as they are, ``Coded`` as a codec's payloads. The same on workers, owners or not, and on servers:
each runs its own part of the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..compression.compression import Compression
from ..compression.updates import Updates
from ..engine.order import CodedOrder, Order, When, Work
from ..plans.messages import Program
from ..session.communicator import compiled
from ..session.layout import Layout
from ..session.session import Session
from ..session.tickets import WEIGHT_KEYS
from .records import Array, Record, write_into
from .shard import Holding, coded, placed, planned
from .traffic import Model
from .updating import Update, Updating


class Merged:
    """All workers' pushes as one, all workers' pulls as one, bucket by bucket.

    A bucket's next push and its pull begin when it has been updated, whatever has become of the others.
    """

    def __init__(self, session: Session, traffic: Planned | Coded, layout: Layout, apart: bool) -> None:
        self._engine, self._traffic = session.engine, traffic
        self._whens = [When(priority=priority) for priority in layout.priorities]
        buckets = range(len(layout.buckets))
        self._updating = Updating(session.engine, len(buckets), apart)
        self._pulls: dict[int, Work] = {}
        self._pushes = [self._post(number) for number in buckets]
        for number in buckets:
            self._expect(number)

    def coming(self, worker: int) -> Sequence[Work]:  # noqa: ARG002
        """Nothing: what has come is updated as it comes."""
        return ()

    def settle(self, worker: int) -> None:  # noqa: ARG002
        """Wait for what is under way."""
        self._engine.wait(*self._pushes, *self._pulls.values())

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """The plan has summed them."""
        raise NotImplementedError

    def update(self, worker: int, bucket: int, update: Update) -> None:  # noqa: ARG002
        """As ``Updating`` does."""
        self._updating.say(update)()

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """They have been told: what is updated goes to all."""

    def rest(self) -> None:
        """Wait for the pulls."""
        self._engine.wait(*self._pulls.values())

    def close(self) -> None:
        """The pushes that have come are none."""
        self._updating.close()

    def _expect(self, number: int) -> None:
        """Update a bucket when its push, which is posted, has come, and the pull before does not read the weights."""
        before = self._pulls.get(number)
        came = [self._pushes[number], *([] if before is None else [before])]
        self._updating.after(number, came, partial(self._go_on, number))

    def _go_on(self, number: int) -> None:
        """A bucket has been updated."""
        self._pulls[number] = self._traffic.pull(number, self._whens[number])
        self._pushes[number] = self._post(number)
        self._expect(number)

    def _post(self, number: int) -> Work:
        return self._traffic.post(number, self._whens[number])


class Planned:
    """Gradients are summed by one half of the architecture's plan, weights copied by the other."""

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model, self.buckets = session, model, len(model.layout.buckets)
        self._plan, half = session.strategy.halves(session.group)
        push, pull, layout = compiled(self._plan, session.index), compiled(half, session.index), model.layout
        arrays = list(zip(model.gradients, model.weights, strict=True))
        first = model.first_key
        self._push = [Order(push, arrays[i][0], first + i, layout.labels[i]) for i in range(self.buckets)]
        self._post = planned_posts(push, model.gradients)
        self._pull = [Order(pull, arrays[i][1], WEIGHT_KEYS + first + i, _weights_of(i)) for i in range(self.buckets)]

    def push(self, number: int, when: When) -> Work:
        """One exchange."""
        return self._session.engine.start(self._push[number], when)

    def post(self, number: int, when: When) -> Work:
        """One exchange, which never ends when the workers leave."""
        return self._session.engine.start(self._post[number], when)

    def exchanges(self, apart: bool) -> Merged:
        """Of all workers at once."""
        return Merged(self._session, self, self._model.layout, apart)

    def pull(self, number: int, when: When) -> Work:
        """One exchange."""
        return self._session.engine.start(self._pull[number], when)

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
        self.buckets = len(model.layout.buckets)
        self._updates = Updates(compression, model.weights)
        first, labels, updates = model.first_key, model.layout.labels, self._updates
        self._push = [session.coded_order(compression, i, first + i, labels[i]) for i in range(self.buckets)]
        self._post = coded_posts(session, compression)
        self._pull = [
            session.reducers_order(partial(updates.pieces, i), WEIGHT_KEYS + first + i, _weights_of(i))
            for i in range(self.buckets)
        ]

    @property
    def keeps(self) -> bool:
        """As the codec does."""
        return self._updates.keeps

    def push(self, number: int, when: When) -> Work:
        """The first half of a reduction."""
        return self._session.engine.start(self._push[number], when)

    def post(self, number: int, when: When) -> Work:
        """The first half of a reduction, which never ends when the workers leave."""
        return self._session.engine.start(self._post[number], when)

    def exchanges(self, apart: bool) -> Merged:
        """Of all workers at once."""
        return Merged(self._session, self, self._model.layout, apart)

    def pull(self, number: int, when: When) -> Work:
        """What corresponds to the second half."""
        return self._session.engine.start(self._pull[number], when)

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


def planned_posts(program: Program, gradients: Sequence[Array]) -> list[Order]:
    """A server's part in the next exchange of every bucket; it never ends when the workers leave."""
    return [Order(program, array, number, f"bucket {number}", tolerant=True) for number, array in enumerate(gradients)]


def coded_posts(session: Session, compression: Compression) -> list[CodedOrder]:
    """The same for compressed gradients."""
    numbers = range(compression.buckets)
    return [session.coded_order(compression, number, number, f"bucket {number}", tolerant=True) for number in numbers]


def _weights_of(number: int) -> str:
    return f"weights of bucket {number}"
