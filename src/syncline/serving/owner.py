"""The owner's side: it takes gradients in, applies updates, and lets the workers have the new weights.

``Owner`` does what the protocol's state machine decides, wherever the owner is: ``Moves`` is how pushes, weights and
answers travel there. Knows no messages: a ``server`` is asked by them, and ``owners`` are on workers whose pushes are
merged, where everybody comes to the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from ..engine.trace import begin
from ..errors import ProtocolError, SynclineError, UsageError
from ..session.session import Session
from ..sync import application_of, backup_of, momentum_of
from .compensation import Compensation
from .protocol import ALL, Add, Apply, Ledger, Measure, Release, Request
from .records import Record
from .shard import Build, Holding, Shard
from .shares import PushGroups, Shares
from .updating import Update


class Moves(Protocol):
    """What moves between an owner and its workers."""

    def settle(self, worker: int) -> None:
        """Return when the push of that worker, or of ``ALL``, lies in the gradients, and nothing reads the weights."""
        ...

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """Tell these workers the squared norm of the gradients here."""
        ...

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """Add what that worker has pushed of a bucket, or of ``ALL``, times ``scale``, to the next update of all."""
        ...

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Have what that worker, or ``ALL``, has pushed of a bucket, or of all, updated as soon as it is there."""
        ...

    def release(self, released: Release) -> None:
        """Let these workers have the weights, and go on."""
        ...


class Owner:
    """Keeps the ledger of one shard and does what it says.

    ``buckets`` are pushed by themselves; where workers tell of a step at once that is ``ALL``. ``version`` counts the
    updates of weights; the last may still be on its way, bucket by bucket. ``lags`` are how many had been made since
    the weights on which each worker's last push was computed, of the bucket with most.
    """

    def __init__(self, session: Session, shard: Shard, moves: Moves, buckets: Sequence[int] = (ALL,)) -> None:
        self._session, self.shard, self._moves = session, shard, moves
        mode = session.strategy.sync_mode()
        self.ledger = Ledger(session.group.workers, mode, buckets, session.called)
        self._adds, self._shares = backup_of(mode) > 0, Shares(session.group.workers)
        self._applied = PushGroups(mode, session.group.workers, session.strategy.sync.name)
        self.version = 0
        self.lags = [0] * session.group.workers
        factor = application_of(mode).compensate
        self._compensation = Compensation(shard.holdings, session.group.workers, factor) if factor else None

    def handle(self, request: Request) -> None:
        """Take a worker's message; raises MismatchError for one that is not its next, or differs from the others'."""
        moves = self._moves
        for action in self.ledger.handle(request):
            if isinstance(action, Measure):
                moves.settle(action.worker)
                moves.tell_norm(action.workers, self.shard.squared_norm())
            elif isinstance(action, Add):
                self.lags[action.worker] = max(self.lags[action.worker], action.lag)
                times = self._shares.of(action.worker, action.values["weight"])
                if times and not action.values["skip"]:
                    moves.add(action.worker, action.bucket, action.values["scale"] * times)
            elif isinstance(action, Apply):
                self.version += 1
                if action.worker != ALL:
                    self.lags[action.worker] = max(self.lags[action.worker], action.lag)
                moves.update(action.worker, action.bucket, partial(self._update, action))
            elif isinstance(action, Release):
                if self._compensation is not None:
                    self._compensation.note(action.workers, action.bucket)
                moves.release(action)

    def _update(self, action: Apply, bucket: int) -> None:
        """One update, which is observed."""
        observer, of = (
            self._session.observer,
            "" if action.worker == ALL else f" of {self._session.called(action.worker)}'s push",
        )
        if observer is None:
            self._apply(action, bucket)
            return
        of += "" if bucket == ALL else f", bucket {bucket}"
        label, version, clock = f"update of the weights{of}", action.version, action.clock
        span = begin(observer, "update", label, step=version, peer=action.worker, key=clock)
        self._apply(action, bucket)
        span.end()

    def _apply(self, action: Apply, bucket: int) -> None:
        """One update; raises ProtocolError that names the worker whose values are none of this optimizer's."""
        try:
            values = action.values
            if self._adds:  # these were pushes' own
                self.shard.apply(bucket, action.newest["groups"], 1.0)
                return
            times = 1.0 if action.worker == ALL else self._shares.of(action.worker, values["weight"])
            if values["skip"] or not times:
                return
            if self._compensation is not None:
                self._compensation.correct(action.worker, bucket, values["scale"])
            groups = self._applied(action.newest["groups"])
            self.shard.apply(bucket, groups, values["scale"] * times, action.worker)
        except Exception as error:
            if isinstance(error, SynclineError) and not isinstance(error, UsageError):
                raise
            who = "all workers have" if action.worker == ALL else f"{self._session.name(action.worker)} has"
            raise ProtocolError(
                f"the update with the values that {who} pushed fails ({type(error).__name__}: {error}): do all"
                " processes have the same optimizer with the same groups?",
                rank=-1 if action.worker == ALL else self._session.member.number(action.worker),
            ) from error


def shard_of(
    session: Session, holdings: Sequence[Holding], build: Build, learnt: Sequence[Record], *, apart: bool
) -> Shard:
    """What this process owns, updated as the strategy says."""
    workers = 1 if momentum_of(session.strategy.sync_mode()) == "shared" else session.group.workers
    return Shard(holdings, build, learnt, apart=apart and _by_bucket(session), workers=workers)


def _by_bucket(session: Session) -> bool:
    """Whether owners update bucket by bucket where the optimizer allows it.

    Pushes that are updates by themselves they do so where workers tell the values of a step when it begins.
    """
    strategy = session.strategy
    return strategy.sync_mode().merges or strategy.schedule_object().apply == "layer"
