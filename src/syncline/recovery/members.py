"""The sessions that follow from the agreement on members: what each process keeps of the last one for the next."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest

from ..errors import GroupError, NotBuiltError, PeerLost, RollCallError, SynclineError, UsageError, ViewEnds
from ..global_batches import GlobalBatches, go_on, log_lost_pushes, log_of_pushes
from ..launch.relay import Name, RelayLine
from ..membership import Action, View
from ..process import Seat, process
from ..sampling import PoolBatches
from ..saving import packed, unpacked
from ..serving.owner import HeldParts, share_parts
from ..session.session import Session
from ..strategy.strategy import Strategy, check_elastic
from ..training.model import nothing
from ..version import __version__
from ..wire.reports import say
from .agreement import Agreement, LeftOut
from .lasting import Lasting, Mark, Stateful, check_shareable

_CONNECT_S = 30.0
"""The time for the survivors to connect to each other, once they have agreed."""
_ATTEMPTS = 3
"""How many views may break before they begin, beside those that lose a worker."""


class _PartsLost(Exception):
    """Nobody who is left has some part of the weights and their optimizer state."""


class Members:
    """The members of a run as this process knows them, and its models in the sessions of their views."""

    def __init__(self, line: RelayLine) -> None:
        session = process.joined
        self._servers = 0 if session is None else session.group.servers  # at the start
        serves = session is not None and not session.is_worker
        self.agreement = Agreement(line, self._servers, serves)
        self._keeper, self._line = self.agreement.keeper, line
        self._keeper.newest = session is None or _goes_on_from_the_newest(session.strategy)
        self.given: list[Lasting] = []
        """The prepared models, with their optimizers."""
        self._trained = self._keeper.view  # of the last session; a process that joins has had none with the others
        self._run = os.environ.get("SYNCLINE_RUN_ID", "")
        self._sessions = process.sessions - 1  # before the first one of this run
        self._repairs = 0  # the lost workers without which the run has gone on
        self._earlier = 0  # the steps that were finished before the clock of the model's owners began
        self._state: Sequence[Stateful] = ()
        self._mark: Mark | None = None  # in the present session
        self._steps = self._counted = 0  # the steps before the present session, and the finished ones of the keeper
        self._held = HeldParts()  # this process's parts of the sessions that have ended, until the next update

    def count(self, *_: object) -> None:
        """Count an update of the weights: the hook of the optimizer. One of this worker alone does not count."""
        self._forget_held()
        exchanges = [made.replica.trained.weights for made in process.prepared]
        if all(weights is None or weights.follows for weights in exchanges):
            self._keeper.finish()

    def _begins(self) -> None:
        """Mark what this worker has, unless the mark is that of the last finished step."""
        if not process.session.alone and (self._mark is None or self._mark.finished != self._keeper.finished):
            self._mark = self._marked()

    def _marked(self) -> Mark:
        before = () if self._mark is None else self._mark.models
        models = [made.mark(one) for made, one in zip_longest(process.prepared, before)]
        if not any(model.whole for model in models):
            return Mark(self._keeper.finished, models, (), (), b"")
        shared = self._shared()
        positions = [sampler.mark() for sampler in process.session.global_batches]
        return Mark(self._keeper.finished, models, positions, shared, packed([one.state_dict() for one in shared]))

    def _shared(self) -> list[Stateful]:
        return [*(one for given in self.given for one in given.shared), *self._state]

    def check(self, session: Session, state: Sequence[Stateful] = ()) -> None:
        """Begin a call. Raise UsageError or NotBuiltError for a run that cannot go on without a worker."""
        self.agreement.calls += 1
        self._state = state
        for one in state:
            check_shareable(one)
        strategy = session.strategy
        of_torch = [*(made.given for made in process.prepared), *(session.lone or [])]
        self.given = [*of_torch, *session.lasting] or self.given
        check_elastic(strategy, self._line.least)
        self._keeper.newest = _goes_on_from_the_newest(strategy)
        if len(session.family) > 1:
            raise NotBuiltError("syncline.elastic() works without groups of workers")
        if (self.agreement.joins or not session.alone) and len(self.given) != 1:
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
            "call of syncline.elastic()": str(self.agreement.calls),
        }
        self._keeper.state(_terms_of(self.given) | terms)
        _stay(session)
        self._watch(session)
        self._count_from_here()
        self.agreement.tell_begun(self._earlier)

    def state_of_server(self, session: Session) -> None:
        """State what a server that joins must have in common with the others."""
        self._keeper.state(_terms_of([*(session.lone or []), *session.lasting]))

    def _count_from_here(self) -> None:
        """Note the steps that were finished before those of the owners' clocks."""
        if not process.session.is_worker:
            self.agreement.earlier = self._keeper.view.step
            return
        client = process.prepared[0].client if process.prepared else None
        self._earlier = self._keeper.finished - (0 if client is None else client.owned.steps)

    # Workers that join.

    def join(self) -> None:
        """Become a member of the run, with the values of the others. RollCallError if they do not take this process."""
        self._begin_view(self._keeper.timeout, None)
        self.agreement.has_joined()

    def _watch(self, session: Session) -> None:
        """Note what happens to the models of a session, and let it end when a worker joins."""
        for made in process.prepared:
            trained = made.replica.trained
            trained.after_average = self._keeper.finish
            if trained.weights is not None or next(made.model.buffers(), None) is not None:  # else a step marks nothing
                made.replica.listeners.begins = self._begins
        if not self._line.most:
            return
        session.renewed = self.agreement.is_asked
        if session.alone and session.lone is None:
            session.lone = []
        for sampler in session.global_batches:
            looks = session.alone or (sampler.pooled and session.rank == 0)
            sampler.before_batch = self._end_if_asked if looks else None

    def end_call(self) -> None:
        """Let no worker join any more: outside ``syncline.elastic`` nothing would go on with it."""
        self.agreement.ask_no_more()
        self._mark = None
        if process.joined is not None:
            for made in process.prepared:
                made.replica.listeners.begins = made.replica.trained.after_average = nothing
            process.joined.renewed = None
            for sampler in process.joined.global_batches:
                sampler.before_batch = None

    def _end_if_asked(self) -> None:
        """End the session between two batches if a process joins: that of all, if each goes at its own pace."""
        if self.agreement.is_asked():
            raise process.session.fail(ViewEnds())

    def meet(self) -> None:
        """Wait until all are in the call, if one of them may end the session for all."""
        session = process.session
        if self._line.most and not session.alone and not session.strategy.sync_mode().merges:
            session.barrier()

    # Views.

    def go_on(self, ended: PeerLost | ViewEnds) -> None:
        """Go on in a session of the present members. Raises an error that says why this process does not."""
        self._begin_view(lambda: self._halt(ended), ended)

    def _halt(self, ended: PeerLost | ViewEnds) -> list[Action]:
        """End the present view, because of a loss or for a worker that joins."""
        return self.agreement.lost(ended.rank) if isinstance(ended, PeerLost) else self.agreement.renew()

    def _begin_view(self, first: Callable[[], list[Action]], ended: Exception | None) -> None:
        """Carry out the ``first`` actions, agree on a view, and begin its session with the values of its source."""
        assert process.joined is not None
        samplers = list(process.joined.global_batches)
        if isinstance(ended, ViewEnds) and not process.joined.alone:
            with suppress(SynclineError):
                process.joined.barrier()  # a worker that is busy is waited for as in a step, and is not suspected
        actions = first()
        self.agreement.ask_no_more()
        mark = self._mark
        if process.prepared and (mark is None or mark.finished != self._keeper.finished):
            mark = self._marked()
        self._count_steps(mark)
        self._hold(self._earlier)
        process.lose()
        for _ in range(self._line.processes + _ATTEMPTS):
            try:
                view = self.agreement.reach(actions)
            except LeftOut as error:
                what = "" if self.agreement.joins else "the run cannot go on: "
                raise self._failed(ended, f"{what}{error}") from None
            if mark is not None:
                mark.put_back()
            put_back = [given.keep_values() for given in self.given]
            try:
                self._begin(view)
                steps = self._restore(view, samplers, mark)
            except _PartsLost as error:
                raise self._failed(ended, f"the run cannot go on: {error}") from None
            except UsageError:
                raise
            except SynclineError as error:
                if not self.agreement.is_followed():
                    say(f"syncline: view {view.number} broke before it began: {error}\n")
                self._hold(view.step)  # others may have begun it, without parts of the session before
                process.lose()
                for put in put_back:  # they may be in part those of a source that is lost
                    put()
                new = view.numbers - self._trained.numbers if self._trained.number else frozenset[int]()
                blamed = self.agreement.blamed(view, new, error)
                actions = [*self._keeper.suspect(blamed), *self._keeper.broken()]
            else:
                self._keeper.restored()
                self._mark, self._steps, self._counted = None, steps, view.step
                self._trained, self._repairs = view, process.session.repairs
                self._count_from_here()
                return
        raise self._failed(ended, "the workers that are left cannot connect")

    def _count_steps(self, mark: Mark | None) -> None:
        """Count the steps of the present session. A worker that was alone counts them as finished."""
        alone = self._keeper.finished - self._counted
        self._steps = self._steps + alone if mark is None else mark.models[0].steps

    def _hold(self, earlier: int) -> None:
        """Keep the parts of the model that this process has in its session, if it has got that far, beside older ones.

        Its owners' clock does not count the first ``earlier`` steps.
        """
        session, found = process.joined, HeldParts()
        if session is None or not session.strategy.server_holds_weights:
            return
        if session.serving is not None:
            found = session.serving().count_from(self.agreement.earlier)
        elif process.prepared:
            found = process.prepared[0].hold_parts(earlier)
        elif session.is_worker and session.alone:
            found = self.given[0].hold_whole(self._keeper.view.number, self._keeper.finished, session.counted)
        self._held = found.beside(self._held)

    def _failed(self, ended: Exception | None, why: str) -> SynclineError:
        """The error of a process that does not go on."""
        if isinstance(ended, PeerLost):
            return PeerLost(f"{ended}; {why}", rank=ended.rank, host=ended.host)
        return RollCallError(f"{self.agreement.me} cannot join the run: {why}") if ended is None else GroupError(why)

    def _begin(self, view: View) -> None:
        """Begin the session of a view."""
        members, servers = view.seated, len(view.servers)
        if self._servers and not servers:
            raise _PartsLost("all servers are lost: start again from your last checkpoint")
        rank, run = members.index(self._keeper.me), f"{self._run}.{view.number}"
        names = [name for peer in members if (name := Name.read(peer.name)) is not None]
        if len(names) < len(members):
            raise GroupError(f"the members of view {view.number} have names that no launcher gives: {members}")
        number = self._sessions + view.number - 1
        place = Seat(names[0].host, names[0].port, rank, tuple(name.host for name in names), servers)
        process.begin_again(place, run, number, _CONNECT_S, self.agreement.check_members)
        process.session.numbers = tuple(name.number for name in names)
        process.session.view = view.number
        process.session.updated = self._forget_held
        _stay(process.session)

    def _forget_held(self) -> None:
        """Free the parts of the earlier sessions: nobody needs them after an update."""
        self._held = HeldParts()

    def _restore(self, view: View, samplers: Sequence[GlobalBatches | PoolBatches], mark: Mark | None) -> int:
        """Give all members the values of the view's source, and the model that they hold in parts.

        Returns the steps of the run so far.
        """
        session = process.session
        if not session.is_worker:
            if missing := share_parts(session, self._held, view.step, [0])[1]:
                raise _PartsLost(_lost_with("servers", missing, session))
            return self._steps
        root = [peer.number for peer in view.seated].index(view.source)
        in_parts = session.strategy.server_holds_weights
        for given in self.given:
            given.copy_again(session, root, not in_parts)
            if in_parts and (missing := given.put_together_again(session, self._held, view.step)):
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
        values, positions, session.repairs, steps = unpacked(told)
        for one, found in zip(shared, values, strict=True):
            one.load_state_dict(found)
        go_on(session, divided, positions)
        self._hand_out_again(view, samplers)
        for number, made in enumerate(process.prepared):
            same = mark is not None and mark.finished == view.step
            made.take_over(root, steps, mark.models[number] if mark is not None and same else None)
        self._watch(session)
        if session.rank == 0:
            where = ", ".join(sampler.where for sampler in samplers)
            left, new = session.world_size, len(view.numbers - self._trained.numbers)
            some = session.group.servers
            beside = f" and {some} server{'s' if some > 1 else ''}" if some else ""
            goes = "go" if left > 1 or some else "goes"
            who = f"{left} worker{'s' if left > 1 else ''}{beside} {goes} on{f', {new} of them new,' if new else ''}"
            say(f"syncline: {who} (view {view.number}) at {where}\n")
        return int(steps)

    def _hand_out_again(self, view: View, samplers: Sequence[GlobalBatches | PoolBatches]) -> None:
        """Let pools of batches begin with what the weights do not contain."""
        session, before = process.session, self._trained
        for pool in samplers:
            if isinstance(pool, PoolBatches):
                pool.enter(session, log_of_pushes(session))  # and so all have logged their last pushes
                self._forget_held()  # all owners among them have their new parts: nobody goes back to older ones
                if session.rank == 0:
                    lost = sorted(before.numbers - before.servers - view.numbers)
                    log_lost_pushes(session, pool, lost, before.number)


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


def _terms_of(given: Sequence[Lasting]) -> dict[str, str]:
    """The terms that all processes must have in common, workers and servers."""
    model = "; ".join(one.described for one in given)
    return {"version": __version__, "strategy": process.strategy, "elastic": str(process.range), "model": model}


def _stay(session: Session) -> None:
    """Let this process live on if a peer fails while the script is busy outside Syncline."""
    if session.process.watcher is not None:
        session.process.watcher.insists = False
