"""Pushes of all workers as one sum: one plan sums them on their way to the owners, another copies the weights back.

``Planned`` moves arrays, ``Coded`` moves a codec's payloads. Workers, workers that own weights, and servers all use the
same classes: each process runs its own part of the same plans.

``Updating`` schedules an owner's updates. A bucket is updated once its push has arrived and the owner knows the values
that the update needs (the learning rate and others), which may arrive before the first push of a step or after the
last. No bucket waits for another, so weights return to the workers while gradients still arrive. The exception is an
optimizer that may not update tensors one by one: it updates all buckets at once after the last push. The thread that
drives the exchange makes the updates, between two turns.
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
from .shard import Holding, Model, Update, coded, placed, planned


class Merged:
    """This process's part in the pushes and pulls of all workers, bucket by bucket."""

    _push: Sequence[Order | CodedOrder]
    _post: Sequence[Order | CodedOrder]
    _pull: Sequence[Order | CodedOrder]

    def __init__(self, session: Session, model: Model) -> None:
        self._engine, self._model, self.buckets = session.engine, model, len(model.layout.buckets)

    def push(self, number: int, when: When) -> Work:
        """Start this process's part in the push; under a codec, the first half of a reduction."""
        return self._engine.start(self._push[number], when)

    def post(self, number: int, when: When) -> Work:
        """Start an owner's part in a push. It never ends if the workers leave."""
        return self._engine.start(self._post[number], when)

    def pull(self, number: int, when: When) -> Work:
        """Start this process's part in the pull; under a codec, the counterpart of a reduction's second half."""
        return self._engine.start(self._pull[number], when)

    def followed(self) -> list[Holding]:
        """Empty, unless plans have followers."""
        return []

    def exchanges(self, apart: bool) -> Posted:
        """The owner's part, one for all workers together."""
        return Posted(self._engine, self, self._model.layout.priorities, apart)


class Planned(Merged):
    """Sums gradients by one half of the architecture's plan and copies weights by the other."""

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        super().__init__(session, model)
        self._index = session.index
        roles = session.strategy.roles
        assert roles is not None
        self._follower = dict(zip(roles.places(session.group), roles.followers(session.group), strict=False))
        self._plan, half = session.strategy.halves(session.group)
        push, pull, labels = compiled(self._plan, session.index), compiled(half, session.index), model.layout.labels
        first, arrays = model.first_key, list(zip(model.gradients, model.weights, strict=True))
        self._push = [Order(push, array, first + i, labels[i]) for i, (array, _) in enumerate(arrays)]
        self._post = planned_posts(push, model.gradients)
        self._pull = [Order(pull, array, _weights_key(model, i), _weights_of(i)) for i, (_, array) in enumerate(arrays)]

    def holdings(self) -> list[Holding] | None:
        """This process's chunks of the plan."""
        model, index = self._model, self._index
        if index not in self._plan.owners:
            return None
        return planned(model.layout.buckets, model.gradients, model.weights, self._plan.owners, index)

    def followed(self) -> list[Holding]:
        """The chunks whose sums the plan copies to this process."""
        model, index = self._model, self._index
        if index not in self._follower.values():
            return []
        followers = [self._follower[owner] for owner in self._plan.owners]
        return planned(model.layout.buckets, model.gradients, model.weights, followers, index)

    def know(self, records: Sequence[Record]) -> None:
        """Do nothing: the next pull sends whole weights, not differences."""

    def resume_at(self, step: int) -> None:
        """Do nothing: plans do not depend on the step."""


class Coded(Merged):
    """Moves gradients as a codec's payloads, and likewise the changes that updates make to the weights."""

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
        """Whether the owner's weights may be more precise than the known ones."""
        return self._updates.keeps

    def holdings(self) -> list[Holding] | None:
        """Whole blocks of the codec, with the owner's own weights."""
        if self._compression.participant.owner < 0:
            return None
        return coded(self._model.layout.buckets, self._model.gradients, self._updates)

    def know(self, records: Sequence[Record]) -> None:
        """Take over the workers' weights, since the next pull sends the difference from these."""
        for bucket, array in zip(self._model.layout.buckets, self._model.weights, strict=True):
            write_into(records, [(part, array[at : at + part.elements]) for at, part in placed(bucket)])

    def resume_at(self, step: int) -> None:
        """Tell the codec, in the thread that drives and after the exchanges that ``push`` has posted."""
        self._engine.wait(self._engine.then("resume", (), partial(self._compression.resume_at, step)))


def planned_posts(program: Program, gradients: Sequence[Array]) -> list[Order]:
    """A server's part in the next exchange of every bucket. It never ends if the workers leave."""
    return [Order(program, array, number, f"bucket {number}", tolerant=True) for number, array in enumerate(gradients)]


def coded_posts(session: Session, compression: Compression) -> list[CodedOrder]:
    """A server's part in the next exchange of every bucket, for compressed gradients."""
    numbers = range(compression.buckets)
    return [session.coded_order(compression, number, number, f"bucket {number}", tolerant=True) for number in numbers]


