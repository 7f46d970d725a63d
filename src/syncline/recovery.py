"""Lets a run go on when a worker is lost, or joins: ``run`` calls a training function again, with the present workers.

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
``train`` is called again: its samplers begin at the step that broke. Workers that train alone between exchanges of
weights agree on the number of exchanges instead of steps, and go back to the last one (``_Mark``).

A worker that joins runs the script alone up to ``run``, and asks there. Rank 0 looks for such requests, and announces
the end of the session in its ticket of a step. All end it before the next step, agree on a view with the new worker,
and go on as after a loss. If a view with a new worker does not begin, the others go on without that worker.

Server processes are members too (``served``). They serve in ``syncline.prepare()``, which begins again in each session,
and where a new server joins. The launcher tells them when the workers are in ``run``.

Agreement needs the training threads of all survivors. A worker that is busy outside Syncline is waited for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

from .errors import GroupError, NotBuiltError, PeerLost, RollCallError, SynclineError, UsageError, ViewEnds
from .global_batches import SAMPLES, GlobalBatches, RepeatedBatches, go_on
from .launch.relay import Name, RelayLine
from .membership import (
    JOINING,
    Action,
    AskLauncher,
    Join,
    Message,
    Peer,
    Prepare,
    Refused,
    Send,
    View,
    ViewKeeper,
    from_plain,
    to_plain,
)
from .process import Seat, process
from .sampling import PoolBatches
from .saving import packed, unpacked
from .serving.owner import HeldParts, share_parts
from .session.session import Session
from .strategy.strategy import Strategy, check_elastic
from .training.model import nothing
from .version import __version__
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
_TOLD_S = 10.0
"""The time in which the launcher tells a server that the workers are in a call, or ends it."""
_POLL_S = 0.02
_LOOK_S = 0.5
"""The time between two looks of rank 0 for a worker that asks to join."""
_LAUNCHER = Peer(0, "launcher")
"""Whom a worker that joins asks: the launcher knows the members."""


class Stateful(Protocol):
    """An object whose state the survivors share, such as a learning-rate scheduler: what a checkpoint may contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, tensors and arrays."""
        ...

    def load_state_dict(self, state: Any) -> object:
        """Go on from the state of another worker."""
        ...


class Held(Protocol):
    """The parts of a model's weights and optimizer state that a worker has, once its session is over."""

    def put_together_again(self, session: Session, step: int) -> list[int]:
        """Give the model all parts as they were after that step. Returns the parts that nobody has."""
        ...


class Lasting(Protocol):
    """A model and its optimizer as they outlive the sessions of a run. Each framework has its own."""

    @property
    def described(self) -> str:
        """A text that differs between models that cannot be trained together."""
        ...

    @property
    def shared(self) -> Sequence[Stateful]:
        """Objects whose states workers take over besides weights and the optimizer's state, such as its rate."""
        ...

    def check_lasting(self, strategy: Strategy) -> None:
        """Raise NotBuiltError if the model cannot go on in another session under this strategy."""
        ...

    def count(self, finished: Callable[[], object]) -> Callable[[], None]:
        """Call ``finished`` after every update of the weights, until the returned call."""
        ...

    def keep_values(self) -> Callable[[], None]:
        """Copy weights and state, between two sessions. The returned call puts them back."""
        ...

    def copy_again(self, session: Session, root: int, whole: bool) -> None:
        """Take over the weights of ``root``, and the optimizer's state if each worker has the ``whole`` of it."""
        ...

    def hold_whole(self, view: int, step: int) -> Held:
        """The model of a worker that is alone, as the only part of its view. Called only if other owners may follow."""
        ...

    def prepare_again(self, session: Session) -> Any:
        """Make the model part of another session. Returns a prepared model of PyTorch, if it is one."""
        ...


