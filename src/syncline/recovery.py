"""Lets a run go on when a worker is lost: ``run`` calls a training function again, with the workers that are left.

    def train():
        while sampler.epoch < 10:
            for x, y in DataLoader(data, batch_sampler=sampler):
                ...
                optimizer.step()
                sampler.commit()

    syncline.elastic(train)

A lost worker breaks the step under way on all others: their calls of Syncline raise. Each survivor then ends its
session and agrees with the others on the members that are left (``membership``), over lines to the launcher
(``launch.relay``). They form a new session with new connections, plans and layouts. The worker that has made the most
updates gives its weights, optimizer state and positions to the others, whose values may be one step older. Then
``train`` is called again: its samplers begin at the step that broke.

Agreement needs the training threads of all survivors. A worker that is busy outside Syncline is waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .errors import NotBuiltError, PeerLost, SynclineError, UsageError
from .global_batches import GlobalBatches, RepeatedBatches, go_on
from .launch.relay import RelayLine
from .membership import Action, AskLauncher, Peer, Send, View, ViewKeeper, from_plain, to_plain
from .process import process
from .saving import packed, unpacked
from .session.session import Session
from .strategy.strategy import Strategy
from .wire.reports import say

T = TypeVar("T")

_TICK_S = 2.0
"""The time after which a worker that waits for others' messages sends its own again."""
_PATIENCE = 60
"""How often it does so before it suspects the others: they may be busy for as long outside Syncline."""
_CONNECT_S = 30.0
"""The time for the survivors to connect to each other, once they have agreed."""
_ATTEMPTS = 3
"""How many views may break before they begin, beside those that lose a worker."""
_TRANSPORTS = ("auto", "shm", "tcp")


class Stateful(Protocol):
    """An object whose state the survivors share, such as a learning-rate scheduler: what a checkpoint may contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, tensors and arrays."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Go on from the state of another worker."""
        ...


class _AllDone(Exception):
    """A member has seen that all have finished their training."""


def run(train: Callable[[], T], state: Sequence[Stateful] = ()) -> T:
    """Call ``train`` until it returns, and again whenever a worker is lost meanwhile.

    Under ``syncline run --elastic LEAST`` the run goes on while LEAST workers are left, and as long as a majority of
    the workers survives each loss, or the half that the launcher favours. Otherwise ``train`` is called once, and a
    loss ends the run.

    ``train`` must go on where it was: it takes its batches from ``syncline.sampler(global_batch=)``, and calls
    ``commit()`` after every ``optimizer.step()``. Prepared models, their optimizers and these samplers are the same on
    all workers when it is called again, and so is what ``state`` contains. All workers call ``run`` together.

    Raises UsageError or NotBuiltError for a run that cannot go on without a worker.
    """
    if process.elastic is None and (line := RelayLine.inherit()) is not None:
        process.elastic = Members(line)
    members: Members | None = process.elastic
    if members is None:
        for sampler in [] if process.joined is None else process.joined.global_batches:
            if isinstance(sampler, RepeatedBatches):
                sampler.shared = state
        return train()
    members.check(process.session, state)
    counters = [made.optimizer.register_step_post_hook(members.count) for made in process.prepared if made.optimizer]
    try:
        while True:
            try:
                result = train()
                if not process.session.alone:
                    process.session.barrier()
                members.tell_done()
                return result
            except SynclineError as error:
                lost = _lost(error)
                if lost is None:
                    raise
            except Exception as error:
                lost = _lost(error)
                if lost is None or str(lost) not in str(error):  # else a framework has wrapped the error
                    raise
            lost.__traceback__ = lost.__context__ = lost.__cause__ = None  # they keep the graph of the broken step
            try:
                members.go_on(lost, state)
            except _AllDone:
                return result
    finally:
        for counter in counters:
            counter.remove()