def _weights_key(model: Model, number: int) -> int:
    return WEIGHT_KEYS + model.first_key + number


def _weights_of(number: int) -> str:
    return f"weights of bucket {number}"


class Posted:
    """An owner's part in the merged pushes and pulls of all workers.

    The next push of a bucket and its pull begin once the bucket has been updated, whatever the state of other buckets.
    """

    def __init__(self, engine: Engine, traffic: Merged, priorities: Sequence[float], apart: bool) -> None:
        self._engine, self._traffic = engine, traffic
        self._whens = [When(priority=priority) for priority in priorities]
        buckets = range(traffic.buckets)
        self._updating = Updating(engine, len(buckets), apart)
        self._pulls: dict[int, Work] = {}
        self.made: Work | None = None
        self._pushes = [self._post(number) for number in buckets]
        for number in buckets:
            self._expect(number)

    def coming(self, worker: int) -> Sequence[Work]:  # noqa: ARG002
        """Empty: ``Updating`` waits for the pushes itself."""
        return ()

    def settle(self, worker: int) -> None:  # noqa: ARG002
        """Wait for all pushes and pulls in progress."""
        self._engine.wait(*self._pushes, *self._pulls.values())

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:
        """Never called: the plan sums the pushes."""
        raise NotImplementedError

    def update(self, worker: int, bucket: int, update: Update) -> None:  # noqa: ARG002
        """Tell ``Updating`` the values of a step."""
        begin = self._updating.say(update)
        self.made = self._updating.made
        begin()

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Do nothing: an updated bucket goes to all workers anyway."""

    def rest(self) -> None:
        """Wait for the pulls, which read the weights."""
        self._engine.wait(*self._pulls.values())

    def close(self) -> None:
        """Ignore pushes that have arrived: they belong to no step."""
        self._updating.close()

    def _expect(self, number: int) -> None:
        """Update a bucket once its posted push has arrived and the previous pull no longer reads the weights."""
        before = self._pulls.get(number)
        came = [self._pushes[number], *([] if before is None else [before])]
        self._updating.after(number, came, partial(self._go_on, number))

    def _go_on(self, number: int) -> None:
        """Send the updated bucket and post its next push."""
        self._pulls[number] = self._traffic.pull(number, self._whens[number])
        self._pushes[number] = self._post(number)
        self._expect(number)

    def _post(self, number: int) -> Work:
        return self._traffic.post(number, self._whens[number])


class Updating:
    """Schedules the updates of all ``buckets``, step by step, each bucket by itself if ``apart``."""

    def __init__(self, engine: Engine, buckets: int, apart: bool) -> None:
        self._engine, self._apart = engine, apart
        self._expected = [0] * buckets  # steps that each bucket has been handed over for
        self._told = 0  # steps whose values have been told
        self.made: Work | None = None
        """Ends with the updates of all buckets for the last step whose values were told."""
        self._lock = threading.Lock()  # one thread tells values while another finishes pushes
        self._steps: dict[int, _Step] = {}  # the steps that still have buckets to update
        self._closed = False

    def after(self, number: int, came: Sequence[Work], call: Callable[[], None] = lambda: None) -> Work:
        """Update a bucket for its next step after all works in ``came`` are done: the bucket's push, and the last pull.

        ``call`` is called after the update; the returned work ends after that.
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
        """Set how the buckets of the next step are updated. They are updated once the returned function is called."""
        count = self._told
        self._told += 1
        step = self._step(count)
        step.update, self.made = update, step.made
        return step.open

    def close(self) -> None:
        """End all updates: works that wait for a step's values end without it, and call nothing.

        The thread that tells values calls this, after the last update.
        """
        with self._lock:
            self._closed = True
            steps, self._steps = list(self._steps.values()), {}
        for step in steps:
            step.open()
            for work in (step.over, step.made):
                if work is not None:
                    self._engine.fulfil(work)

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
            self._engine.fulfil(step.made)
        call()

    def _all(self, count: int) -> None:
        if self._closed:
            return
        step = self._steps.pop(count)
        step.update(ALL)
        assert step.over is not None
        self._engine.fulfil(step.over)
        self._engine.fulfil(step.made)

    def _go_on(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()


class _Step:
    """The state of one step's updates."""

    def __init__(self, engine: Engine, buckets: int) -> None:
        self._engine, self._opened = engine, False
        self.said = engine.promise("the values of a step", tolerant=True)
        self.made = engine.promise("the updates of a step", tolerant=True)
        self.over: Work | None = None
        self.update: Update = _nothing
        self.left = buckets
        self.came: list[Work] = []
        self.handed_over = 0

    def open(self) -> None:
        """Let the works that wait for the step's values continue. May be called twice."""
        if not self._opened:
            self._opened = True
            self._engine.fulfil(self.said)


def _nothing(bucket: int) -> None:
    raise AssertionError(f"bucket {bucket} is updated before its step's values are known")
