"""Pushes and pulls of one worker by itself, where every push is an update of its own.

A push is between one worker and the owners, and so is a pull; no two workers wait for each other in them. What moves
them is a ``Carrier``. Every bucket of every worker has a key of its own, which its next step uses again: that begins
when the worker has all of the step before. A push is received whenever it comes, into memory that the owner keeps for
that worker, and copied to where the optimizer reads it when its turn has come. What a worker is released with is copied
too and then sent, so that the next update need not wait until the worker has it. An owner that is a worker has weights
beside those of its model, which stay as they were pulled until it pulls again; between the two, what it owns itself is
copied and not sent.

Memory at an owner: its part of the model once for every worker, and the model once, under a codec twice, with payloads
of no more bytes than its part.

Theory: Dean et al., "Large Scale Distributed Deep Networks" (DistBelief), NeurIPS 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from ..engine.order import When, Work
from ..session.session import Session
from .protocol import ALL
from .records import Array, Record
from .shard import Holding, held
from .traffic import Model
from .updating import Update


class Carrier(Protocol):
    """What moves one worker's pushes and pulls."""

    @property
    def encodes(self) -> bool:
        """True where a push replaces what its own process owns of it by what its payload says."""
        ...

    @property
    def mine(self) -> Sequence[slice] | None:
        """The elements that this process owns of every bucket, None where it is no owner."""
        ...

    def push(self, number: int, when: When) -> Work:
        """Start this worker's push of a bucket."""
        ...

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's pull of a bucket."""
        ...

    def begin(self, workers: Sequence[int]) -> None:
        """Make room at this owner for what these workers push and pull."""
        ...

    def expect(self, worker: int, number: int, gate: Work | None) -> Work:
        """Post this owner's part in a worker's next push, behind ``gate``; it never ends when the worker leaves."""
        ...

    def pushed(self, worker: int, number: int) -> Array:
        """Where the owner finds that push, an array of the bucket's size; also that of its own worker."""
        ...

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """Send a worker, behind ``gate``, what ``put`` has made ready."""
        ...

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """These are this owner's weights, by bucket; those that workers are sent, which may say less, in return."""
        ...

    def updated(self, number: int) -> None:
        """This owner's weights of a bucket have been updated."""
        ...

    def renew(self) -> None:
        """This owner's weights are others, which no updates have made."""
        ...

    def put(self, worker: int, number: int, part: slice) -> None:
        """Have ready what a worker shall have, ``part`` being what is owned; its own worker then has it."""
        ...


class Single:
    """This process's part in the pushes and pulls of each worker: the worker's own, and those of an owner."""

    keeps = True

    def __init__(self, session: Session, model: Model, carrier: Carrier) -> None:
        self._session, self._carrier, self.buckets = session, carrier, len(model.layout.buckets)
        mine = carrier.mine
        self._owned = None if mine is None else _Owned(session, model, carrier, mine)

    def push(self, number: int, when: When) -> Work:
        """As the carrier does."""
        work = self._carrier.push(number, when)
        if self._owned is not None:
            self._owned.produced(number, work if self._carrier.encodes else when.gate)
        return work

    def pull(self, number: int, when: When) -> Work:
        """As the carrier does, behind what this process sends itself."""
        given = None if self._owned is None else self._owned.take_given(number)
        if given is not None:
            gates = [given, *([] if when.gate is None else [when.gate])]
            when = when._replace(gate=self._session.engine.then(f"weights of bucket {number}", gates))
        return self._carrier.pull(number, when)

    def exchanges(self, apart: bool) -> _Owned:  # noqa: ARG002 - nothing waits here
        """One for each worker."""
        assert self._owned is not None
        self._owned.begin()
        return self._owned

    def holdings(self) -> list[Holding] | None:
        """With weights of the owner's, where it is a worker."""
        return None if self._owned is None else self._owned.holdings()

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:  # noqa: ARG002 - each push says of which step it is, where that matters
        """With weights that the owners were given."""
        self._carrier.renew()


