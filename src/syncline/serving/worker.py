"""The worker's side: a step asks the owners of the weights for the update, and waits for it.

During backward the gradients have been pushed bucket by bucket. ``Worker.step`` says so, with the optimizer's group
values (learning rate and so on); the owners of each slice apply the real update, and the new weights are pulled. How a
framework's parameters get them, and whether a script has changed what was pushed, is the framework's affair, and how
the owners are told is that of ``owners``.
"""

from __future__ import annotations

import math
from functools import partial

from ..engine.order import NOW, When, Work
from ..errors import UsageError
from ..session.layout import copy_weights
from ..session.session import Session
from .owner import shard_of
from .owners import LocalOwners, Owners, RemoteOwners
from .records import Record
from .server import serve_beside
from .shard import Build, Groups, Values
from .shares import PushGroups
from .traffic import Model, Traffic
from .ways import traffic_of


class Worker:
    """One worker's dealings with the owners of the weights of a model, which come by ``traffic``."""

    def __init__(self, session: Session, owners: Owners, traffic: Traffic) -> None:
        self._session, self.owners, self._traffic = session, owners, traffic
        self.scale = 1.0
        """What the next update's gradients are multiplied by."""
        self._squared: float | None = None  # the squared norm of the gradients that have been pushed, once asked for
        self.steps = 0
        """The clock of this session's protocol; a resumed run begins at 0 again."""
        self._unsaid = 0  # which changed weights the owners have taken while the workers have not compared them
        mode = session.strategy.sync_mode()
        self._together = mode.merges
        self.met = ""
        """The call at which all workers have met last, where they go at their own pace."""
        self._applied = PushGroups(mode, 1, session.strategy.sync.name)
        self._pushes: dict[int, Work] = {}
        self._pushed: dict[int, Work] = {}  # what the pulls of this step go behind

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        return self._traffic.keeps

    def clip(self, max_norm: float) -> float:
        """Have the next update's gradients clipped to a norm of ``max_norm``; their norm."""
        norm: float = self.scale * self._squared_norm() ** 0.5
        self.scale *= 1.0 if norm + 1e-6 <= max_norm else max_norm / (norm + 1e-6)  # NaN stays, as in PyTorch
        return norm

    def overflown(self) -> bool:
        """Whether anything in the pushed gradients of all workers is not finite; all of them ask."""
        return not math.isfinite(self._squared_norm())

    def _squared_norm(self) -> float:
        if self._squared is None:
            self._squared = self.owners.squared_norm(self.steps + 1)
        return self._squared

    def change(self, weights: list[Record], number: int) -> None:
        """Give the owners weights that the script has changed; the next step tells by ``number`` which.

        Raises UsageError where workers do not come to a step together, so that no one could say whose weights count.
        """
        if not self._together:
            raise UsageError(
                f"the weights were changed on this worker, and under sync={self._session.strategy.sync.name} owners go"
                " on with theirs: change weights, or load them, before syncline.prepare()"
            )
        self.owners.replace(weights)
        self._unsaid = (self._unsaid + number) & 0xFFFFFFFF

    def step(self, groups: Groups, *, skip: bool = False, weight: float = 1.0) -> None:
        """Have the pushed gradients applied, or dropped; returns when the owners let this worker pull."""
        self.begin(groups, skip=skip, weight=weight)
        self.owners.told()

    def begin(self, groups: Groups, *, skip: bool = False, weight: float = 1.0) -> None:
        """Have the gradients of a step applied that begins, or that has been pushed; returns at once.

        ``weight`` is what they count beside those of other workers, where these do not agree on it.
        """
        scale, self.scale, self._squared = self.scale, 1.0, None
        changed, self._unsaid = self._unsaid, 0
        self.steps += 1
        self._applied(groups)  # which owners do: here it says what is wrong
        values = Values(groups=groups, scale=scale, skip=skip, weight=1.0 if self._together else weight)
        self.owners.tell(self.steps, values, changed)

    def shadow(self, kind: int, teller: int) -> bool:
        """Take part, without batches, in what workers do who show tickets of ``kind``; whether to pull weights then.

        ``teller`` is one of them. The step's gradients have been pushed, zeros here.
        """
        pulls = self.owners.shadow(kind, self.steps + 1, teller)
        self.steps += pulls
        return pulls

    def start(self, bucket: int, when: When = NOW) -> Work:
        """Push a bucket whose gradients are complete."""
        work = self._pushes[bucket] = self._traffic.push(bucket, when)
        self._pushed[bucket] = self.owners.updated(bucket, work)
        return work

    def consolidate(self, call: str = "consolidate()") -> list[Work]:
        """Wait, between two steps, until all workers that have not left do so; the pulls of what all then have.

        Nothing where workers go in step: they have it. ``met`` is then at which ``call`` all have met.
        """
        if self._together:
            return []
        self.steps, self.met = self.owners.meet(self.steps, call)
        return [self.pull(number) for number in range(self._traffic.buckets)]

    @property
    def pushes(self) -> list[Work]:
        """The last one of each bucket."""
        return list(self._pushes.values())

    def pull(self, number: int, when: When = NOW) -> Work:
        """Start the pull of a bucket's new weights, behind its push, if there is one, and ``step`` or ``begin``."""
        return self._traffic.pull(number, when._replace(gate=self._pushed.pop(number, None)))

    def weights(self) -> list[Record]:
        """The weights as the owners have them, with what the script has changed; all workers call it."""
        if self._together:
            self._session.barrier()
            return self.owners.weights()
        self._session.engine.wait(*self.consolidate("state_dict()"))
        found = self.owners.weights()
        self._session.engine.wait(*self.consolidate("state_dict()"))  # nobody goes on before all have asked
        return found

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners; all workers call it."""
        if self._together:
            self.owners.load(records)
            return
        self._session.barrier()
        if self._session.rank == 0:
            self.owners.load(records)
        self._session.barrier()  # nobody pushes before all owners have it

    def resume(self, step: int, weights: list[Record]) -> None:
        """Have the owners go on from that step with their own weights, where there are any; all workers call it.

        Where workers do not go in step, these pull them by ``consolidate``.
        """
        self._session.engine.wait(*self.consolidate("load_state_dict()"))
        self.owners.resume(step, weights)

    def move_out(self) -> None:
        """The model's memory is about to be laid out anew."""
        self.owners.move_out(self.keeps)

    def move_in(self, model: Model) -> None:
        """Go on with the model as it is laid out now, after ``move_out``; all workers call it."""
        copy_weights(self._session, model.weights)
        self._pushes = {}
        self._traffic = traffic_of(self._session, model)
        self.owners.move_in(self._traffic, len(model.layout.buckets))


