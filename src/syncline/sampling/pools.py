"""The pools of a run: kept by worker 0, who answers in its progress thread, also while its training computes.

What travels are positions in the order of an epoch, a few bytes per batch. A worker asks for its next piece when it
takes one, so that the answer is there when it comes back; what it has asked for and never takes counts as done. Worker
0 stays until all workers have said that they ask no more, and a worker that dies ends the run, as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

from ..engine.order import Work
from ..errors import UsageError
from ..serving.messages import check_fields, nonsense, read_message
from ..session.session import Session
from .order import SampleOrder
from .pool import Pool

ASKED, GIVEN = 1 << 8, (1 << 8) + 1
"""Topics, beside those between workers and owners of weights."""

KEEPER = 0
MOST_SAMPLERS = 1 << 10
_MESSAGE_BYTES = 256
_KINDS: dict[str, dict[str, type]] = {"take": {"sampler": int, "epoch": int}, "leave": {}}


class Pools:
    """One worker's access to the pools of the run, which it keeps if it is worker 0."""

    def __init__(self, session: Session) -> None:
        self._session, self._orders = session, list[SampleOrder]()
        self._kept: list[Pool] = []
        self._here = set(range(session.world_size))  # the workers that may still ask
        if session.alone:
            return
        # The last of all that is done then: who waits here must have left what others' steps wait for.
        session.member.process.before_end.insert(0, self._leave)
        if session.rank == KEEPER:
            self._over = session.engine.promise("the others' last batches", tolerant=True)
            for worker in self._here:
                self._listen(worker)

    def enter(self, order: SampleOrder) -> Pooled:
        """One more pool; all workers enter the same ones in the same order."""
        number, workers = len(self._orders), self._session.world_size
        if number == MOST_SAMPLERS:
            raise UsageError(
                f"a run can have up to {MOST_SAMPLERS} samplers: make one, and iterate over it every epoch"
            )
        self._orders.append(order)
        if self._session.rank == KEEPER:  # before anybody can know that all have come
            self._kept.append(Pool(order.samples, order.piece(workers), workers))
        order.check_alike(self._session)
        return Pooled(self, number)

    def ask(self, sampler: int, epoch: int) -> Work | range:
        """Ask for a piece; alone there is nobody to ask."""
        if self._session.alone:
            return self._kept[sampler].take(0, epoch)
        label = f"the next batch of epoch {epoch}"
        answer = self._session.recv(KEEPER, label, _MESSAGE_BYTES, topic=GIVEN)
        self._send(KEEPER, {"kind": "take", "sampler": sampler, "epoch": epoch}, label, ASKED)
        return answer

    def hear(self, sampler: int, answer: Work | range) -> range:
        """The piece that was asked for, once it is there; raises the run's fault."""
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
            engine.wait(engine.then(self._over.label, [self._over]))  # by the limit of progress

    def _send(self, to: int, message: dict[str, object], label: str, topic: int, tolerant: bool = False) -> None:
        self._session.send(to, json.dumps(message).encode(), label, topic, tolerant)

    # At worker 0, in the thread that drives.

    def _listen(self, worker: int) -> None:
        label = f"what batches {self._session.called(worker)} asks for"
        request = self._session.recv(worker, label, _MESSAGE_BYTES, tolerant=True, topic=ASKED)
        self._session.engine.then(label, [request], partial(self._take, worker, request), tolerant=True)

    def _take(self, worker: int, request: Work) -> None:
        """Do what a worker has asked for, and listen for more; raises ProtocolError for what no worker asks."""
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
        # Tolerant: who breaks off an epoch and leaves does not wait for it.
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
    """What one worker gets of one pool."""

    size = None
    """Nobody knows before."""

    def __init__(self, pools: Pools, number: int) -> None:
        self._pools, self._number = pools, number
        self._last = -1

    def parts(self, epoch: int) -> Iterator[range]:
        """Positions in the order of that epoch, piece by piece, asked for one ahead.

        Raises UsageError for an epoch that is not behind the last one.
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
