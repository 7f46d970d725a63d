"""The owner's side: takes gradients, applies updates, and releases the new weights to the workers.

``Owner`` carries out the decisions of the protocol's state machine. It knows no messages: a ``server`` calls it for the
requests that arrive; on workers that own weights and merge their pushes, ``owners`` calls it where all ranks make the
same call.

``Shares`` scales a push that is an update by itself, by its worker's share of all samples. Each push carries its own
weight, a number of samples, because no collective compares them. An owner uses the latest weight of every worker. For a
worker that has not pushed yet it assumes the weight of the current push, so workers of equal weight count alike from
the first push on. With unequal weights, one push of each adds up to the mean over all samples, as soon as the owner has
heard from all. The share multiplies the gradient and not the learning rate, because the optimizer's state (momentum,
moments) is made of gradients. ``PushGroups`` decides with which values of the optimizer's parameter groups a push is
applied.

``Compensation`` adjusts late gradients to the current weights. A worker computed its gradient g on the weights w that
it was sent; meanwhile other pushes have turned them into w'. To the first order the gradient at w' is g + H (w' - w),
where the squares of g's elements approximate the diagonal of the Hessian H: Zheng et al., "Asynchronous stochastic
gradient descent with delay compensation", ICML 2017. It costs a copy of the owned weights for every worker, and one
pass over gradients and both weights in blocks that stay in the cache.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..engine.trace import begin
from ..errors import ProtocolError, SynclineError, UsageError
from ..kernels.cpu import BLOCK_BYTES
from ..session.layout import REPLACING
from ..session.session import Session
from ..sync import Kept, SyncMode, alone, application_of, backup_of, no_look_ahead
from .protocol import ALL, Action, Add, Apply, Ledger, Measure, Release, Request
from .records import Array, Record, pack, unpack
from .shard import Build, Groups, Holding, Pushes, Shard, Update, add_up
from .turns import Account, Counted, Turns, counted_in

MOST_WEIGHT = 1e18
"""The largest weight of a push; larger ones would make sums overflow."""


class Answers(Protocol):
    """How an owner answers its workers."""

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """Tell these workers the squared norm of the gradients of this owner's part."""
        ...

    def release(self, released: Release) -> None:
        """Send the weights to these workers and let them go on."""
        ...


