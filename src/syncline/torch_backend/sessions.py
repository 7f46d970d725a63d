"""The sessions under this process's groups: which groups have a session of their own, and how sessions end.

The default group is a run of its own, whose processes meet through the store that torch provides. A group of some of
its ranks is a communicator of that run, with the same connections and its own keys. A group is a run by itself if the
default group has another backend or if it asks for another strategy.

Scripts need not destroy their groups: a process says goodbye however Python lets it end, and after an exception it
reports that.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import SynclineError, UsageError
from ..launch.child import end_with_launcher
from ..launch.connecting import alone, connect_session
from ..launch.environment import of_store, recognise
from ..launch.rendezvous import Rendezvous
from ..session.checks import asked_for
from ..session.communicator import Communicator
from ..session.printing import end_failed, watch_exceptions
from ..session.session import Session
from ..strategy.strategy import Strategy
from ..strategy.words import NONE
from ..timeline.flight_memory import FlightPlace
from .group import SynclineGroup

if TYPE_CHECKING:
    from ..metrics import Metrics

_live: list[Session] = []
_watching = False
_metrics: tuple[Session, Metrics] | None = None


def create(options: Any, strategy: Any = None) -> SynclineGroup:
    """Called by torch for a new group. ``options`` has its place; the script's ``pg_options`` are a strategy."""
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(
            f"the options of a group of the backend syncline are a strategy, such as pg_options='ring transport=tcp',"
            f" not {type(strategy).__name__}"
        )
    us, shut = _communicator_for(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        list(options.global_ranks_in_group),
        strategy,
    )
    return SynclineGroup(options.store, us, options.timeout, shut)


def _communicator_for(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: Sequence[int], strategy: str | None
) -> tuple[Communicator, Callable[[], None]]:
    """The communicator of a new group, and its end. ``ranks`` are in the default group; empty for itself."""
    limit_s = timeout.total_seconds()
    if ranks and strategy is None and dist.is_initialized():
        default = dist.distributed_c10d._get_default_group()
        if isinstance(default, SynclineGroup):
            if size == 1 and default.us.member.alone:
                return default.us, lambda: None
            return default.us.found(ranks, name, limit_s), lambda: None
    session = _begin(store, rank, size, limit_s, name, chosen(strategy))
    return session, lambda: _end(session)


def _begin(store: Any, rank: int, size: int, limit_s: float, name: str, strategy: Strategy) -> Session:
    """A session of processes that meet through ``store``."""
    _watch_the_end()
    if size == 1:
        session = alone(strategy)
    else:
        point = Rendezvous(of_store(store, rank, size, name))
        flight = FlightPlace(rank, f"torch-{len(_live)}")
        try:
            session = connect_session(
                strategy,
                point,
                f"torch/{name}",
                interface=os.environ.get("SYNCLINE_INTERFACE"),
                timeout=limit_s,
                limit_s=limit_s,
                flight=flight,
            )
        except BaseException:
            flight.remove()
            raise
        finally:
            point.close()
    _live.append(session)
    _serve(session)
    return session


def _serve(session: Session) -> None:
    """Serve the metrics of the first session, if they are asked for."""
    global _metrics
    if _metrics is None and os.environ.get("SYNCLINE_METRICS"):
        from ..metrics import serving_of

        serving = serving_of(os.environ)
        try:
            _metrics = None if serving is None else (session, serving.begin(session))
        except SynclineError as error:
            _live.remove(session)
            session.fail(error)
            session.shutdown()
            raise


def chosen(text: str | None) -> Strategy:
    """The strategy of a group, by default SYNCLINE_STRATEGY. UsageError for one that process groups cannot run."""
    found = Strategy.parse(text if text is not None else os.environ.get("SYNCLINE_STRATEGY", ""))
    remedy = "give the process group another strategy (SYNCLINE_STRATEGY or pg_options), or use syncline.prepare()"
    if found.servers or found.server_holds_weights:
        raise UsageError(f"{found}: torch's process groups have no parameter servers; {remedy}")
    if found.sync.name != "bsp":
        raise UsageError(f"{found}: the collectives of a process group are synchronous; {remedy}")
    if found.budget_s:
        raise UsageError(f"{found}: a process group has no schedule, so it cannot try schedules; {remedy}")
    if checks := asked_for().asked:
        raise UsageError(
            f"{checks}: a process group does not know the steps of a model; leave SYNCLINE_CHECK_REPLICAS and"
            " SYNCLINE_CHECK_FINITE out, or use syncline.prepare()"
        )
    if found.codec != NONE:
        codec = replace(Strategy.parse(""), codec=found.codec)
        raise UsageError(
            f"{found}: a process group may sum other values than gradients, so it compresses nothing; give the codec"
            " to DistributedDataParallel's hook:"
            f" ddp.register_comm_hook(syncline.hook_state({str(codec)!r}), syncline.comm_hook)"
        )
    return found


def _end(session: Session) -> None:
    """End a session. Raises a failure of the run that no call has raised yet."""
    global _metrics
    if session in _live:
        _live.remove(session)
        if _metrics is not None and _metrics[0] is session:
            _metrics[1].close()
            _metrics = None
        failure = session.shutdown()
        if failure is not None:
            raise failure


def _end_all() -> None:
    """End all sessions at exit. A failed run changes the exit status, because nothing can be raised any more."""
    while _live:
        try:
            _end(_live[-1])
        except SynclineError as error:
            end_failed(error)


def _watch_the_end() -> None:
    global _watching
    if _watching:
        return
    _watching = True
    watch_exceptions(lambda: _live[0] if _live else None)
    with contextlib.suppress(UsageError):  # of variables that the group does not need
        end_with_launcher(recognise())
    atexit.register(_end_all)
    # Children of multiprocessing, and of torch.multiprocessing.spawn, do not run the functions of atexit.
    multiprocessing.util.Finalize(None, _end_all, exitpriority=100)
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Forget the sessions in a forked child (a data loader's worker): the connections belong to the parent."""
    for session in _live:
        session.process.forget_in_child()
    _live.clear()
    if _metrics is not None:
        _metrics[1].forget()
