"""The pool of an asynchronous run: each request of a worker gets the next piece of the epoch.

``Pool`` is a pure state machine. Every position of an epoch is handed out once, to whichever worker asks. A slow worker
thus does fewer batches and delays no one, and an epoch ends for all workers when nothing of it is left. Positions that
were handed out count as done: a worker that leaves returns nothing. Workers may be in different epochs and only move
forward. An epoch that all workers have passed is forgotten.

``Pools`` serves the pools to all workers. Worker 0 keeps them and answers in its progress thread, even while its
training computes. Messages contain positions in the order of an epoch, a few bytes per batch. A worker requests its
next piece when it takes one, so that the answer is there in time; a piece that it has requested but never takes counts
as done. Worker 0 stays until all workers have said that they make no more requests; as everywhere, a worker that dies
ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from ..engine.order import Work
from ..errors import UsageError
from ..serving.messages import check_fields, nonsense, read_message
from ..session.session import Session
from .order import MOST_EPOCHS, SampleOrder

MOST_OPEN = 1 << 12
"""The most epochs that may be open at once."""


class Pool:
    """Positions 0 to ``samples`` of every epoch, in pieces of ``piece``, for ``workers`` workers."""

    def __init__(self, samples: int, piece: int, workers: int) -> None:
        self._samples, self._piece = samples, piece
        self._at = dict.fromkeys(range(workers), -1)  # the epoch of each worker that has not left
        self._taken: dict[int, int] = {}  # the number of samples handed out per epoch

    @property
    def over(self) -> bool:
        """Whether all workers have left."""
        return not self._at

    def take(self, worker: int, epoch: int) -> range:
        """A worker's next piece of an epoch, empty when nothing is left. ValueError for an invalid request."""
        if worker not in self._at:
            raise ValueError("it has left")
        if not self._at[worker] <= epoch < MOST_EPOCHS:
            raise ValueError(f"it asks for epoch {epoch} behind epoch {self._at[worker]}")
        if epoch not in self._taken and len(self._taken) == MOST_OPEN:
            raise ValueError(f"it begins epoch {epoch} while {MOST_OPEN} are open")
        self._at[worker] = epoch
        start = self._taken.get(epoch, 0)
        stop = self._taken[epoch] = min(start + self._piece, self._samples)
        self._forget()
        return range(start, stop)

    def leave(self, worker: int) -> None:
        """Record that a worker makes no more requests. ValueError if it has left already."""
        if worker not in self._at:
            raise ValueError("it has left already")
        del self._at[worker]
        self._forget()

    def _forget(self) -> None:
        """Drop the epochs that all workers have passed."""
        least = min(self._at.values(), default=MOST_EPOCHS)
        for epoch in [epoch for epoch in self._taken if epoch < least]:
            del self._taken[epoch]


ASKED, GIVEN = 1 << 8, (1 << 8) + 1
"""Topics of messages, distinct from those between workers and owners of weights."""

KEEPER = 0
MOST_SAMPLERS = 1 << 10
_MESSAGE_BYTES = 256
_KINDS: dict[str, dict[str, type]] = {"take": {"sampler": int, "epoch": int}, "leave": {}}