def _lost(error: Exception) -> PeerLost | None:
    """The loss that an error reports."""
    if isinstance(error, PeerLost):
        return error
    engine = None if process.joined is None else process.joined.process.unchecked
    fault = None if engine is None else engine.error
    return fault if isinstance(fault, PeerLost) else None


class Members:
    """This process's part in the agreement on members, and the sessions that follow from it."""

    def __init__(self, line: RelayLine) -> None:
        self._line = line
        peers = tuple(Peer(number, str(number)) for number in range(line.processes))
        self._keeper = ViewKeeper(
            peers[line.number], View(1, peers, len(peers)), {}, least=line.least, patience=_PATIENCE
        )
        self._run = os.environ.get("SYNCLINE_RUN_ID", "")
        self._calls = 0  # of syncline.elastic

    def count(self, *_: object) -> None:
        """Count an update of the weights: the hook of the optimizer."""
        self._keeper.finish()

    def check(self, session: Session, state: Sequence[Stateful] = ()) -> None:
        """Begin a call. Raise UsageError or NotBuiltError for a run that cannot go on without a worker."""
        self._calls += 1
        for one in state:
            _check_shareable(one)
        strategy, models = session.strategy, process.prepared
        if strategy.sync.name != "bsp" or not strategy.sync_mode().merges:
            raise NotBuiltError(f"syncline.elastic() works with sync=bsp without backup workers, not with {strategy}")
        _check_owners(strategy)
        if strategy.collective is not None or strategy.transport.name not in _TRANSPORTS:
            raise NotBuiltError(f"syncline.elastic() works over transport=auto, shm and tcp, not with {strategy}")
        if strategy.schedule_object().apply != "step":
            raise NotBuiltError("syncline.elastic() works with schedules whose steps end in their iteration: fixed")
        if len(session.family) > 1:
            raise NotBuiltError("syncline.elastic() works without groups of workers")
        if not session.alone and (len(models) != 1 or models[0].optimizer is None):
            raise NotBuiltError(
                "syncline.elastic() works with one prepared model of PyTorch and its optimizer: put several into one"
                " torch.nn.ModuleList, and call syncline.prepare() first"
            )
        if any(made.replica.normalises_over_ranks for made in models):
            raise NotBuiltError("syncline.elastic() works with BatchNorm, not with SyncBatchNorm")
        if not session.global_batches:
            raise UsageError(
                "syncline.elastic() needs to know where to go on: take the batches from syncline.sampler(global_batch=)"
            )
        _stay(session)
        self._line.send({"begun": self._calls})

    def tell_done(self) -> None:
        """Tell the others that all have finished their training."""
        self._line.send({"done": self._line.number, "call": self._calls})

    def go_on(self, lost: PeerLost, state: Sequence[Stateful]) -> None:
        """Go on in a session of the members that are left. Raises an error that says why this process does not."""
        from .frameworks.torch import keep_values

        assert process.joined is not None
        before, samplers = list(process.prepared), list(process.joined.global_batches)
        members = self._keeper.view.members
        suspects = [members[lost.rank].number] if 0 <= lost.rank < len(members) else []
        actions = [*self._keeper.suspect(suspects), *self._keeper.broken()]
        process.lose()
        for _ in range(self._line.processes + _ATTEMPTS):
            view = self._agree(actions, lost)
            put_back = [keep_values(made) for made in before]
            try:
                self._begin(view)
                self._restore(view, before, samplers, state)
            except UsageError:
                raise
            except SynclineError as error:
                say(f"syncline: view {view.number} broke before it began: {error}\n")
                process.lose()
                for put in put_back:  # they may be in part those of a source that is lost
                    put()
                actions = self._keeper.broken()
            else:
                self._keeper.restored()
                return
        raise PeerLost(f"{lost}; the workers that are left cannot connect", rank=lost.rank, host=lost.host)

    def _agree(self, actions: list[Action], lost: PeerLost) -> View:
        """Carry out actions and wait for packets, until a view is decided."""
        keeper = self._keeper
        while True:
            for action in actions:
                if isinstance(action, Send):
                    self._line.send({"to": action.to.number, "message": to_plain(action.message)})
                elif isinstance(action, AskLauncher):
                    self._line.send({"ask": action.view, "half": sorted(action.half)})
            if keeper.stopped:
                raise PeerLost(f"{lost}; the run cannot go on: {keeper.stopped}", rank=lost.rank, host=lost.host)
            if not keeper.halted:
                self._line.send({"view": keeper.view.number, "members": sorted(keeper.view.numbers)})
                return keeper.view
            actions = self._heard(self._line.receive(_TICK_S))

    def _heard(self, packet: dict[str, Any] | None) -> list[Action]:
        """Handle a packet, or None for a timeout."""
        keeper = self._keeper
        if packet is None:
            return keeper.timeout()
        if "from" in packet:
            number = packet["from"]
            return keeper.hear(Peer(number, str(number)), from_plain(packet["message"]))
        if "view" in packet:
            return keeper.favoured(packet["view"], packet["half"])
        if "done" in packet:
            if packet["done"] in keeper.view.numbers and packet.get("call") == self._calls:
                raise _AllDone
            return []
        return keeper.suspect([packet["ended"]])

    def _begin(self, view: View) -> None:
        """Begin the session of a view."""
        rank = view.members.index(self._keeper.me)
        process.begin_again(rank, len(view.members), f"{self._run}.{view.number}", _CONNECT_S)
        process.session.numbers = tuple(peer.number for peer in view.members)
        _stay(process.session)

    def _restore(
        self, view: View, before: Sequence[Any], samplers: Sequence[GlobalBatches], state: Sequence[Stateful]
    ) -> None:
        """Give all members the values of the view's source."""
        from .frameworks.torch import prepare_again

        session = process.session
        root = [peer.number for peer in view.members].index(view.source)
        for made in before:
            again = prepare_again(session, made, root)
            if again is not None:
                process.prepared.append(again)
        shared: list[Stateful] = [*(_Groups(made.optimizer) for made in before), *state]
        mine = packed([[one.state_dict() for one in each] for each in (shared, samplers)])
        values, positions = unpacked(mine if session.alone else session.tell_all(mine, root))
        for one, found in zip(shared, values, strict=True):
            one.load_state_dict(found)
        go_on(session, samplers, positions)
        if session.rank == 0:
            where = ", ".join(f"step {sampler.step} of epoch {sampler.epoch}" for sampler in samplers)
            left = len(view.members)
            say(f"syncline: {left} worker{'s go' if left > 1 else ' goes'} on (view {view.number}) at {where}\n")