class Owner:
    """Keeps the ledger of one shard and carries out its decisions.

    ``buckets`` are those that workers push one by one, or ``ALL`` if one message announces a whole step. ``version``
    counts the updates of the weights; those of the last update may still be in progress, bucket by bucket. ``lags``
    has, for each worker, the number of updates made between the sending of weights and the push computed from them, in
    its last push and the bucket with the most. ``follows`` is the shard of another owner, which gets the same updates.
    """

    def __init__(
        self,
        session: Session,
        shard: Shard,
        pushes: Pushes,
        answers: Answers,
        buckets: Sequence[int] = (ALL,),
        follows: Shard | None = None,
    ) -> None:
        self._session, self.shard, self.pushes, self._answers = session, shard, pushes, answers
        mode = session.strategy.sync_mode()
        self.ledger = Ledger(session.group.workers, mode, buckets, session.called)
        self._adds, self._shares = backup_of(mode) > 0, Shares(session.group.workers)
        self._applied = PushGroups(mode, session.group.workers, session.strategy.sync.name, session.momentum)
        self.version = 0
        self.lags = [0] * session.group.workers
        self._leaving: tuple[bytes, bytes | None] = b"", None  # packed state and weights for the new owners
        self.follows = follows
        factor = application_of(mode).compensate
        self._compensation = Compensation(self.holdings, session.group.workers, factor) if factor else None
        self._since, self._last = 0, 0  # the steps before the shards' first update and after the last one told
        self._updating, self._ended = threading.Lock(), False
        self._merges, self._account = mode.merges, Account(session.counted)
        self._summed: set[int] = set()  # buckets whose gradients hold a sum of pushes

    def handle(self, request: Request) -> None:
        """Handle a worker's message; raises MismatchError if it is out of turn or contradicts another worker's."""
        if self._merges:
            self._carry_out(request)
            return
        with self._updating:
            if not self._ended:
                self._carry_out(request)

    def _carry_out(self, request: Request) -> None:
        pushes, answers = self.pushes, self._answers
        for action in self.ledger.handle(request):
            self._count(action)
            if isinstance(action, Measure):
                pushes.settle(action.worker)
                answers.tell_norm(action.workers, self.shard.squared_norm())
            elif isinstance(action, Add):
                self.lags[action.worker] = max(self.lags[action.worker], action.lag)
                times = self._shares.of(action.worker, action.values["weight"])
                if times and not action.values["skip"]:
                    anew = action.bucket not in self._summed
                    pushes.add(action.worker, action.bucket, action.values["scale"] * times, anew)
                    self._summed.add(action.bucket)
            elif isinstance(action, Apply):
                self.version += 1
                self._last = action.clock
                if action.worker != ALL:
                    self.lags[action.worker] = max(self.lags[action.worker], action.lag)
                if self._adds and action.bucket not in self._summed:  # no push of it was finite
                    continue
                self._summed.discard(action.bucket)
                pushes.update(action.worker, action.bucket, partial(self._update, action))
            elif isinstance(action, Release):
                if self._compensation is not None:
                    self._compensation.note(action.workers, action.bucket)
                answers.release(action)

    @property
    def shards(self) -> list[Shard]:
        """The shards that this process updates: its own, and the one that it follows."""
        return [self.shard] if self.follows is None else [self.shard, self.follows]

    @property
    def holdings(self) -> list[Holding]:
        """The slices of the ``shards``."""
        return [held for one in self.shards for held in one.holdings]

    def _count(self, action: Action) -> None:
        """Count the samples that an action puts into the weights."""
        try:
            self._account.note(action)
        except ValueError as error:
            worker = getattr(action, "worker", ALL)
            who = "a worker" if worker == ALL else self._session.name(worker)
            number = -1 if worker == ALL else self._session.member.number(worker)
            raise ProtocolError(f"the push of {who} makes no sense: {error}", rank=number) from error

    def hold(self) -> dict[int, list[list[Record] | None]]:
        """End all updates. Returns the contents of the ``shards`` after each of the last two steps, by step.

        A loss may have broken an update under way: parts that have made it are given as they were before.
        """
        with self._updating:
            self._ended = True
        return {clock: [one.after(clock, self._since) for one in self.shards] for clock in self._recent}

    # Where each push is an update by itself, none is ever undone, and an owner may have to make some after the session.

    def outlive(self, workers: Iterable[int]) -> None:
        """End all updates, and keep copies of everything, and of the arrived pushes of these workers."""
        with self._updating:
            self._ended = True
            arrived, holdings = {}, self.holdings
            self.shard = self.shard.detached()  # with a sum of pushes, if there is one
            self.follows = None if self.follows is None else self.follows.detached()
            for worker in workers:
                self.pushes.settle(worker)
                arrived[worker] = [held.gradient.copy() for held in holdings]
            if self._compensation is not None:
                self._compensation.holdings = self.holdings
            self.pushes = self._answers = _Afterwards(self, arrived)

    def catch_up(self, request: Request) -> None:
        """Handle a message whose turn came at other owners before the session ended."""
        self._carry_out(request)

    @property
    def counted(self) -> Counted:
        """The samples whose pushes the weights contain."""
        return self._account.counted

    def contents(self) -> list[list[Record]]:
        """Weights and state of each of the ``shards``."""
        return [[*one.weights(), *one.state()] for one in self.shards]

    @property
    def _recent(self) -> range:
        return range(max(0, self._last - 2), self._last + 1)

    def _update(self, action: Apply, bucket: int) -> None:
        """Apply an update. With replicas, keep what it changes, because a loss may break the step elsewhere."""
        roles = self._session.strategy.roles
        if not self._merges and self._ended:
            self._apply(action, bucket)
            return
        if roles is None or not roles.replicas or not self._merges:
            self._traced(action, bucket)
            return
        with self._updating:
            if not self._ended:
                for shard in self.shards:
                    shard.keep(bucket, action.clock)
                self._traced(action, bucket)

    def _traced(self, action: Apply, bucket: int) -> None:
        """Apply an update, with a span for the observer."""
        observer = self._session.observer
        if observer is None:
            self._apply(action, bucket)
            return
        of = "" if action.worker == ALL else f" of {self._session.called(action.worker)}'s push"
        of += "" if bucket == ALL else f", bucket {bucket}"
        label, version, clock = f"update of the weights{of}", action.version, action.clock
        span = begin(observer, "update", label, step=version, peer=action.worker, key=clock)
        self._apply(action, bucket)
        span.end()

    def _apply(self, action: Apply, bucket: int) -> None:
        """Apply an update; an error names the worker whose values do not fit this optimizer."""
        try:
            values = action.values
            if self._adds:  # scales and skips were applied to each push
                for shard in self.shards:
                    shard.apply(bucket, action.newest["groups"], 1.0)
                return
            times = 1.0 if action.worker == ALL else self._shares.of(action.worker, values["weight"])
            if values["skip"] or not times:
                return
            if self._compensation is not None:
                self._compensation.correct(action.worker, bucket, values["scale"])
            groups = self._applied(action.newest["groups"])
            for shard in self.shards:
                shard.apply(bucket, groups, values["scale"] * times, action.worker)
        except Exception as error:
            if isinstance(error, SynclineError) and not isinstance(error, UsageError):
                raise
            who = "all workers have" if action.worker == ALL else f"{self._session.name(action.worker)} has"
            raise ProtocolError(
                f"the update with the values that {who} pushed fails ({type(error).__name__}: {error}): do all"
                " processes have the same optimizer with the same groups?",
                rank=-1 if action.worker == ALL else self._session.member.number(action.worker),
            ) from error

    # A new layout (``session.layout``) gives slices to other owners.

    def move_out(self, keeps: bool) -> None:
        """Save state, and weights if ``keeps``, before the model's memory is laid out anew.

        ``keeps``: the owners' weights may be more precise than those of the workers.
        """
        self._leaving = pack(self.shard.state()), pack(self.shard.weights()) if keeps else None

    def move_in(self, holdings: Sequence[Holding], followed: Sequence[Holding] = ()) -> None:
        """Take over these slices in the new layout, with the state that the owners share; all owners call this."""
        mine = {held.slice.tensor for held in (*holdings, *followed)}
        (state, weights), self._leaving = self._leaving, (b"", None)
        learnt = [one for one in self._shared(state) if one.slice.tensor in mine]
        build, apart = self.shard.build, self.shard.apart
        self.shard, self._since = Shard(holdings, build, learnt, apart=apart), self._last
        if self.follows is not None:
            self.follows = Shard(followed, build, learnt, apart=apart)
        if weights is not None:
            self.shard.load_weights(one for one in self._shared(weights) if one.slice.tensor in mine)

    def _shared(self, data: bytes) -> Iterator[Record]:
        session, roles = self._session, self._session.strategy.roles
        assert roles is not None
        owners = tuple(dict.fromkeys((*roles.places(session.group), *roles.followers(session.group))))
        for process, told in zip(owners, session.everyone.share(owners, data, REPLACING), strict=True):
            yield from unpack(told, session.name(process), session.member.number(process))


