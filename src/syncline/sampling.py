"""Selects the samples that a worker trains on: fixed shares, or batches from a common pool.

The order of a data set's samples in an epoch follows from the seed and the epoch and is the same on every worker, so
only positions in it are exchanged. Workers that exchange in lockstep have fixed shares of equal size, as in PyTorch's
DistributedSampler, or split global batches (``global_batches``). Workers at their own pace share a pool. No framework
is needed: PyTorch's ``DataLoader`` accepts any iterable of indices, or of lists of them.

``Pool`` is a pure state machine. Every position of an epoch is handed out once, to whichever worker asks. A slow worker
thus does fewer batches and delays no one, and an epoch ends for all workers when nothing of it is left. Positions that
were handed out count as done: a worker that leaves returns nothing. In an elastic run a pool begins with what the
weights do not contain (``serving.turns``), so after a loss it hands out again what was in somebody's hands
(``PoolBatches``). Workers may be in different epochs, and only move forward between losses. An epoch that all workers
have passed is forgotten.

``Pools`` serves the pools to all workers. Worker 0 keeps them and answers in its progress thread, even while its
training computes. Messages contain positions in the order of an epoch, a few bytes per batch. A worker requests its
next piece when it takes one, so that the answer is there in time; a piece that it has requested but never takes counts
as done. Worker 0 stays until all workers have said that they make no more requests; as everywhere, a worker that dies
ends the run.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .engine.order import Work
from .errors import MismatchError, NotBuiltError, UsageError
from .serving.messages import check_fields, nonsense, read_message
from .serving.turns import Account
from .session.session import Session

MOST_SAMPLES = 1 << 48
MOST_EPOCHS = 1 << 32
MOST_SEED = 1 << 63
_PIECES = 64
"""The minimum number of pieces per worker and epoch without a batch size."""
_MOST_PIECE = 256
MOST_OPEN = 1 << 12
"""The most epochs that may be open at once."""


@dataclass(frozen=True)
class SampleOrder:
    """The samples of a data set, in batches of ``batch_size``, in global batches, or single.

    ``drop_last`` leaves out the last global batch of an epoch if it is smaller. Raises UsageError for invalid values.
    """

    samples: int
    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    global_batch: int | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("batch_size", self.batch_size, 1, MOST_SAMPLES),
            ("global_batch", self.global_batch, 1, MOST_SAMPLES),
            ("seed", self.seed, 0, MOST_SEED),
            ("the data set's length", self.samples, 1, MOST_SAMPLES),
        ):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"sampler(): {name} must be a whole number, got {value!r}")
            if not least <= value <= most:
                raise UsageError(f"sampler(): {name} must be a number from {least} to {most}, got {value}")
        if self.global_batch is not None and self.batch_size is not None:
            raise UsageError(
                "sampler(): global_batch= is the number of samples of all workers in a step, and batch_size= that of"
                " one worker: give one of the two"
            )
        if self.drop_last and self.global_batch is None:
            raise UsageError("sampler(): drop_last= is for global batches: give global_batch= too, or leave it out")
        if self.drop_last and not self.steps:
            raise UsageError(
                f"sampler(): with drop_last= no batch is left: the data set has {self.samples} samples, and a global"
                f" batch {self.global_batch}; leave drop_last= out, or give a smaller global_batch="
            )

    @property
    def steps(self) -> int:
        """The number of global batches in an epoch."""
        assert self.global_batch is not None
        return self.samples // self.global_batch if self.drop_last else -(-self.samples // self.global_batch)

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """All sample indices in the order of that epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)

    def positions(self, rank: int, world: int) -> NDArray[np.int64]:
        """An equal share: every ``world``-th position from ``rank`` on. The first ones repeat to fill up the shares."""
        return np.arange(rank, -(-self.samples // world) * world, world) % self.samples

    def piece(self, workers: int) -> int:
        """The number of samples that a pool hands out at once: a batch, or a few if there is no batch size."""
        return self.batch_size or max(1, min(_MOST_PIECE, self.samples // (workers * _PIECES)))

    def check_alike(self, session: Session) -> None:
        """Raise MismatchError unless all workers have this order. Collective."""
        mine = asdict(self)
        for rank, text in enumerate(session.gather(json.dumps(mine).encode())):
            if (theirs := json.loads(text)) != mine:
                name = next(name for name in mine if theirs.get(name) != mine[name])
                error = MismatchError(
                    f"sampler(): {name} is {theirs.get(name)} on {session.name(rank)} and {mine[name]} on"
                    f" {session.name(session.rank)}: give all workers the same data set and the same arguments"
                )
                session.fail(error)
                raise error


class Shares(Protocol):
    """A worker's positions in an epoch's order."""

    @property
    def size(self) -> int | None:
        """Their number in an epoch; None if it is not known in advance."""
        ...

    def parts(self, epoch: int) -> Iterator[range | NDArray[np.int64]]:
        """Positions in the order of that epoch, as they become available."""
        ...


class Split:
    """A fixed share per worker, all of equal size (``SampleOrder.positions``)."""

    def __init__(self, order: SampleOrder, rank: int, world: int) -> None:
        self._order, self._rank, self._world = order, rank, world
        self.size = -(-order.samples // world)

    def parts(self, epoch: int) -> Iterator[NDArray[np.int64]]:  # noqa: ARG002 - all epochs have the same positions
        positions = self._order.positions(self._rank, self._world)
        step = self._order.batch_size or len(positions)
        return (positions[start : start + step] for start in range(0, len(positions), step))


_NO_LENGTH = (
    "a sampler from a pool has no length: the number of a worker's batches depends on the speed of the others; all"
    " workers together get the batches of the whole data set"
)


class Sampler:
    """Indices for one worker; with a batch size, lists of them for ``DataLoader(dataset, batch_sampler=)``.

    Every iteration is the next epoch, in a new order if samples are shuffled; ``set_epoch`` selects another epoch, for
    example in a resumed run. ``len`` works for fixed shares; batches from a pool have no known number.
    """

    def __init__(self, order: SampleOrder, shares: Shares) -> None:
        self._order, self._shares = order, shares
        self._epoch = 0

    @property
    def pooled(self) -> bool:
        """Whether batches come from a pool, so that their number per worker is not known in advance."""
        return self._shares.size is None

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that epoch, counted from 0."""
        check_epoch(epoch)
        self._epoch = epoch

    def commit(self) -> None:
        """Do nothing: only an elastic run counts what was used, so that a script may be the same in both."""

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._walk(epoch, self._shares.parts(epoch))

    def __len__(self) -> int:
        size = self._shares.size
        if size is None:
            raise TypeError(_NO_LENGTH)
        return size if self._order.batch_size is None else -(-size // self._order.batch_size)

    def _walk(self, epoch: int, parts: Iterator[range | NDArray[np.int64]]) -> Iterator[Any]:
        order = self._order.indices(epoch)
        for part in parts:
            found = order[part.start : part.stop] if isinstance(part, range) else order[part]
            if self._order.batch_size is None:
                yield from found.tolist()
            else:
                yield found.tolist()


def check_epoch(epoch: object) -> None:
    """Raise UsageError for anything but the number of an epoch."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < MOST_EPOCHS:
        raise UsageError(f"set_epoch() takes a whole number from 0 to {MOST_EPOCHS - 1}, got {epoch!r}")


class Log(Protocol):
    """Keeps the samples of steps."""

    def write(self, epoch: int, step: int, samples: Sequence[int]) -> None:
        """Add a step, with its number in the epoch."""
        ...


class PoolBatches:
    """A worker's batches from a pool in an elastic run, for ``DataLoader(dataset, batch_sampler=)``.

    ``epoch`` is the first one that is not used up, as far as this worker knows. An iteration yields batches of it until
    none is left. Call ``commit`` after every ``optimizer.step()``, whose push names the batch. After a loss the pool
    hands out again what is not in the weights, and ``epoch`` may go back. A new iteration begins with the batches that
    no ``commit`` has counted.
    """

    pooled = True
    """As in ``Sampler``."""

    def __init__(self, order: SampleOrder, session: Session, log: Log | None = None) -> None:
        if order.batch_size is None:
            raise NotBuiltError(
                "sampler(): an elastic run whose workers go at their own pace counts batches: give batch_size=, and the"
                " sampler as DataLoader(dataset, batch_sampler=)"
            )
        self.order, self._first = order, 0
        self._log: Log | None = None
        self.before_batch: Callable[[], None] | None = None
        """Called before each batch on the worker that looks for others that join."""
        self.epoch, self._pushed, self._open = 0, False, deque[range]()
        self.enter(session, log)

    def enter(self, session: Session, log: Log | None = None) -> None:
        """Take batches from the pool of a session, which begins with what the weights do not contain.

        A push that the weights contain, but whose step broke, is logged first. ``log`` gets the steps from here on.
        """
        if self._pushed and Account(session.counted).has(self.epoch, self._open[0]):
            self._write(self._open[0])
        self._log = log
        if session.pools is None:
            session.pools = Pools(session)
        self._pools, self._number = session.pools, session.pools.enter(self.order).number
        self._session, self._used = session, Account(session.counted)
        self._place(self._first)
        session.next_samples = self._next_samples
        session.global_batches.append(self)

    def _place(self, epoch: int) -> None:
        self.epoch = self._used.first_left(epoch, self.order.samples)
        self._kept: tuple[int, NDArray[np.int64]] | None = None  # an epoch and its order
        self._open = deque[range]()  # the batches that were yielded and not committed
        self._pushed = False  # whether the first of them is in a push
        self._asked: Work | range | None = None
        self._empty = False  # whether the pool has nothing left of this epoch
        self._walking: object = None  # the iteration that counts

    @property
    def where(self) -> str:
        """The epoch and its samples left, for messages."""
        left = sum(map(len, self._used.left(self.epoch, self.order.samples)))
        return f"epoch {self.epoch}, of which {left} samples are left"

    def __len__(self) -> int:
        raise TypeError(_NO_LENGTH)

    def __iter__(self) -> Iterator[list[int]]:
        if self._empty:
            raise UsageError(
                f"sampler(): no commit() counts {len(self._open)} batches of epoch {self.epoch} that were used: call"
                " sampler.commit() after every optimizer.step()"
            )
        self._walking = walk = object()
        return self._walk(walk, self.epoch)

    def _walk(self, walk: object, epoch: int) -> Iterator[list[int]]:
        for piece in tuple(self._open):
            yield self._indices(epoch, piece)
        while walk is self._walking:
            if self.before_batch is not None:
                self.before_batch()
            asked = self._pools.ask(self._number, epoch) if self._asked is None else self._asked
            self._asked = None
            if not (piece := self._pools.hear(self._number, asked)):
                self._empty = True
                self._go_on()
                return
            self._asked = self._pools.ask(self._number, epoch)
            self._open.append(piece)
            yield self._indices(epoch, piece)

    def _indices(self, epoch: int, piece: range) -> list[int]:
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, self.order.indices(epoch)
        found: list[int] = self._kept[1][piece.start : piece.stop].tolist()
        return found

    def _next_samples(self) -> tuple[int, int, int]:
        """The samples of a step that is about to be pushed."""
        if self._pushed or not self._open:
            why = "a second time without commit()" if self._pushed else "without a batch of this run's sampler"
            raise UsageError(
                f"optimizer.step() {why}: an elastic run whose workers go at their own pace makes a step of each batch,"
                " with sampler.commit() after it"
            )
        self._pushed = True
        return self.epoch, self._open[0].start, self._open[0].stop

    def commit(self, steps: int = 1) -> None:
        """Count the next batch as done: its step is over. UsageError if there was none, or for several at once."""
        alone = self._session.alone  # and updates the weights itself
        if steps != 1 or not (self._pushed or (alone and self._open)):
            raise UsageError(
                f"commit({'' if steps == 1 else steps}) takes one batch, after its optimizer.step(): where each push is"
                " an update by itself, every batch of an elastic run is a step"
            )
        if alone:
            self._used.count(self.epoch, self._open[0].start, self._open[0].stop)
            self._session.counted = self._used.counted
        self._write(self._open.popleft())
        self._pushed = False
        self._go_on()

    def _write(self, piece: range) -> None:
        if self._log is not None:
            self._log.write(self.epoch, self._step(piece), self._indices(self.epoch, piece))

    def _step(self, piece: range) -> int:
        assert self.order.batch_size is not None
        return piece.start // self.order.batch_size

    def log_rest(self, known: Collection[tuple[int, int]], log: Log) -> None:
        """Log the batches in the weights that are not ``known``, by epochs and numbers: those of lost workers."""
        size = self.order.batch_size
        assert size is not None
        for epoch, first, last in self._used.counted:
            for start in range(first, last, size):
                piece = range(start, min(start + size, last))
                if (epoch, self._step(piece)) not in known:
                    log.write(epoch, self._step(piece), self._indices(epoch, piece))

    def _go_on(self) -> None:
        """Begin the next epoch if this worker is done with this one."""
        if self._empty and not self._open:
            self._place(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of that epoch, counted from 0. In the present epoch the position stays."""
        check_epoch(epoch)
        if epoch < self.epoch:
            raise UsageError(f"set_epoch({epoch}) after epoch {self.epoch}: a pool goes forward only")
        if epoch > self.epoch:
            self._first = epoch
            self._place(epoch)


def sampler_of(session: Session, order: SampleOrder, log: Log | None = None) -> Sampler | PoolBatches:
    """This worker's sampler. Collective: all workers call it with the same order at the same point of their scripts.

    Raises MismatchError if a worker has another order. A server, which does not train, gets the last worker's shares.
    ``log`` is for an elastic run whose workers go at their own pace.
    """
    if session.strategy.sync_mode().merges or not session.is_worker:
        if session.is_worker:
            order.check_alike(session)
        shares: Shares = Split(order, session.rank, session.world_size)
    elif session.elastic:
        return PoolBatches(order, session, log)
    else:
        if session.pools is None:
            session.pools = Pools(session)
        shares = session.pools.enter(order)
    return Sampler(order, shares)


class Pool:
    """Positions 0 to ``samples`` of every epoch, in pieces of ``piece``, for ``workers`` workers.

    Those that are ``used`` are left out.
    """

    def __init__(self, samples: int, piece: int, workers: int, used: Account | None = None) -> None:
        self._samples, self._piece, self._used = samples, piece, used or Account()
        self._at = dict.fromkeys(range(workers), -1)  # the epoch of each worker that has not left
        self._left: dict[int, list[range]] = {}  # what is left of each epoch that has begun

    @property
    def over(self) -> bool:
        """Whether all workers have left."""
        return not self._at

    def take(self, worker: int, epoch: int) -> range:
        """A worker's next piece of an epoch, empty when nothing is left. ValueError for an invalid request."""
        if worker not in self._at:
            raise ValueError("it has left")
        if not self._at[worker] <= epoch < MOST_EPOCHS:
            raise ValueError(f"it asks for epoch {epoch} after epoch {self._at[worker]}")
        if epoch not in self._left:
            if len(self._left) == MOST_OPEN:
                raise ValueError(f"it begins epoch {epoch} while {MOST_OPEN} are open")
            self._left[epoch] = self._used.left(epoch, self._samples)
        self._at[worker] = epoch
        left, piece = self._left[epoch], range(0)
        if left:
            piece, left[0] = left[0][: self._piece], left[0][self._piece :]
            if not left[0]:
                del left[0]
        self._forget()
        return piece

    def leave(self, worker: int) -> None:
        """Record that a worker makes no more requests. ValueError if it has left already."""
        if worker not in self._at:
            raise ValueError("it has left already")
        del self._at[worker]
        self._forget()

    def _forget(self) -> None:
        """Drop the epochs that all workers have passed."""
        least = min(self._at.values(), default=MOST_EPOCHS)
        for epoch in [epoch for epoch in self._left if epoch < least]:
            del self._left[epoch]


ASKED, GIVEN = 1 << 8, (1 << 8) + 1
"""Topics of messages, distinct from the topics between workers and owners of weights."""

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
        session.process.before_end.insert(0, self._leave)
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
            self._kept.append(Pool(order.samples, order.piece(workers), workers, Account(self._session.counted)))
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
        self._pools, self.number = pools, number
        self._last = -1

    def parts(self, epoch: int) -> Iterator[range]:
        """Positions in the order of that epoch, piece by piece, requested one ahead.

        Raises UsageError unless the epoch comes after the last one.
        """
        if epoch <= self._last:
            raise UsageError(
                f"epoch {epoch} is over: under this strategy every sample of an epoch is handed out once; call"
                f" set_epoch() with {self._last + 1} or more"
            )
        self._last = epoch
        return self._parts(epoch, self._pools.ask(self.number, epoch))

    def _parts(self, epoch: int, asked: Work | range) -> Iterator[range]:
        while piece := self._pools.hear(self.number, asked):
            asked = self._pools.ask(self.number, epoch)
            yield piece