class Pools:
    """One worker's access to the pools of the run. Worker 0 keeps the pools."""

    def __init__(self, session: Session) -> None:
        self._session, self._orders = session, list[SampleOrder]()
        self._kept: list[Pool] = []
        self._here = set(range(session.world_size))  # the workers that may still send requests
        if session.alone:
            return
        # Runs after all other exit callbacks: the others may still need this worker's part of their steps.
        session.member.process.before_end.insert(0, self._leave)
        if session.rank == KEEPER:
            self._over = session.engine.promise("the others' last batches", tolerant=True)
            for worker in self._here:
                self._listen(worker)

    def enter(self, order: SampleOrder) -> Pooled:
        """Join one more pool. All workers join the same pools in the same order."""
        number, workers = len(self._orders), self._session.world_size
        if number == MOST_SAMPLERS:
            raise UsageError(
                f"a run can have up to {MOST_SAMPLERS} samplers: make one, and iterate over it every epoch"
            )
        self._orders.append(order)
        if self._session.rank == KEEPER:  # before any worker can know that all have joined
            self._kept.append(Pool(order.samples, order.piece(workers), workers))
        order.check_alike(self._session)
        return Pooled(self, number)

    def ask(self, sampler: int, epoch: int) -> Work | range:
        """Request a piece. With a single worker there is no message."""
        if self._session.alone:
            return self._kept[sampler].take(0, epoch)
        label = f"the next batch of epoch {epoch}"
        answer = self._session.recv(KEEPER, label, _MESSAGE_BYTES, topic=GIVEN)
        self._send(KEEPER, {"kind": "take", "sampler": sampler, "epoch": epoch}, label, ASKED)
        return answer

    def hear(self, sampler: int, answer: Work | range) -> range:
        """The requested piece, once it has arrived. Raises the run's fault."""
        if isinstance(answer, range):
            return answer
        self._session.engine.wait(answer)
        message = read_message(self._session, KEEPER, answer.label, answer.result, {"start": int, "stop": int})
        if not message["start"] <= message["stop"] <= self._orders[sampler].samples:
            raise nonsense(self._session, KEEPER, answer.label, f"{message['start']} to {message['stop']}")
        return range(message["start"], message["stop"])

    def _leave(self) -> None:
        self._send(KEEPER, {"kind": "leave"}, "that no more batches are asked for", ASKED)
        if self._session.rank == KEEPER:
            engine = self._session.engine
            engine.wait(engine.then(self._over.label, [self._over]))  # for at most the engine's stall limit

    def _send(self, to: int, message: dict[str, object], label: str, topic: int, tolerant: bool = False) -> None:
        self._session.send(to, json.dumps(message).encode(), label, topic, tolerant)

    # At worker 0, in the driving thread.

    def _listen(self, worker: int) -> None:
        label = f"what batches {self._session.called(worker)} asks for"
        request = self._session.recv(worker, label, _MESSAGE_BYTES, tolerant=True, topic=ASKED)
        self._session.engine.then(label, [request], partial(self._take, worker, request), tolerant=True)

    def _take(self, worker: int, request: Work) -> None:
        """Answer a worker's request and listen for the next. Raises ProtocolError for an invalid request."""
        label = request.label
        message = read_message(self._session, worker, label, request.result, {"kind": str})
        fields = _KINDS.get(message["kind"])
        if fields is None:
            raise nonsense(self._session, worker, label, f"kind is {message['kind']!r:.100}")
        check_fields(self._session, worker, label, message, fields)
        try:
            if worker not in self._here:
                raise ValueError("it has left")
            if message["kind"] == "leave":
                self._gone(worker)
                return
            if message["sampler"] >= len(self._kept):
                raise ValueError(f"there is no sampler {message['sampler']}")
            piece = self._kept[message["sampler"]].take(worker, message["epoch"])
        except ValueError as error:
            raise nonsense(self._session, worker, label, str(error)) from None
        # Tolerant: a worker that abandons an epoch and leaves does not wait for it.
        answer: dict[str, object] = {"start": piece.start, "stop": piece.stop}
        self._send(worker, answer, f"a batch for {self._session.called(worker)}", GIVEN, tolerant=True)
        self._listen(worker)

    def _gone(self, worker: int) -> None:
        for pool in self._kept:
            pool.leave(worker)
        self._here.remove(worker)
        if not self._here:
            self._session.engine.fulfil(self._over)


class Pooled:
    """One worker's share of one pool."""

    size = None
    """Not known in advance."""

    def __init__(self, pools: Pools, number: int) -> None:
        self._pools, self._number = pools, number
        self._last = -1

    def parts(self, epoch: int) -> Iterator[range]:
        """Positions in the order of that epoch, piece by piece, requested one ahead.

        Raises UsageError unless the epoch comes after the last one.
        """
        if epoch <= self._last:
            raise UsageError(
                f"epoch {epoch} is over: under this strategy every sample of an epoch is handed out once, so let"
                f" set_epoch() go up, to {self._last + 1} or more"
            )
        self._last = epoch
        return self._parts(epoch, self._pools.ask(self._number, epoch))

    def _parts(self, epoch: int, asked: Work | range) -> Iterator[range]:
        while piece := self._pools.hear(self._number, asked):
            asked = self._pools.ask(self._number, epoch)
            yield piece
