"""Pushes of all workers as one: a plan sums them on their way to the owners, and another copies the weights back.

``Planned`` moves them as they are, ``Coded`` as a codec's payloads. The same on workers, owners or not, and on servers:
each runs its own part of the same plans.

``Updating`` are an owner's updates by what all workers have pushed: each bucket's when its push is there and the owner
knows the values that the update needs (learning rate and so on), which may come before the first push of a step or
behind the last. No bucket waits for another, so weights go back to the workers while gradients still come. Only an
optimizer of which nobody knows whether it updates tensors by themselves updates all buckets at once, behind the last
push. Updates are made in the thread that drives, between two turns of the exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from ..compression.compression import Compression
from ..compression.updates import Updates
from ..engine.engine import Engine
from ..engine.order import CodedOrder, Order, When, Work
from ..plans.messages import Program
from ..session.communicator import compiled
from ..session.session import Session
from ..session.tickets import WEIGHT_KEYS
from .protocol import ALL
from .records import Array, Record, write_into
from .shard import Holding, coded, placed, planned
from .traffic import Model, Update


class Merged:
    """This process's part in the pushes and pulls of all workers, bucket by bucket."""

    _push: Sequence[Order | CodedOrder]
    _post: Sequence[Order | CodedOrder]
    _pull: Sequence[Order | CodedOrder]

    def __init__(self, session: Session, model: Model) -> None:
        self._engine, self._model, self.buckets = session.engine, model, len(model.layout.buckets)

    def push(self, number: int, when: When) -> Work:
        """One exchange with all others; under a codec, the first half of a reduction."""
        return self._engine.start(self._push[number], when)

    def post(self, number: int, when: When) -> Work:
        """An owner's part in a push, which never ends when the workers leave."""
        return self._engine.start(self._post[number], when)

    def pull(self, number: int, when: When) -> Work:
        """One exchange with all others; under a codec, what corresponds to the second half."""
        return self._engine.start(self._pull[number], when)

    def exchanges(self, apart: bool) -> Posted:
        """Of all workers at once."""
        return Posted(self._engine, self, self._model.layout.priorities, apart)


class Planned(Merged):
    """Gradients are summed by one half of the architecture's plan, weights copied by the other."""

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        super().__init__(session, model)
        self._index = session.index
        self._plan, half = session.strategy.halves(session.group)
        push, pull, labels = compiled(self._plan, session.index), compiled(half, session.index), model.layout.labels
        first, arrays = model.first_key, list(zip(model.gradients, model.weights, strict=True))
        self._push = [Order(push, array, first + i, labels[i]) for i, (array, _) in enumerate(arrays)]
        self._post = planned_posts(push, model.gradients)
        self._pull = [Order(pull, array, _weights_key(model, i), _weights_of(i)) for i, (_, array) in enumerate(arrays)]

    def holdings(self) -> list[Holding] | None:
        """Chunks of the plan."""
        model, index = self._model, self._index
        if index not in self._plan.owners:
            return None
        return planned(model.layout.buckets, model.gradients, model.weights, self._plan, index)

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:
        """Nothing depends on the step."""


class Coded(Merged):
    """Gradients come as a codec's payloads, and what the updates change goes so."""

    def __init__(self, session: Session, model: Model, compression: Compression) -> None:
        super().__init__(session, model)
        self._compression, self._updates = compression, Updates(compression, model.weights)
        numbers, first, labels = range(self.buckets), model.first_key, model.layout.labels
        self._push = [session.coded_order(compression, i, first + i, labels[i]) for i in numbers]
        self._post = coded_posts(session, compression)
        self._pull = [
            session.reducers_order(partial(self._updates.pieces, i), _weights_key(model, i), _weights_of(i))
            for i in numbers
        ]

    @property
    def keeps(self) -> bool:
        """As the codec does."""
        return self._updates.keeps

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
        self._engine.wait(self._engine.then("resume", (), partial(self._compression.resume_at, step)))


def planned_posts(program: Program, gradients: Sequence[Array]) -> list[Order]:
    """A server's part in the next exchange of every bucket; it never ends when the workers leave."""
    return [Order(program, array, number, f"bucket {number}", tolerant=True) for number, array in enumerate(gradients)]