@dataclass(frozen=True)
class _Mark:
    """What a worker goes back to if its next step breaks, or an exchange of weights after several.

    ``models`` has the marks of its prepared models (``frameworks.torch.prepare.Mark``).
    """

    finished: int
    models: Sequence[Any]
    positions: Sequence[Callable[[], None]]
    shared: Sequence[Stateful]
    states: bytes

    def put_back(self) -> None:
        """Go back, between two sessions."""
        for model in self.models:
            model.put_back()
        for go_back in self.positions:
            go_back()
        for one, state in zip(self.shared, unpacked(self.states), strict=True):
            one.load_state_dict(state)


class _PartsLost(Exception):
    """Nobody who is left has some part of the weights and their optimizer state."""


class _AllDone(Exception):
    """A member has seen that all have finished their training."""


def run(train: Callable[[], T], state: Sequence[Stateful] = ()) -> T:
    """Call ``train`` until it returns, and again whenever a worker is lost meanwhile.

    Under ``syncline run --elastic LEAST`` the run goes on while LEAST workers are left, and as long as a majority of
    the workers survives each loss, or the half that the launcher favours. Under ``--elastic LEAST:MOST`` a new worker
    takes the place of a lost one, and ``train`` is called again when it joins. Otherwise ``train`` is called once, and
    a loss ends the run.

    ``train`` must go on where it was: it takes its batches from ``syncline.sampler(global_batch=)``, and calls
    ``commit()`` after every ``optimizer.step()``. Prepared models, their optimizers and these samplers are the same on
    all workers when it is called again, and so is what ``state`` contains. All workers call ``run`` together. A worker
    that comes too late, when all have finished, ends here with status 0.

    Raises UsageError or NotBuiltError for a run that cannot go on without a worker, and RollCallError in a worker that
    cannot join.
    """
    members = _members()
    if members is None:
        for sampler in [] if process.joined is None else process.joined.global_batches:
            if isinstance(sampler, RepeatedBatches):
                sampler.shared = state
        return train()
    members.check(process.session, state)
    counters = [given.count(members.count) for given in members.given]
    try:
        if members.joins:
            _join(members)
        while True:
            try:
                result = train()
                _meet(process.session)
                members.tell_done()
                return result
            except SynclineError as error:
                ended = _ended(error)
                if ended is None:
                    raise
            except Exception as error:
                ended = _ended(error)
                if ended is None or str(ended) not in str(error):  # else a framework has wrapped the error
                    raise
            ended.__traceback__ = ended.__context__ = ended.__cause__ = None  # they keep the graph of the broken step
            try:
                members.go_on(ended)
            except _AllDone:
                return result
    finally:
        for end_count in counters:
            end_count()
        members.end_call()


def _meet(session: Session) -> None:
    """Wait until all workers have finished. Where each goes at its own pace, all then have the same weights."""
    if session.strategy.sync_mode().merges:
        if not session.alone:
            session.barrier()
        return
    for consolidate in session.consolidates.values():  # nobody waits for the steps of a worker that is there
        consolidate()


def _members() -> Members | None:
    """This process's part in the agreement on members. None if its launcher lets no run go on."""
    if process.elastic is None and (line := RelayLine.inherit()) is not None:
        if process.range is not None:
            line.narrow(process.range)
        process.elastic = Members(line)
    found: Members | None = process.elastic
    return found


def served(prepare: Callable[[], T | None]) -> T | None:
    """The result of ``prepare``, which is None on a server that is not needed any more.

    A server of an elastic run calls it again in the next session after each loss. A new one is alone in its first call,
    and joins the others after it.
    """
    while True:
        session = process.session
        try:
            found = prepare()
            if session.is_worker or (members := _members()) is None:
                return found
            if members.joins:
                members.state_of_server(session)
                _join(members)
                continue
            if not members.serves:
                return found
            ended = PeerLost("all workers have left in the middle of their training", rank=-1)
        except SynclineError as error:
            lost = None if session.is_worker else _ended(error)
            if not isinstance(lost, PeerLost) or (members := _members()) is None or not members.is_told(_TOLD_S):
                raise
            ended = lost
            ended.__traceback__ = ended.__context__ = ended.__cause__ = None  # they keep the memory of the session
        try:
            members.go_on(ended)
        except _AllDone:
            return None