class _Afterwards:
    """Pushes that arrived before a session ended, as copies, and answers that nobody waits for any more."""

    def __init__(self, owner: Owner, arrived: Mapping[int, Sequence[Array]]) -> None:
        self._owner, self._arrived = owner, arrived

    def settle(self, worker: int) -> None:
        """Copy the push into the gradients."""
        for held, gradient in zip(self._owner.holdings, self._arrived[worker], strict=True):
            np.copyto(held.gradient, gradient)

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:  # noqa: ARG002 - of all at once
        """Add the push to the gradients."""
        for held, gradient in zip(self._owner.holdings, self._arrived[worker], strict=True):
            add_up(held.gradient, gradient, scale, anew)

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Update at once: nobody reads the weights while a view ends."""
        if worker != ALL:
            self.settle(worker)
        update(bucket)

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """Do nothing: the session whose workers would be told is over."""

    def release(self, released: Release) -> None:
        """Do nothing: the session whose workers would be told is over."""


Part = tuple[int, int, int]
"""A part of the weights: the view of its session, the number of all parts there, and its own."""

Parts = dict[Part, list[Record]]
"""Weights and state of parts."""


def _parts_here(session: Session) -> list[Part | None]:
    """The part that this process owns, and the one that it follows."""
    roles, group = session.strategy.roles, session.group
    assert roles is not None
    return [
        (session.view, roles.owners, one.index(session.index)) if session.index in one else None
        for one in (roles.places(group), roles.followers(group))
    ]


class HeldParts:
    """The parts that a process owned or followed in a session that has ended."""

    def __init__(self, by_step: Mapping[int, Parts] | None = None, told: Sequence[dict[str, Any]] = ()) -> None:
        self._by_step, self._told = by_step or {}, told

    @classmethod
    def of(cls, session: Session, owner: Owner) -> HeldParts:
        """End the updates of this process's ``owner``.

        By step: all parts for the last step that this process has finished, and for the step before unless an update of
        the next has begun here.
        """
        mine = _parts_here(session)
        return cls(
            {
                clock: {
                    part: one for part, one in zip(mine, found, strict=False) if part is not None and one is not None
                }
                for clock, found in owner.hold().items()
            }
        )

    def count_from(self, earlier: int) -> HeldParts:
        """The first ``earlier`` steps of the run did not count so far."""
        self._by_step = {earlier + clock: found for clock, found in self._by_step.items()}
        return self

    def beside(self, older: HeldParts) -> HeldParts:
        """These parts and those of an earlier session, if others may need them: not all may have these ones yet."""
        if not self._by_step:
            return older
        steps = self._by_step.keys() | older._by_step.keys()
        return HeldParts({step: {**older.after(step), **self.after(step)} for step in steps}, self._told)

    def keys(self, step: int) -> list[Part]:
        """The parts of which this process has the values after that step."""
        return sorted(self._by_step.get(step, {}))

    def after(self, step: int) -> Parts:
        """The parts as they were after that step."""
        return self._by_step.get(step, {})

    @property
    def told(self) -> list[dict[str, Any]]:
        """The turns of each view and the samples, for others, where each push is an update by itself."""
        return list(self._told)

    def catch_up(self, ahead: Mapping[str, Any]) -> None:
        """Make the updates whose turns another owner of the same session has told."""


class HeldShards(HeldParts):
    """As above, where each push is an update by itself: the values after the last push, whatever the step.

    ``requests`` are the messages that this process holds, by worker.
    """

    def __init__(self, session: Session, owner: Owner, turns: Turns, requests: Mapping[int, Request]) -> None:
        super().__init__()
        self._owner, self._turns, self._requests = owner, turns, dict(requests)
        self._mine, self._view, self._older = _parts_here(session), session.view, HeldParts()
        owner.outlive([worker for worker, request in requests.items() if request.kind == "push"])

    def beside(self, older: HeldParts) -> HeldParts:
        """These and older ones. Before the first turn some owner may not have these yet: afterwards all have them."""
        self._older = HeldParts() if self._turns.taken else older
        return self

    def keys(self, step: int) -> list[Part]:
        """All parts of this process."""
        return sorted([*(part for part in self._mine if part is not None), *self._older.keys(step)])

    def after(self, step: int) -> Parts:
        """Their values."""
        both = zip(self._mine, self._owner.contents(), strict=False)
        return {**self._older.after(step), **{part: records for part, records in both if part is not None}}

    @property
    def told(self) -> list[dict[str, Any]]:
        """With the last turns of each view."""
        mine = {"taken": self._turns.taken, "recent": self._turns.recent, "counted": self._owner.counted}
        return [{"view": self._view, **mine}, *self._older.told]

    def catch_up(self, ahead: Mapping[str, Any]) -> None:
        """With the pushes that this process holds. ValueError if it then has others than that owner."""
        if ahead["view"] != self._view:
            self._older.catch_up(ahead)
            return
        for worker in self._turns.missing(ahead["taken"], ahead["recent"]):
            self._turns.take(worker)
            self._owner.catch_up(self._requests.pop(worker))
        if list(self._owner.counted) != counted_in(ahead["counted"]):
            raise ValueError("its weights contain the pushes of other samples")


def share_parts(
    session: Session, held: HeldParts, step: int, receivers: Sequence[int]
) -> tuple[list[Record], list[int]]:
    """The records of all parts after a step, of whoever holds them, on the ``receivers``. All processes call it.

    Second are the parts that nobody has: then there are no records. Owner and follower of a part have the same: the
    first process gives it. The session then knows the samples whose pushes the parts contain.
    """
    label, processes = "sharing the parts of the weights", range(session.group.processes)
    mine = json.dumps({"parts": held.keys(step), "turns": held.told}).encode()
    every = [mine] if session.alone else session.everyone.share(processes, mine, label)
    givers, missing, ahead = decide_parts([json.loads(data) for data in every])
    if missing:
        with contextlib.suppress(SynclineError):  # a process that ends must not disturb the others' exchange
            for _ in [] if session.alone else session.everyone.share(processes, b"", label):
                pass
        return [], missing
    if ahead is not None:
        try:
            session.counted = counted_in(ahead["counted"])
            held.catch_up(ahead)
        except ValueError as error:
            raise ProtocolError(f"{label}: {error}", rank=-1) from error
    parts = held.after(step)
    if session.alone:
        return [record for key in sorted(givers) for record in parts[key]], []
    joined = sorted({*receivers, *givers.values()})
    if session.index not in joined:
        return [], []
    data = pack(record for key, process in sorted(givers.items()) if process == session.index for record in parts[key])
    each = zip(joined, session.everyone.share(joined, data, label), strict=True)
    name, number = session.name, session.member.number
    return [record for process, one in each for record in unpack(one, name(process), number(process))], []


def decide_parts(told: Sequence[Mapping[str, Any]]) -> tuple[dict[Part, int], list[int], Mapping[str, Any] | None]:
    """From what all processes tell of their parts: who gives each part, or which ones are missing.

    The parts are those of the newest division of which there are all. Processes that have begun a view have its parts,
    and those to which it broke before have the parts of the view before, after the same step. Last is what the owner
    with most turns of that view tells, None if it counts no turns.
    """
    divisions: dict[tuple[int, int], dict[Part, int]] = {}
    for process, one in enumerate(told):
        for view, count, part in one["parts"]:
            divisions.setdefault((view, count), {}).setdefault((view, count, part), process)
    if not divisions:
        return {}, [0], None
    division = max(divisions, key=lambda one: (len(divisions[one]) == one[1], one))
    givers = dict(sorted(divisions[division].items()))
    turns = [one for each in told for one in each["turns"] if one["view"] == division[0]]
    ahead = max(turns, key=lambda one: int(one["taken"]), default=None)
    return givers, sorted({*range(division[1])} - {part for _, _, part in givers}), ahead


def shard_of(
    session: Session, holdings: Sequence[Holding], build: Build, learnt: Sequence[Record], *, apart: bool
) -> Shard:
    """The shard of this process, updated as the strategy says."""
    workers = 1 if session.momentum == "shared" else session.group.workers
    return Shard(holdings, build, learnt, apart=apart and _by_bucket(session), workers=workers)


def _by_bucket(session: Session) -> bool:
    """Whether owners update bucket by bucket if the optimizer allows it.

    If each push is an update, this needs the values of a step at its start, as with ``apply="layer"``.
    """
    strategy = session.strategy
    return strategy.sync_mode().merges or strategy.schedule_object().apply == "layer"


class Shares:
    """One owner's state of the weights of all workers."""

    def __init__(self, workers: int) -> None:
        self._weights: list[float | None] = [None] * workers

    def of(self, worker: int, weight: float) -> float:
        """Record a worker's ``weight`` and return the factor of its gradient: 1 if all weights are equal, 0 if all are
        0."""
        self._weights[worker] = weight
        total = sum(weight if known is None else known for known in self._weights)
        return weight * len(self._weights) / total if total else 0.0