class PushThenPull:
    """Pushes each bucket of a step that has begun, and pulls it at once."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def start(self, bucket: int, when: When = NOW) -> Work:
        """The work is that of the pull."""
        self._worker.start(bucket, when)
        return self._worker.pull(bucket, When(priority=when.priority))


def attach(session: Session, model: Model, build: Build, learnt: list[Record], *, apart: bool = False) -> Worker:
    """A worker of that model, which owns a part of the weights where the strategy says so.

    ``learnt`` is what the optimizer knows already; of owners that are no workers, rank 0 tells them. ``apart`` is for
    ``Shard``. All workers call it.
    """
    traffic = traffic_of(session, model)
    together = session.strategy.sync_mode().merges
    if session.group.servers:
        remote = RemoteOwners(session)
        if learnt and session.rank == 0:  # as the weights, also where a server's script has not loaded it, or another
            remote.load(learnt)
        if not together:
            session.barrier()  # before it has, nothing may be applied
            session.member.process.before_end.append(partial(remote.leave, None))
        return Worker(session, remote, traffic)
    holdings = traffic.holdings()
    shard = None if holdings is None else shard_of(session, holdings, build, learnt, apart=apart)
    if together:
        return Worker(session, LocalOwners(session, shard, len(model.layout.buckets)), traffic)
    remote = RemoteOwners(session)
    over = None if shard is None else serve_beside(session, shard, traffic)
    session.member.process.before_end.append(partial(remote.leave, over))
    return Worker(session, remote, traffic)