def _join(members: Members) -> None:
    """Join the run, or end this process if all have finished."""
    try:
        members.join()
    except _AllDone:
        say(f"syncline: {members.me} ends: all others had finished before it could join\n")
        process.leave()


def _ended(error: BaseException) -> PeerLost | ViewEnds | None:
    """The loss that an error reports, or the end of a view."""
    if isinstance(error, PeerLost | ViewEnds):
        return error
    if isinstance(error.__cause__, ViewEnds):
        return error.__cause__
    session = process.joined
    engine = None if session is None else session.process.unchecked
    fault = None if engine is None else engine.error
    if isinstance(fault, PeerLost):
        return fault
    return None if session is None else session.ended


class Members:
    """This process's part in the agreement on members, and the sessions that follow from it."""

    def __init__(self, line: RelayLine) -> None:
        self._line = line
        session = process.joined
        self._servers = 0 if session is None else session.group.servers  # at the start
        workers = line.processes - self._servers
        peers = tuple(Peer(number, line.name(number), number >= workers) for number in range(line.processes))
        limits: dict[str, Any] = {"least": line.least, "most": max(line.most, workers), "servers": self._servers}
        limits["patience"] = _PATIENCE
        if line.joins:
            serves = session is not None and not session.is_worker
            self._keeper = ViewKeeper.joining(line.name(line.number), [_LAUNCHER], {}, serves=serves, **limits)
        else:
            self._keeper = ViewKeeper(peers[line.number], View(1, peers, len(peers)), {}, **limits)
        self._keeper.newest = session is None or _goes_on_from_the_newest(session.strategy)
        self.given: list[Lasting] = []
        """The prepared models, with their optimizers."""
        self._trained = self._keeper.view  # of the last session; a process that joins has had none with the others
        self._over: set[int] = set()  # the numbers of processes that have ended
        self._asked, self._look_s = False, 0.0
        self._run = os.environ.get("SYNCLINE_RUN_ID", "")
        self._sessions = process.sessions - 1  # before the first one of this run
        self._calls = 0  # of syncline.elastic
        self._repairs = 0  # the lost workers without which the run has gone on
        self._earlier: list[int] = []  # for each model, the steps that were finished before its owners' clock began
        self._state: Sequence[Stateful] = ()
        self._mark: _Mark | None = None  # in the present session
        self._steps = self._counted = 0  # the steps before the present session, and the finished ones of the keeper
        self._held = HeldParts()  # of a server: its parts after the last steps, until the next update
        self._told = self._done = 0  # the calls of ``syncline.elastic`` that a server knows, and those that are over

    @property
    def serves(self) -> bool:
        """On a server: whether the workers are in a call of ``syncline.elastic``, which goes on after a loss."""
        self._look_for_ends()
        for packet in self._line.kept:
            self._note_call(packet)
        return self._told > self._done

    def is_told(self, within_s: float) -> bool:
        """As ``serves``, at the latest after this time: the launcher's word may come after the loss."""
        deadline = time.monotonic() + within_s
        while not self.serves and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.serves

    def _note_call(self, packet: dict[str, Any]) -> None:
        """On a server: note a call of the workers, and how their count of steps differs from this server's clock."""
        begun, earlier = packet.get("begun"), packet.get("earlier")
        if _is_number(begun) and type(earlier) is int and packet.get("in") == self._keeper.view.number:
            self._told, self._earlier = max(self._told, packet["begun"]), [earlier]
        elif "done" in packet and _is_number(packet.get("call")):
            self._done = max(self._done, packet["call"])

    @property
    def joins(self) -> bool:
        """Whether this process is no member yet."""
        return self._keeper.me.number == JOINING

    @property
    def me(self) -> str:
        """This process in messages."""
        return "this server" if self._keeper.me.serves else "this worker"

    def count(self, *_: object) -> None:
        """Count an update of the weights: the hook of the optimizer. One of this worker alone does not count."""
        exchanges = [made.replica.trained.weights for made in process.prepared]
        if all(weights is None or weights.follows for weights in exchanges):
            self._keeper.finish()

    def _begins(self) -> None:
        """Mark what this worker has, unless the mark is that of the last finished step."""
        if not process.session.alone and (self._mark is None or self._mark.finished != self._keeper.finished):
            self._mark = self._marked()

    def _marked(self) -> _Mark:
        models = [made.mark() for made in process.prepared]
        if not any(model.whole for model in models):
            return _Mark(self._keeper.finished, models, (), (), packed([]))
        shared = self._shared()
        positions = [sampler.mark() for sampler in process.session.global_batches]
        return _Mark(self._keeper.finished, models, positions, shared, packed([one.state_dict() for one in shared]))

    def _shared(self) -> list[Stateful]:
        return [*(one for given in self.given for one in given.shared), *self._state]

    def check(self, session: Session, state: Sequence[Stateful] = ()) -> None:
        """Begin a call. Raise UsageError or NotBuiltError for a run that cannot go on without a worker."""
        self._calls += 1
        self._state = state
        for one in state:
            _check_shareable(one)
        strategy = session.strategy
        of_torch = [*(made.given for made in process.prepared), *(session.lone or [])]
        self.given = [*of_torch, *session.lasting] or self.given
        check_elastic(strategy, joins=bool(self._line.most))
        self._keeper.newest = _goes_on_from_the_newest(strategy)
        if len(session.family) > 1:
            raise NotBuiltError("syncline.elastic() works without groups of workers")
        if (self.joins or not session.alone) and len(self.given) != 1:
            raise NotBuiltError(
                "syncline.elastic() works with one prepared model and its optimizer: put several into one"
                " torch.nn.ModuleList or dictionary, and call syncline.prepare() first"
            )
        for given in self.given:
            given.check_lasting(strategy)
        if any(made.replica.normalises_over_ranks for made in process.prepared):
            raise NotBuiltError("syncline.elastic() works with BatchNorm, not with SyncBatchNorm")
        _check_samplers(session)
        terms = {
            "data": "; ".join(str(sampler.order) for sampler in session.global_batches),
            "state": ", ".join(type(one).__name__ for one in state),
            "call of syncline.elastic()": str(self._calls),
        }
        self._keeper.state(_terms_of(self.given) | terms)
        _stay(session)
        self._watch(session)
        self._count_from_here()
        earlier = self._earlier[0] if self._earlier else 0  # of one model
        self._line.send({"begun": self._calls, "in": self._keeper.view.number, "earlier": earlier})

    def state_of_server(self, session: Session) -> None:
        """State what a server that joins must have in common with the others."""
        self._keeper.state(_terms_of([*(session.lone or []), *session.lasting]))

    def _count_from_here(self) -> None:
        """Note the steps that were finished before those of the owners' clocks."""
        if not process.session.is_worker:
            self._earlier = [self._keeper.view.step]
            return
        clients = [made.client for made in process.prepared]
        self._earlier = [self._keeper.finished - (0 if client is None else client.owned.steps) for client in clients]

    def tell_done(self) -> None:
        """Tell the others that all have finished their training."""
        self._line.send({"done": self._line.number, "call": self._calls})

    # Workers that join.

    def join(self) -> None:
        """Become a member of the run, with the values of the others. RollCallError if they do not take this process."""
        self._begin_view(self._keeper.timeout, None)
        self._told = 1  # nobody joins a later call

    def _watch(self, session: Session) -> None:
        """Note what happens to the models of a session, and let it end when a worker joins."""
        for made in process.prepared:
            made.replica.listeners.begins, made.replica.trained.after_average = self._begins, self._keeper.finish
        if not self._line.most:
            return
        session.renewed = self._is_asked
        if session.alone and session.lone is None:
            session.lone = []
        for sampler in session.global_batches:
            sampler.before_batch = self._end_alone if session.alone else None

    def end_call(self) -> None:
        """Let no worker join any more: outside ``syncline.elastic`` nothing would go on with it."""
        self._asked, self._mark = False, None
        if process.joined is not None:
            for made in process.prepared:
                made.replica.listeners.begins = made.replica.trained.after_average = nothing
            process.joined.renewed = None
            for sampler in process.joined.global_batches:
                sampler.before_batch = None

    def _is_asked(self) -> bool:
        """Whether a process asks to join that the members will take. Others are answered."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._line.look()
            packets = [*self._line.kept]
            self._line.kept.clear()
            for packet in packets:
                self._note_end(packet)
            for packet in packets:
                join = _join_in(packet)
                if join is None or self._keeper.admits(join):
                    self._line.kept.append(packet)  # until the view ends
                else:
                    self._tell(self._heard(packet))
                self._asked |= join is not None and self._keeper.admits(join) and _process(join.name) not in self._over
        return self._asked

    def _end_alone(self) -> None:
        """End the session of a worker that is alone, between two batches, if another one joins."""
        if self._is_asked():
            raise ViewEnds("a worker joins the run: syncline.elastic() goes on with it in another session")

    # Views.

    def go_on(self, ended: PeerLost | ViewEnds) -> None:
        """Go on in a session of the present members. Raises an error that says why this process does not."""
        self._begin_view(lambda: self._halt(ended), ended)

    def _halt(self, ended: PeerLost | ViewEnds) -> list[Action]:
        """End the present view, because of a loss or for a worker that joins."""
        keeper = self._keeper
        if isinstance(ended, PeerLost):
            members = self._seated(keeper.view)
            suspects = [members[ended.rank].number] if 0 <= ended.rank < len(members) else []
            return [*keeper.suspect(suspects), *keeper.broken()]
        actions, view = keeper.broken(), keeper.view
        while self._line.kept:
            actions += self._heard(self._line.kept.popleft())
        return actions if keeper.view != view else [*actions, *keeper.renew()]

    def _begin_view(self, first: Callable[[], list[Action]], ended: Exception | None) -> None:
        """Carry out the ``first`` actions, agree on a view, and begin its session with the values of its source."""
        assert process.joined is not None
        samplers = list(process.joined.global_batches)
        if isinstance(ended, ViewEnds) and not process.joined.alone:
            with suppress(SynclineError):
                process.joined.barrier()  # a worker that is busy is waited for as in a step, and is not suspected
        actions = first()
        self._asked = False
        mark = self._mark
        if process.prepared and (mark is None or mark.finished != self._keeper.finished):
            mark = self._marked()
        self._count_steps(mark)
        held = self._hold(process.joined)
        if process.joined.serving is not None:
            self._held = process.joined.serving().count_from(self._earlier[0]).beside(self._held)
        process.lose()
        for _ in range(self._line.processes + _ATTEMPTS):
            view = self._agree(actions, ended)
            if mark is not None:
                mark.put_back()
            put_back = [given.keep_values() for given in self.given]
            try:
                self._begin(view)
                self._restore(view, held, samplers, mark)
            except _PartsLost as error:
                raise self._failed(ended, f"the run cannot go on: {error}") from None
            except UsageError:
                raise
            except SynclineError as error:
                if not self._is_followed():
                    say(f"syncline: view {view.number} broke before it began: {error}\n")
                process.lose()
                for put in put_back:  # they may be in part those of a source that is lost
                    put()
                actions = [*self._keeper.suspect(self._blamed(view, error)), *self._keeper.broken()]
            else:
                self._keeper.restored()
                self._mark, self._counted = None, view.step
                self._trained, self._repairs = view, process.session.repairs
                self._count_from_here()
                return
        raise self._failed(ended, "the workers that are left cannot connect")

    def _count_steps(self, mark: _Mark | None) -> None:
        """Count the steps of the present session. A worker that was alone counts them as finished."""
        alone = self._keeper.finished - self._counted
        self._steps = self._steps + alone if mark is None else mark.models[0].steps

    def _hold(self, session: Session) -> list[Held | None]:
        """What this worker has of each model in parts; None for a model that every worker has whole."""
        if session.alone and session.strategy.server_holds_weights:
            return [given.hold_whole(self._keeper.view.number, self._keeper.finished) for given in self.given]
        before = zip(process.prepared, self._earlier, strict=True) if session.is_worker else ()
        return [made.hold_parts(earlier) for made, earlier in before] or [None] * len(self.given)

    def _blamed(self, view: View, error: SynclineError) -> frozenset[int]:
        """Whom to leave out after a view broke before it began: those that have ended, or else those that were new.

        Nobody if an older member is lost whose end is not known yet: without the new ones too few might be left. Nobody
        either if the next view is proposed already.
        """
        self._look_for_ends()
        over = frozenset(peer.number for peer in view.members if _process(peer.name) in self._over)
        new = view.numbers - self._trained.numbers if self._trained.number else frozenset[int]()
        if isinstance(error, PeerLost) and 0 <= error.rank < len(view.members):
            new = new if self._seated(view)[error.rank].number in new else frozenset()
        return over or (frozenset() if self._is_followed() else new)

    def _failed(self, ended: Exception | None, why: str) -> SynclineError:
        """The error of a process that does not go on."""
        if isinstance(ended, PeerLost):
            return PeerLost(f"{ended}; {why}", rank=ended.rank, host=ended.host)
        return RollCallError(f"{self.me} cannot join the run: {why}") if ended is None else GroupError(why)

    def _agree(self, actions: list[Action], ended: Exception | None) -> View:
        """Carry out actions and wait for packets, until a view is decided."""
        keeper = self._keeper
        while True:
            self._tell(actions)
            if keeper.stopped:
                what = "" if self.joins else "the run cannot go on: "
                raise self._failed(ended, f"{what}{keeper.stopped}")
            if not keeper.halted:
                view = keeper.view
                actions = keeper.suspect(peer.number for peer in view.members if _process(peer.name) in self._over)
                if not actions:
                    members = [_process(peer.name) for peer in self._seated(view)]
                    self._line.send({"view": view.number, "members": members})
                    return view
                continue
            actions = self._heard(self._line.receive(_TICK_S))

    def _tell(self, actions: Sequence[Action]) -> None:
        """Send what actions ask for."""
        for action in actions:
            if isinstance(action, Send) and action.to == _LAUNCHER:
                self._line.send({"join": to_plain(action.message)})
            elif isinstance(action, Send):
                self._line.send({"to": _process(action.to.name), "message": to_plain(action.message)})
            elif isinstance(action, AskLauncher):
                self._line.send({"ask": action.view, "half": sorted(action.half)})

    def _heard(self, packet: dict[str, Any] | None) -> list[Action]:
        """Handle a packet, or None for a timeout."""
        keeper = self._keeper
        if packet is None:
            return keeper.timeout()
        if _is_number(packet.get("from")):
            sender = self._member(packet["from"]) or Peer(JOINING, str(Name(packet["from"], "elsewhere", 0)))
            try:
                message = _message_in(packet)
            except ValueError:  # only a process that joins may have another version
                return [Send(sender, Refused(f"this run has version {__version__}, and not yours"))]
            if isinstance(message, Join) and (_join_in(packet) is None or _process(message.name) in self._over):
                return []  # it has died since, or names another process
            return keeper.hear(sender, message)
        half = packet.get("half")
        if _is_number(packet.get("view")) and isinstance(half, list) and all(type(one) is int for one in half):
            return keeper.favoured(packet["view"], half)
        self._note_call(packet)
        if keeper.me.serves and not self.joins and self._told <= self._done:
            raise _AllDone
        if "done" in packet and (self.joins or (self._member(packet["done"]) and packet.get("call") == self._calls)):
            raise _AllDone
        self._note_end(packet)
        peer = self._member(packet.get("ended"))
        return [] if peer is None else keeper.suspect([peer.number])

    def _member(self, process: object) -> Peer | None:
        """The member with that number of a process."""
        return next((peer for peer in self._keeper.view.members if _process(peer.name) == process), None)

    def _seated(self, view: View) -> list[Peer]:
        """The members of a view by their places in its session: servers come last."""
        return sorted(view.members, key=lambda peer: (peer.serves, peer.number))

    def _look_for_ends(self) -> None:
        """Note the ends of processes of which the launcher has told. Does not wait."""
        self._line.look()
        for packet in self._line.kept:
            self._note_end(packet)

    def _note_end(self, packet: dict[str, Any]) -> None:
        """Note the end of a process, if the packet tells one."""
        if _is_number(packet.get("ended")):
            self._over.add(packet["ended"])

    def _begin(self, view: View) -> None:
        """Begin the session of a view."""
        members, servers = self._seated(view), len(view.servers)
        if self._servers and not servers:
            raise _PartsLost("all servers are lost: start again from your last checkpoint")
        rank, run = members.index(self._keeper.me), f"{self._run}.{view.number}"
        names = [name for peer in members if (name := Name.read(peer.name)) is not None]
        if len(names) < len(members):
            raise GroupError(f"the members of view {view.number} have names that no launcher gives: {members}")
        number = self._sessions + view.number - 1
        place = Seat(names[0].host, names[0].port, rank, tuple(name.host for name in names), servers)
        process.begin_again(place, run, number, _CONNECT_S, self._check_members)
        process.session.numbers = tuple(name.number for name in names)
        process.session.view = view.number
        process.session.updated = self._forget_held
        _stay(process.session)

    def _forget_held(self) -> None:
        """Free the parts of the earlier sessions: no server needs them after an update."""
        self._held = HeldParts()

    def _is_followed(self) -> bool:
        """Whether another member proposes the next view: one more worker has asked to join. Does not wait."""
        self._look_for_ends()
        for packet in self._line.kept:
            with suppress(ValueError):
                message = _message_in(packet) if "from" in packet else None
                if isinstance(message, Prepare) and message.base.number == self._keeper.view.number:
                    return True
        return False

    def _check_members(self) -> None:
        """Raise PeerLost if a member has ended, and GroupError if another view follows: nobody waits for the others."""
        if self._is_followed():
            raise GroupError("the next view is proposed already")
        for rank, peer in enumerate(self._seated(self._keeper.view)):
            if _process(peer.name) in self._over:
                raise PeerLost(f"process {peer.name} has ended before all were connected", rank=rank)

    def _restore(
        self,
        view: View,
        held: Sequence[Held | None],
        samplers: Sequence[GlobalBatches | PoolBatches],
        mark: _Mark | None,
    ) -> None:
        """Give all members the values of the view's source, and what they have ``held`` of each model in parts."""
        session = process.session
        if not session.is_worker:
            if missing := share_parts(session, self._held, view.step, [0])[1]:
                raise _PartsLost(_lost_with("servers", missing, session))
            return
        root = [peer.number for peer in self._seated(view)].index(view.source)
        for given, parts in zip(self.given, held, strict=True):
            given.copy_again(session, root, parts is None)
            if parts is not None and (missing := parts.put_together_again(session, view.step)):
                raise _PartsLost(_lost_with("servers" if session.group.servers else "workers", missing, session))
            again = given.prepare_again(session)
            if again is not None:
                process.prepared.append(again)
        shared = self._shared()
        repairs = self._repairs + len(self._trained.numbers - self._trained.servers - view.numbers)
        divided = [one for one in samplers if isinstance(one, GlobalBatches)]
        states = [[one.state_dict() for one in each] for each in (shared, divided)]
        mine = packed([*states, repairs, self._steps])
        told = mine if session.alone else session.tell_all(mine, root)
        values, positions, session.repairs, self._steps = unpacked(told)
        for one, found in zip(shared, values, strict=True):
            one.load_state_dict(found)
        go_on(session, divided, positions)
        _hand_out_again(session, samplers)
        for number, made in enumerate(process.prepared):
            same = mark is not None and mark.finished == view.step
            made.take_over(root, self._steps, mark.models[number] if mark is not None and same else None)
        self._watch(session)
        if session.rank == 0:
            where = ", ".join(sampler.where for sampler in samplers)
            left, new = session.world_size, len(view.numbers - self._trained.numbers)
            some = session.group.servers
            beside = f" and {some} server{'s' if some > 1 else ''}" if some else ""
            goes = "go" if left > 1 or some else "goes"
            who = f"{left} worker{'s' if left > 1 else ''}{beside} {goes} on{f', {new} of them new,' if new else ''}"
            say(f"syncline: {who} (view {view.number}) at {where}\n")


