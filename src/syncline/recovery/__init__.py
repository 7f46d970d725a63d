"""Lets a run go on when a worker is lost, or joins: ``run`` calls a training function again, with the present workers.

    def train():
        while sampler.epoch < 10:
            for x, y in DataLoader(data, batch_sampler=sampler):
                ...
                optimizer.step()
                sampler.commit()

    syncline.elastic(train)

A lost worker breaks the step under way on all others: their calls of Syncline raise. Each survivor then ends its
session and agrees with the others on the members that are left (``agreement``), over lines to the launcher
(``launch.relay``). They form a new session with new connections, plans and layouts. The worker that has made the most
updates gives its weights, optimizer state and positions to the others, whose values may be one step older. Then
``train`` is called again: its samplers begin at the step that broke. Workers that train alone between exchanges of
weights agree on the number of exchanges instead of steps, and go back to the last one (``Mark``).

A worker that joins runs the script alone up to ``run``, and asks there. Rank 0 looks for such requests, and announces
the end of the session in its ticket of a step. All end it before the next step, agree on a view with the new worker,
and go on as after a loss. Workers at their own pace end it wherever they are, as at a loss. If a view with a new worker
does not begin, the others go on without that worker.

Server processes are members too (``served``). They serve in ``syncline.prepare()``, which begins again in each session,
and where a new server joins. The launcher tells them when the workers are in ``run``.

Agreement needs the training threads of all survivors. A worker that is busy outside Syncline is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import PeerLost, SynclineError, ViewEnds
from ..global_batches import RepeatedBatches
from ..launch.relay import RelayLine
from ..process import process
from ..session.session import Session
from ..wire.reports import say
from .agreement import AllDone
from .lasting import Lasting, Stateful
from .members import Members

__all__ = ["Lasting", "Stateful", "run", "served"]

T = TypeVar("T")

_TOLD_S = 10.0
"""The time in which the launcher tells a server that the workers are in a call, or ends it."""


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
        if members.agreement.joins:
            _join(members)
        while True:
            try:
                members.meet()
                result = train()
                _meet(process.session)
                members.agreement.tell_done()
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
            except AllDone:
                return result
    finally:
        for end_count in counters:
            end_count()
        members.end_call()


def _meet(session: Session) -> None:
    """Wait until all workers have finished. Where each goes at its own pace, all then have the same weights."""
    if not session.strategy.sync_mode().merges:
        for consolidate in session.consolidates.values():  # nobody waits for the steps of a worker that is there
            consolidate()
    if not session.alone:
        session.barrier()


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
            if members.agreement.joins:
                members.state_of_server(session)
                _join(members)
                continue
            if not members.agreement.in_call:
                return found
            ended: PeerLost | ViewEnds = PeerLost("all workers have left in the middle of their training", rank=-1)
        except SynclineError as error:
            lost, members = (None, None) if session.is_worker else (_ended(error), _members())
            if lost is None or members is None or not members.agreement.is_in_call(_TOLD_S):
                raise
            ended = lost
            ended.__traceback__ = ended.__context__ = ended.__cause__ = None  # they keep the memory of the session
        try:
            members.go_on(ended)
        except AllDone:
            return None


def _join(members: Members) -> None:
    """Join the run, or end this process if all have finished."""
    try:
        members.join()
    except AllDone:
        say(f"syncline: {members.agreement.me} ends: all others had finished before it could join\n")
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
    if isinstance(fault, PeerLost | ViewEnds):
        return fault
    return None if session is None else session.ended