class _Owned:
    """What an owner has of every bucket, and what each worker pushes to it and pulls from it."""

    def __init__(self, session: Session, model: Model, carrier: Carrier, mine: Sequence[slice]) -> None:
        self._session, self._model, self._carrier, self._mine = session, model, carrier, mine
        self._workers = [worker for worker in range(session.group.workers) if worker != session.index]
        self._gradients, self._weights = list(model.gradients), list(model.weights)
        if session.is_worker:  # these are the worker's own
            self._gradients = [np.zeros(array.size, array.dtype) for array in model.gradients]
            self._weights = [np.zeros(array.size, array.dtype) for array in model.weights]
            for own, array, part in zip(self._weights, model.weights, mine, strict=True):
                own[part] = array[part]
        self._sent = carrier.hold(self._weights)
        self._pushes: dict[int, list[Work]] = {}  # the next ones of each worker
        self._sends: dict[tuple[int, int], Work] = {}  # the last one of a bucket to each worker
        self._given: dict[int, Work] = {}  # bucket -> done when this process's worker has what its owner updates of it
        self._owing: dict[int, Work] = {}  # the same, while that is not so
        self._added: set[int] = set()  # buckets in whose gradients the sum of some pushes lies

    def holdings(self) -> list[Holding]:
        """What is owned, tensor by tensor."""
        found = []
        for number, (bucket, part) in enumerate(zip(self._model.layout.buckets, self._mine, strict=True)):
            arrays = self._gradients[number], self._weights[number], self._sent[number]
            found += held(number, bucket, arrays[0], arrays[1], part.start, part.stop, arrays[2])
        return found

    def begin(self) -> None:
        """Post this owner's part in the first push of every worker."""
        self._carrier.begin(self._workers)
        for worker in self._workers:
            self._pushes[worker] = [self._expect(worker, number, None) for number in range(len(self._mine))]
        if self._session.is_worker:
            self._pushes[self._session.index] = [self._promise(number) for number in range(len(self._mine))]

    def produced(self, number: int, gate: Work | None) -> None:
        """The worker of this process has a bucket's gradients behind ``gate``; called in the thread that trains."""
        engine = self._session.engine
        self._given[number] = self._owing[number] = engine.promise(f"weights of bucket {number}", tolerant=True)
        if gate is None:
            engine.fulfil(self._pushes[self._session.index][number])
        else:
            push = self._pushes[self._session.index][number]
            engine.then(push.label, [gate], partial(engine.fulfil, push), tolerant=True)

    def take_given(self, number: int) -> Work | None:
        """What a pull of this process's worker goes behind, the first one after a push."""
        return self._given.pop(number, None)

    # As ``Exchanges``.

    def coming(self, worker: int) -> Sequence[Work]:
        """All of its push."""
        return self._pushes.get(worker, ())

    def settle(self, worker: int, bucket: int = ALL) -> None:
        """Copy what has come to where the optimizer reads it."""
        for number in self._numbers(bucket):
            part, came = self._mine[number], self._carrier.pushed(worker, number)
            np.copyto(self._gradients[number][part], came[part], casting="same_kind")

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """In the order in which pushes come."""
        for number in self._numbers(bucket):
            part = self._mine[number]
            total, came = self._gradients[number][part], self._carrier.pushed(worker, number)[part]
            scaled = came if scale == 1.0 else came * came.dtype.type(scale)
            if number in self._added:
                np.add(total, scaled, out=total, casting="same_kind")
            else:
                np.copyto(total, scaled, casting="same_kind")
        self._added.update(self._numbers(bucket))

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """At once; the worker's next push comes when it has the weights."""
        if worker != ALL:
            self.settle(worker, bucket)
        elif self._added.isdisjoint(self._numbers(bucket)):  # nothing of it was finite
            return
        self._added.difference_update(self._numbers(bucket))
        update(bucket)
        for number in self._numbers(bucket):
            self._carrier.updated(number)

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Copy the weights as they are now, and start to send them; what is pushed next comes behind that."""
        for worker in workers:
            for number in self._numbers(bucket):
                self._carrier.put(worker, number, self._mine[number])
                if worker != self._session.index:
                    self._pushes[worker][number] = self._give(worker, number)
                else:
                    self._give_own(number)

    def _numbers(self, bucket: int) -> Sequence[int]:
        return range(len(self._mine)) if bucket == ALL else (bucket,)

    def rest(self) -> None:
        """What is sent are copies."""

    def close(self) -> None:
        """Nothing takes the place of these."""

    def _give(self, worker: int, number: int) -> Work:
        """Send a bucket; its next push, behind that, unless one is expected already, the last pull being none's.

        A worker that meets the others, or has just met them, has all that was sent before; this process may not have
        seen that yet, and goes on with the key when it has.
        """
        sent = self._carrier.send(worker, number, self._sends.get((worker, number)))
        self._sends[worker, number] = sent
        expected = self._pushes[worker][number]
        return self._expect(worker, number, sent) if expected.done else expected

    def _give_own(self, number: int) -> None:
        """The worker of this process has a bucket, if it has not only met the others; it may push the next."""
        pushes, engine = self._pushes[self._session.index], self._session.engine
        if pushes[number].done:
            pushes[number] = self._promise(number)
        if (owing := self._owing.pop(number, None)) is not None:
            engine.fulfil(owing)

    def _promise(self, number: int) -> Work:
        label = f"bucket {number} of {self._session.called(self._session.index)}"
        return self._session.engine.promise(label, tolerant=True)

    def _expect(self, worker: int, number: int, gate: Work | None) -> Work:
        return self._carrier.expect(worker, number, gate)