class _Groups:
    """The values of an optimizer's groups, such as the learning rate."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [{name: group[name] for name in group if name != "params"} for group in self._groups]}

    def load_state_dict(self, state: Any) -> None:
        for group, values in zip(self._groups, state["groups"], strict=True):
            for name, value in values.items():
                if hasattr(group.get(name), "copy_"):  # a compiled optimizer reads its rate from this tensor
                    group[name].copy_(value)
                else:
                    group[name] = value


def _check_owners(strategy: Strategy) -> None:
    """Raise NotBuiltError for owners whose loss would end the run."""
    roles = strategy.roles
    if roles is None or not (roles.apart or roles.holds_weights):
        return
    what = "server processes" if roles.apart else "owners that hold the optimizer's state"
    raise NotBuiltError(
        f"syncline.elastic() works without {what}, not with {strategy}: use"
        f" ps(servers={roles.owners}, on=workers, update=worker), or an allreduce such as ring"
    )


def _check_shareable(one: Stateful) -> None:
    """Raise UsageError for an object whose state other workers could not take over."""
    try:
        packed(one.state_dict())
    except UsageError as error:
        raise UsageError(f"syncline.elastic() cannot share the state of a {type(one).__name__}: {error}") from error


def _stay(session: Session) -> None:
    """Let this process live on if a peer fails while the script is busy outside Syncline."""
    if session.process.watcher is not None:
        session.process.watcher.insists = False