class PushGroups:
    """Adapts the values of the optimizer's groups to a sync mode in which each worker's push is an update."""

    def __init__(self, mode: SyncMode, workers: int, sync: str, momentum: Kept) -> None:
        self._workers, self._sync = workers, sync
        self._shares = alone(mode) and application_of(mode).rate == "shared"
        self._looks_ahead = momentum == "dana"

    def __call__(self, groups: Groups) -> Groups:
        """The adapted groups; raises UsageError for groups that the mode cannot use."""
        if self._shares:
            groups = shared_rate(groups, self._workers, self._sync)
        return looking_ahead(groups, self._sync) if self._looks_ahead else groups


def shared_rate(groups: Groups, workers: int, sync: str) -> Groups:
    """The groups with each learning rate divided by the number of workers: N pushes then move as far as one step.

    Raises UsageError for a group without a learning rate.
    """
    shared = []
    for number, group in enumerate(groups):
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise UsageError(
                f"sync={sync} applies every worker's push with the learning rate divided by the number of workers, but"
                f" the optimizer's group {number} has no number as 'lr': use {sync}(rate=own), and choose the"
                f" optimizer's settings for {workers} times as many updates"
            )
        shared.append({**group, "lr": rate / workers})
    return shared


def looking_ahead(groups: Groups, sync: str) -> Groups:
    """The groups with Nesterov's momentum; raises UsageError for a group without momentum."""
    for number, group in enumerate(groups):
        if no_look_ahead(group):
            raise UsageError(
                f"sync={sync}(momentum=dana) looks ahead by Nesterov's momentum, so the optimizer's group {number}"
                " needs 'nesterov', 'momentum' above 0 and no 'dampening', as in torch.optim.SGD: use"
                f" {sync}(momentum=own), which keeps any optimizer's state for every worker"
            )
    return [{**group, "nesterov": True} for group in groups]


