"""Owns a worker's sequence of push, update and pull with owners of weights, and the start of a server's.

A worker pushes its gradients bucket by bucket during backward. ``OwnedModel.step`` then sends the owners the values of
the optimizer's groups (learning rate and so on), the owners update their slices, and the worker pulls the new weights.
If weights are pulled by layer, the worker sends the values at the first gradient of a step, and pulls each bucket as
soon as it has pushed it. Between two steps workers may meet (``consolidate``) and leave.

A framework detects the weights and gradients that a script has changed. ``serving.owners`` sends the messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ..engine.order import NOW, When, Work
from ..engine.step import Action
from ..errors import UsageError
from ..nouns import Bucket
from ..serving.owner import PushGroups, shard_of
from ..serving.owners import LocalOwners, Owners, RemoteOwners
from ..serving.records import Record
from ..serving.server import Summing, serve, serve_beside, traffic_of
from ..serving.shard import Build, Groups, Model, StepValues, Traffic
from ..session.communicator import Array
from ..session.layout import Layout, copy_weights
from ..session.session import Session
from .exchange import BucketExchange
from .memory import Blocks
from .model import TrainedModel, nothing


class OwnedModel:
    """A worker's model. ``exchange`` pushes its gradients, and its weights are pulled into ``weights``.

    Under ``on=workers`` this process may own a part of the weights; ``build`` then makes the optimizer that updates
    them. ``learnt`` is the optimizer's state so far; rank 0 sends it to servers. ``apart`` is passed on to ``Shard``.
    All workers construct it together.
    """

    def __init__(
        self,
        exchange: BucketExchange,
        trained: TrainedModel,
        weights: Blocks,
        build: Build,
        learnt: Sequence[Record] = (),
        *,
        apart: bool = False,
    ) -> None:
        self.exchange, self.trained, self._weights = exchange, trained, weights
        self._session = session = exchange.session
        mode = session.strategy.sync_mode()
        self.together = mode.merges
        """Whether the pushes of all workers form one update, so that they train in lockstep."""
        buckets, by_layer = exchange.layout.buckets, session.strategy.schedule_object().apply == "layer"
        self._there = exchange.coded_on_device and self.together and not by_layer
        self._there = self._there and all(bucket.dtype == "float32" for bucket in buckets)
        self._traffic = traffic_of(session, self._model())
        self.owners = _owners(session, self._traffic, build, list(learnt), apart)
        self.scale = 1.0
        """The factor of the next update's gradients."""
        self._squared: float | None = None  # of the pushed gradients, once computed
        self.steps = 0
        """The clock of this session's protocol with the owners. A resumed run starts at 0 again."""
        self._unsaid = 0  # sum of the numbers of changes that owners have but workers have not compared yet
        self.met = ""
        """The call at which all workers met last; empty if workers train in lockstep."""
        self._applied = None if self.together else PushGroups(mode, 1, session.strategy.sync.name, session.momentum)
        self._pushes: dict[int, Work] = {}
        self._pushed: dict[int, Work] = {}  # the work that precedes the pull of each bucket in this step
        self.taken: Callable[[], None] = nothing
        """Called when the weights of all buckets have arrived; a framework sets it."""
        exchange.owners = self

    by_layer = False
    """Whether the pull of a bucket starts with its push, and the weights are used when a layer needs them."""

    # One step.

    def start(self, bucket: int, when: When = NOW) -> Work:
        """Push a bucket whose gradients are complete. Returns the push, or the pull if ``by_layer``."""
        work = self._pushes[bucket] = self._traffic.push(bucket, when)
        self._pushed[bucket] = self.owners.updated(bucket, work)
        return self.pull(bucket, When(priority=when.priority)) if self.by_layer else work

    def clip(self, max_norm: float) -> float:
        """Clip the next update's gradients to the norm ``max_norm``. Returns their norm before."""
        norm: float = self.scale * self._squared_norm() ** 0.5
        self.scale *= 1.0 if norm + 1e-6 <= max_norm else max_norm / (norm + 1e-6)  # NaN stays NaN, as in PyTorch
        return norm

    def overflown(self) -> bool:
        """Whether the pushed gradients of any worker contain an infinity or a NaN; all workers call it."""
        return not math.isfinite(self._squared_norm())

    def _squared_norm(self) -> float:
        if self._squared is None:
            self._squared = self.owners.squared_norm(self.steps + 1)
        return self._squared

    def begin(self, groups: Groups, *, skip: bool = False) -> None:
        """Tell the owners to apply the gradients of the present step, or to drop them (``skip``), without waiting.

        If each push is an update by itself, the owners also learn the weight of this worker's gradients.
        """
        scale, self.scale, self._squared = self.scale, 1.0, None
        changed, self._unsaid = self._unsaid, 0
        self.steps += 1
        weight = 1.0
        if self._applied is not None:
            self._applied(groups)  # owners apply it; calling it here raises its UsageError on the worker
            weight = self.trained.weight
        self.owners.tell(self.steps, StepValues(groups=groups, scale=scale, skip=skip, weight=weight), changed)

    def step(self, groups: Groups, *, skip: bool = False) -> None:
        """Tell the owners to apply the pushed gradients, or to drop them (``skip``), and wait for the new weights."""
        self.begin(groups, skip=skip)
        self.owners.told()
        self._take_up(self._pulls(), self.trained.machine.stepped)

    def shadow(self, kind: int, teller: int) -> bool:
        """Take part, without a batch, in a call of the workers whose tickets are of ``kind``; this worker pushed zeros.

        ``teller`` is the rank of one of these workers. Returns whether the step is over.
        """
        pulls = self.owners.shadow(kind, self.steps + 1, teller)
        self.steps += pulls
        if pulls:
            self._take_up(self._pulls())
        return pulls

    def pull(self, number: int, when: When = NOW) -> Work:
        """Start the pull of a bucket's new weights. It follows the bucket's push, if any, and ``begin``."""
        if self._there:  # decoded into the weights that the training thread may still read
            when = when._replace(before=partial(_one_by_one, self.exchange.staging.follow(), when.before))
        return self._traffic.pull(number, when._replace(gate=self._pushed.pop(number, None)))

    @property
    def pushes(self) -> list[Work]:
        """The last push of each bucket."""
        return list(self._pushes.values())

    def _pulls(self) -> list[Work]:
        priorities = self.exchange.layout.priorities
        return [self.exchange.pull(number, self.pull, priority) for number, priority in enumerate(priorities)]

    def _take_up(self, pulls: Sequence[Work], stepped: Callable[[], Sequence[Action]] = list) -> None:
        """Wait for the pulls of all buckets and enqueue their copies to the device."""
        staging, pair = self.exchange.staging, self._weights.pair
        if staging.device is not None and not self.by_layer and not self._there:
            pulls = [staging.up(pair(number), pull, pull.label) for number, pull in enumerate(pulls)]
        self._session.engine.wait(*pulls)
        self.trained.do(stepped())
        if staging.device is not None:
            staging.join()
        self.taken()

    # Between steps.

    def consolidate(self, call: str = "consolidate()") -> None:
        """Meet all workers that have not left, and pull the same weights as they do.

        Does nothing if workers train in lockstep. Sets ``met`` to the ``call`` at which all have met.
        """
        if not self.together:
            self._take_up(self._meet(call))

    def _meet(self, call: str) -> list[Work]:
        """Meet all workers and start the pulls of all buckets. Returns the pulls; none if workers train in lockstep."""
        if self.together:
            return []
        self.steps, self.met = self.owners.meet(self.steps, call)
        return [self.pull(number) for number in range(self._traffic.buckets)]

    @property
    def keeps(self) -> bool:
        """Whether the owners' weights may hold more than the workers'. A checkpoint then needs the owners'."""
        return self._traffic.keeps

    def weights(self) -> list[Record]:
        """The owners' weights, including changes by the script; all workers call it."""
        if self.together:
            self._session.barrier()
            return self.owners.ask("weights")
        self._session.engine.wait(*self._meet("state_dict()"))
        found = self.owners.ask("weights")
        self._session.engine.wait(*self._meet("state_dict()"))  # no worker may push before all have asked
        return found

    def change(self, weights: list[Record], number: int) -> None:
        """Give the owners weights that the script has changed.

        ``number`` is a digest of the change, which workers compare at the next step. UsageError if workers do not train
        in lockstep, because then no worker's weights take precedence.
        """
        if not self.together:
            raise UsageError(
                f"the weights were changed on this worker, and under sync={self._session.strategy.sync.name} owners"
                " keep their own: change or load weights before syncline.prepare()"
            )
        self.owners.replace(weights)
        self._unsaid = (self._unsaid + number) & 0xFFFFFFFF

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners; all workers call it."""
        if self.together:
            self.owners.load(records)
            return
        self._session.barrier()
        if self._session.rank == 0:
            self.owners.load(records)
        self._session.barrier()  # no worker may push before all owners have the state

    def resume(self, step: int, weights: list[Record]) -> None:
        """Tell the owners to continue from that step, with these weights if there are any; all workers call it.

        If workers do not train in lockstep, they pull the weights.
        """
        self._session.engine.wait(*self._meet("load_state_dict()"))
        self.owners.resume(step, weights)
        self.consolidate("load_state_dict()")

    def lay_out(self) -> None:
        """Switch to the present buckets of the exchange, which has cut the gradients already; all workers call it."""
        self.owners.move_out(self.keeps)
        if self._there:
            self._weights.bring_all_down()
        self._weights.cut(self.exchange.layout.buckets)
        copy_weights(self._session, self._weights.arrays)
        model = self._model()
        self._pushes = {}
        self._traffic = traffic_of(self._session, model)
        self.owners.move_in(self._traffic, len(model.layout.buckets))

    def _model(self) -> Model:
        """The model in its present layout, for ``serving``."""
        exchange = self.exchange
        gradients = exchange.storages[0].arrays
        weights = exchange.in_place(self._weights) if self._there else self._weights.arrays
        return Model(exchange.layout, gradients, weights, exchange.compression, exchange.key)


def _one_by_one(*calls: Callable[[], None] | None) -> None:
    for call in calls:
        if call is not None:
            call()


def _owners(session: Session, traffic: Traffic, build: Build, learnt: list[Record], apart: bool) -> Owners:
    """The owners that the strategy names: servers, or workers, possibly including this one."""
    together = session.strategy.sync_mode().merges
    if session.group.servers:
        remote = RemoteOwners(session)
        # Like the weights, rank 0's state replaces a server's own. In an elastic run servers wait for it, even if it is
        # none: what they have then counts if a process is lost.
        if session.rank == 0 and (learnt or session.elastic):
            remote.load(learnt)
        if not together:
            session.barrier()  # no push may be applied before the state is loaded
            session.process.before_end.append(partial(remote.leave, None))
        return remote
    holdings, followed = traffic.holdings(), traffic.followed()
    updates = holdings is not None or followed
    shard = shard_of(session, holdings or [], build, learnt, apart=apart) if updates else None
    follows = shard_of(session, followed, build, learnt, apart=apart) if followed else None
    if together:
        return LocalOwners(session, shard, traffic.buckets, follows)
    remote, over = RemoteOwners(session), None
    if shard is not None:
        over, remote.hold = serve_beside(session, shard, traffic, follows)
    session.process.before_end.append(partial(remote.leave, over))
    return remote


def serve_model(
    session: Session,
    layout: Layout,
    gradients: Blocks,
    weights: Blocks,
    build: Build,
    learnt: Sequence[Record] = (),
    *,
    apart: bool = False,
) -> None:
    """Own a part of a model's weights on a server until all workers have left. Arguments as for ``OwnedModel``."""
    compression = session.compression(layout.layers, layout.buckets, gradients.arrays)

    def lay(buckets: Sequence[Bucket]) -> tuple[Sequence[Array], Sequence[Array]]:
        return _cut(gradients, buckets), _cut(weights, buckets)

    serve(session, Model(layout, gradients.arrays, weights.arrays, compression), build, learnt, lay, apart=apart)


def add_up(session: Session, layout: Layout, gradients: Blocks) -> None:
    """Sum a model's gradients on a server until all workers have left."""
    compression = session.compression(layout.layers, layout.buckets, gradients.arrays)
    Summing(session, layout, gradients.arrays, compression, partial(_cut, gradients)).serve()


def _cut(stored: Blocks, buckets: Sequence[Bucket]) -> Sequence[Array]:
    stored.cut(buckets)
    return stored.arrays