def _hand_out_again(session: Session, samplers: Sequence[GlobalBatches | PoolBatches]) -> None:
    """Let pools of batches begin with what the weights do not contain. Worker 0 knows it from the owners."""
    pools = [one for one in samplers if isinstance(one, PoolBatches)]
    if pools and not session.alone:
        session.counted = unpacked(session.tell_all(packed(list(session.counted)), 0))
    for pool in pools:
        pool.enter(session)


def _lost_with(who: str, parts: Sequence[int], session: Session) -> str:
    roles, again = session.strategy.roles, "start again from your last checkpoint"
    if roles is None or not roles.replicas:
        return f"the server with part {parts[0]} of the weights is lost: {again}"
    return f"both {who} with the optimizer's state of part {parts[0]} are lost: {again}"


def _goes_on_from_the_newest(strategy: Strategy) -> bool:
    """Whether a view begins with the most steps that a member has finished, instead of the fewest.

    Where each push is an update by itself no step is undone: owners know which ones the weights contain.
    """
    return not strategy.server_holds_weights or not strategy.sync_mode().merges


def _check_samplers(session: Session) -> None:
    """Raise UsageError or NotBuiltError unless a sampler tells where to go on."""
    together = session.strategy.sync_mode().merges
    if not session.global_batches:
        raise UsageError(
            "syncline.elastic() needs to know where to go on: take the batches from syncline.sampler("
            f"{'global_batch=' if together else 'batch_size='})"
        )
    if together:
        return
    if len(session.global_batches) > 1:
        raise NotBuiltError(
            f"syncline.elastic() works with one sampler under sync={session.strategy.sync.name}, where a push names the"
            f" batch that it was computed from: this script has {len(session.global_batches)}"
        )
    if os.environ.get(SAMPLES):
        raise NotBuiltError(
            f"--samples writes steps of all workers together, and under sync={session.strategy.sync.name} each worker"
            " makes its own: leave it out"
        )


