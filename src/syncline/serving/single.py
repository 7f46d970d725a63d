"""Pushes and pulls of one worker by itself, where every push is an update of its own: plans, keys and arrays.

A push is a plan between one worker and the owners, and so is a pull; no two workers wait for each other in them. Every
bucket of every worker has a key of its own, which its next step uses again: that begins when the worker has all of the
step before. A push is received whenever it comes, into memory that the owner keeps for that worker, and copied to where
the optimizer reads it when its turn has come. What a worker is released with is copied to that memory and then sent, so
that the next update need not wait until the worker has it. An owner that is a worker has weights beside those of its
model, which stay as they were pulled until it pulls again; between the two, what it owns itself is copied and not sent.

Memory at an owner: its part of the model once for every worker; of pages that nobody touches there is none.

Theory: Dean et al., "Large Scale Distributed Deep Networks" (DistBelief), NeurIPS 2012.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.messages import chunk_edges
from ..engine.work import Work
from ..errors import UsageError
from ..session.communicator import WEIGHT_KEYS, compiled
from ..session.session import MODEL_KEYS, Session
from .records import Array, Record
from .shard import Holding, planned
from .traffic import Model

_ALIGNED_BYTES = 64
"""Arrays of several types share a block of memory."""


class Single:
    """This process's part in the pushes and pulls of each worker, as they are: the worker's own, and those of an owner.

    Raises UsageError for more buckets and workers than have keys.
    """

    keeps = False

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model = session, model
        workers, buckets = session.group.workers, len(model.layout.buckets)
        if workers * buckets >= MODEL_KEYS:
            raise UsageError(
                f"{buckets} buckets, pushed by each of {workers} workers by itself, are more than the {MODEL_KEYS - 1}"
                " that a model can have: use larger buckets, as with schedule=fixed(bucket=100MiB)"
            )
        roles = session.strategy.roles
        assert roles is not None
        self._places = roles.places(workers)
        wanted = range(workers) if session.index in self._places else [session.index]
        self.plans = {worker: roles.halves_of(session.group, worker) for worker in wanted}
        self.programs = {
            worker: (compiled(push, session.index), compiled(pull, session.index))
            for worker, (push, pull) in self.plans.items()
        }
        self._owned: _Owned | None = None
        if session.index in self._places:
            self._owned = _Owned(session, model, self, self._places.index(session.index))

    def push(self, number: int, label: str, **options: Any) -> Work:
        """One exchange with the owners."""
        key, program = self.key(self._session.index, number), self.programs[self._session.index][0]
        return self._session.engine.exchange(program, self._model.gradients[number], key, label, **options)

    def pull(self, number: int) -> Work:
        """One exchange with the owners."""
        key, program = self.key(self._session.index, number), self.programs[self._session.index][1]
        label = f"weights of bucket {number}"
        return self._session.engine.exchange(program, self._model.weights[number], WEIGHT_KEYS + key, label)

    def key(self, worker: int, number: int) -> int:
        """That of a worker's pushes of a bucket."""
        return self._model.first_key + worker * len(self._model.layout.buckets) + number

    def exchanges(self) -> _Owned:
        """One for each worker."""
        assert self._owned is not None
        self._owned.begin()
        return self._owned

    def holdings(self) -> list[Holding] | None:
        """Chunks of the plans."""
        return None if self._owned is None else self._owned.holdings()

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:
        """Nothing depends on the step."""


class _Owned:
    """Chunk ``chunk`` of every bucket at its owner, and what each worker pushes to it and pulls from it."""

    def __init__(self, session: Session, model: Model, traffic: Single, chunk: int) -> None:
        self._session, self._model, self._traffic = session, model, traffic
        self._workers = [worker for worker in range(session.group.workers) if worker != session.index]
        edges = [
            chunk_edges(bucket.elements, len(traffic.programs[0][0].plan.owners)) for bucket in model.layout.buckets
        ]
        self._mine = [slice(one[chunk], one[chunk + 1]) for one in edges]
        self.gradients, self.weights = list(model.gradients), list(model.weights)
        if session.is_worker:  # these are the worker's own
            self.gradients, self.weights = [np.zeros_like(of) for of in model.gradients], []
            for array, part in zip(model.weights, self._mine, strict=True):
                self.weights.append(np.zeros_like(array))
                self.weights[-1][part] = array[part]
        self._kept = dict(zip(self._workers, _arrays(session, model.gradients, len(self._workers)), strict=True))
        self._pushes: dict[int, list[Work]] = {}

    def holdings(self) -> list[Holding]:
        """What is owned, tensor by tensor."""
        plan = self._traffic.plans[0][0]
        return planned(self._model.layout.buckets, self.gradients, self.weights, plan, self._session.index)

    def begin(self) -> None:
        """Post this owner's part in the first push of every worker."""
        for worker in self._workers:
            self._pushes[worker] = [self._expect(worker, number) for number in range(len(self._mine))]

    # As ``Exchanges``.

    def coming(self, worker: int) -> Sequence[Work]:
        """All of its push."""
        return self._pushes.get(worker, ())

    def settle(self, worker: int) -> None:
        """Copy what has come to where the optimizer reads it."""
        came = self._model.gradients if worker == self._session.index else self._kept[worker]
        for into, array, part in zip(self.gradients, came, self._mine, strict=True):
            into[part] = array[part]

    def take_next(self, worker: int) -> None:
        """It comes when the worker has the weights, which are sent out of the same memory."""

    def release(self, workers: Sequence[int]) -> None:
        """Copy the weights as they are now, and start to send them; what is pushed next comes behind that."""
        for worker in workers:
            own = worker == self._session.index
            into = self._model.weights if own else self._kept[worker]
            for array, weights, part in zip(into, self.weights, self._mine, strict=True):
                array[part] = weights[part]
            if not own:
                self._pushes[worker] = [
                    self._expect(worker, number, self._send(worker, number)) for number in range(len(self._mine))
                ]

    def rest(self) -> None:
        """What is sent are copies."""

    def _send(self, worker: int, number: int) -> Work:
        key, program = WEIGHT_KEYS + self._traffic.key(worker, number), self._traffic.programs[worker][1]
        label = f"weights of bucket {number} to rank {worker}"
        return self._session.engine.exchange(program, self._kept[worker][number], key, label)

    def _expect(self, worker: int, number: int, gate: Work | None = None) -> Work:
        key, program = self._traffic.key(worker, number), self._traffic.programs[worker][0]
        label = f"bucket {number} of rank {worker}"
        return self._session.engine.exchange(program, self._kept[worker][number], key, label, gate=gate, tolerant=True)


def _arrays(session: Session, like: Sequence[Array], count: int) -> list[list[Array]]:
    """So many times arrays like these, in one block of the transport's memory."""
    sizes = [-(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for array in like]
    block = session.engine.allocate(max(1, count * sum(sizes)), np.dtype(np.uint8))
    found, at = list[list[Array]](), 0
    for _ in range(count):
        found.append([])
        for array, size in zip(like, sizes, strict=True):
            found[-1].append(block[at : at + array.nbytes].view(array.dtype))
            at += size
    return found