def check_kept(momentum: Kept, sync: str, optimizer: str, keeps: bool) -> None:
    """Raise UsageError if the mode keeps momentum for each worker and the optimizer has none.

    ``keeps`` says whether the optimizer has any state from one step to the next; ``optimizer`` is its name.
    """
    if momentum != "shared" and not keeps:
        raise UsageError(
            f"sync={sync}(momentum={momentum}) keeps the optimizer's state for every worker, and {optimizer}, as it is"
            " set, has no state from one step to the next: give it momentum, or leave momentum= out"
        )


class Compensation:
    """Keeps the weights that each worker was sent; ``factor`` is the lambda of the paper."""

    def __init__(self, holdings: Sequence[Holding], workers: int, factor: float) -> None:
        self.holdings, self._factor = holdings, factor
        self._sent = [[_told(held).copy() for held in holdings] for _ in range(workers)]

    def note(self, workers: Iterable[int], bucket: int) -> None:
        """Record that these workers are sent the current weights of a bucket, or of ``ALL``."""
        for worker in workers:
            for sent, held in self._of(worker, bucket):
                np.copyto(sent, _told(held))

    def correct(self, worker: int, bucket: int, scale: float) -> None:
        """Compensate a worker's gradients in the holdings, which the optimizer will multiply by ``scale``."""
        for sent, held in self._of(worker, bucket):
            compensate(held.gradient, held.weights, sent, self._factor * scale)

    def _of(self, worker: int, bucket: int) -> Iterator[tuple[Array, Holding]]:
        for sent, held in zip(self._sent[worker], self.holdings, strict=True):
            if bucket in (ALL, held.bucket):
                yield sent, held


def _told(held: Holding) -> Array:
    return held.weights if held.sent is None else held.sent


def compensate(gradient: Array, now: Array, then: Array, factor: float) -> None:
    """Compute ``gradient += factor * gradient**2 * (now - then)`` in place, all of one type and size."""
    step = max(1, BLOCK_BYTES // gradient.itemsize)
    room = np.empty(min(step, gradient.size), gradient.dtype)
    times = gradient.dtype.type(factor)
    for start in range(0, gradient.size, step):
        block = gradient[start : start + step]
        change = room[: block.size]
        np.subtract(now[start : start + step], then[start : start + step], out=change)
        change *= block
        change *= block
        change *= times
        block += change