def coded_posts(session: Session, compression: Compression) -> list[CodedOrder]:
    """The same for compressed gradients."""
    numbers = range(compression.buckets)
    return [session.coded_order(compression, number, number, f"bucket {number}", tolerant=True) for number in numbers]


def _weights_key(model: Model, number: int) -> int:
    return WEIGHT_KEYS + model.first_key + number


def _weights_of(number: int) -> str:
    return f"weights of bucket {number}"


class Posted:
    """An owner's part in all workers' pushes as one, and in all workers' pulls as one.

    A bucket's next push and its pull begin when it has been updated, whatever has become of the others.
    """

    def __init__(self, engine: Engine, traffic: Merged, priorities: Sequence[float], apart: bool) -> None:
        self._engine, self._traffic = engine, traffic
        self._whens = [When(priority=priority) for priority in priorities]
        buckets = range(traffic.buckets)
        self._updating = Updating(engine, len(buckets), apart)
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


class Updating:
    """The updates of so many ``buckets``, ``apart`` from each other or all at once, step by step."""

    def __init__(self, engine: Engine, buckets: int, apart: bool) -> None:
        self._engine, self._apart = engine, apart
        self._expected = [0] * buckets  # steps that each bucket has been handed over for
        self._told = 0  # steps whose values have been told
        self._lock = threading.Lock()  # values are told in another thread than pushes end in
        self._steps: dict[int, _Step] = {}  # of which something is left to update
        self._closed = False

    def after(self, number: int, came: Sequence[Work], call: Callable[[], None] = lambda: None) -> Work:
        """Update a bucket for the next step that it has not been handed over for, once all of ``came`` is done.

        The work is done behind ``call``, which is called then.
        """
        count = self._expected[number]
        self._expected[number] += 1
        step, label = self._step(count), f"update of bucket {number}"
        if self._apart:
            return self._engine.then(label, [*came, step.said], partial(self._one, count, number, call), tolerant=True)
        step.came += came
        step.handed_over += 1
        if step.over is None:
            step.over = self._engine.promise("the update of all buckets", tolerant=True)
        updated = self._engine.then(label, [step.over], partial(self._go_on, call), tolerant=True)
        if step.handed_over == len(self._expected):
            self._engine.then("update", [*step.came, step.said], partial(self._all, count), tolerant=True)
        return updated

    def say(self, update: Update) -> Callable[[], None]:
        """Know what updates the buckets of the next step: it does once the answer of this has been called."""
        count = self._told
        self._told += 1
        step = self._step(count)
        step.update = update
        return step.open

    def close(self) -> None:
        """Update nothing more: what waits for values that nobody will tell is done without, and nothing follows it.

        Called by who tells values, behind the last update.
        """
        with self._lock:
            self._closed = True
            steps, self._steps = list(self._steps.values()), {}
        for step in steps:
            step.open()
            if step.over is not None:
                self._engine.fulfil(step.over)

    def _step(self, count: int) -> _Step:
        with self._lock:
            if count not in self._steps:
                self._steps[count] = _Step(self._engine, len(self._expected))
            return self._steps[count]

    def _one(self, count: int, number: int, call: Callable[[], None]) -> None:
        if self._closed:
            return
        step = self._steps[count]
        step.update(number)
        step.left -= 1
        if step.left == 0:
            del self._steps[count]
        call()

    def _all(self, count: int) -> None:
        if self._closed:
            return
        step = self._steps.pop(count)
        step.update(ALL)
        assert step.over is not None
        self._engine.fulfil(step.over)

    def _go_on(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()


class _Step:
    """What is known of one step."""

    def __init__(self, engine: Engine, buckets: int) -> None:
        self._engine, self._opened = engine, False
        self.said = engine.promise("the values of a step", tolerant=True)
        self.over: Work | None = None
        self.update: Update = _nothing
        self.left = buckets
        self.came: list[Work] = []
        self.handed_over = 0

    def open(self) -> None:
        """Let what waits for the values go on, if it does not already."""
        if not self._opened:
            self._opened = True
            self._engine.fulfil(self.said)


def _nothing(bucket: int) -> None:
    raise AssertionError(f"bucket {bucket} is updated by what nobody has told")