def _terms_of(given: Sequence[Lasting]) -> dict[str, str]:
    """What all processes must have in common, workers and servers."""
    model = "; ".join(one.described for one in given)
    return {"version": __version__, "strategy": process.strategy, "elastic": str(process.range), "model": model}


def _join_in(packet: dict[str, Any]) -> Join | None:
    """The request to join in a packet, if it has one."""
    with suppress(ValueError):
        message = _message_in(packet) if "from" in packet else None
        if isinstance(message, Join) and _process(message.name) == packet["from"]:
            return message
    return None


def _process(name: str) -> int:
    """The number of the process with that name; -1 if no launcher gives such a name."""
    found = Name.read(name)
    return -1 if found is None else found.number


def _is_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _message_in(packet: dict[str, Any]) -> Message:
    """The message in a packet. ValueError for another one, and if a process in it has a name that no launcher gives."""
    message = from_plain(packet.get("message"))
    for name in _names_in(message):
        if Name.read(name) is None:
            raise ValueError(f"no launcher gives the name {name!r:.40}")
    return message


def _names_in(value: Any) -> Iterator[str]:
    """The names of all processes in a message, or in a part of one."""
    if isinstance(value, Peer | Join):
        yield value.name
    elif is_dataclass(value):
        for one in fields(value):
            yield from _names_in(getattr(value, one.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _names_in(item)


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
