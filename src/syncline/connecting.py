"""Making sessions: between the processes of a run, and between threads of one process.

Between processes: roll call over the launcher's store, proved connections among all pairs, the transport that the
strategy asks for, and the watcher over the control connections. Between threads there is nothing to prove or to watch.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from . import registry
from .engine import LIMIT_S
from .errors import GroupError, RollCallError, UsageError
from .session import Session
from .strategy import Strategy
from .transports import Place, Transport
from .transports.inproc import Hub
from .types import Group
from .version import __version__
from .wire.handshake import run_id
from .wire.listener import Listener
from .wire.rollcall import call_roll, check_failed, connect, describe_self, leave, tell_failed
from .wire.store import Store
from .wire.watch import LIVENESS_S, Watcher


def in_process(strategy: str, workers: int) -> list[Session]:
    """Sessions of a whole group between the threads of this process: workers first, then servers. For tests."""
    chosen = Strategy.parse(strategy).resolve(Group(workers), one_host=True, inproc=True)
    group = Group(workers, chosen.servers)
    if group.processes == 1:
        return [Session(chosen, group, 0, None)]
    hub = Hub(group.processes)
    sessions = [Session(chosen, group, index, hub.transport(index)) for index in range(group.processes)]
    for session in sessions:
        session.neighbours = [other for other in sessions if other is not session]
    return sessions


def connect_session(
    strategy: Strategy,
    index: int,
    processes: int,
    store: Store,
    *,
    run: str,
    secret: bytes,
    address: str,
    local_rank: int = 0,
    timeout: float = 120.0,
    liveness_s: float = LIVENESS_S,
    limit_s: float = LIMIT_S,
    hint: Callable[[int], str] = lambda _: "",
) -> Session:
    """Join the processes of a run: roll call, connections, watcher, engine.

    ``index`` counts workers first, then the strategy's servers; ``address`` is the one to listen on.
    """
    workers = processes - strategy.servers
    if workers < 1:
        raise UsageError(
            f"{strategy} needs {strategy.servers} server processes and at least one worker, there are {processes}"
            " processes: start more (syncline run -n WORKERS --servers SERVERS)"
        )
    listener = Listener(address, run_id(run), secret, index)
    control: dict[int, socket.socket] = {}
    transport: Transport | None = None
    try:
        me = describe_self(index, processes, listener, {"strategy": str(strategy), "version": __version__})
        roll = call_roll(store, run, secret, me, timeout, hint)
        group = Group(workers, strategy.servers, roll.nodes[:workers])
        chosen = strategy.resolve(group, one_host=roll.one_host)
        entry = registry.get("transports", chosen.transport.name)
        connection = entry.capabilities.get("connection")
        if connection is None:
            raise UsageError(f"transport={chosen.transport.name} does not reach other processes: use shm, tcp or auto")
        use_unix = connection == "unix"
        if use_unix and not roll.one_host:
            hosts = ", ".join(sorted({member.host for member in roll.members}))
            raise UsageError(f"transport={chosen.transport.name} works inside one host, this run has {hosts}: use tcp")
        control = connect(store, roll, listener, "control", False, timeout)
        arguments = chosen.transport.arguments
        if connection == "own":
            place = Place(
                index,
                processes,
                store,
                f"{run}/{chosen.transport.name}",
                address,
                timeout,
                partial(check_failed, store, run),
            )
            transport = _own_connections(entry, run, place, arguments)
        else:
            transport = entry.target(index, connect(store, roll, listener, "data", use_unix, timeout), **arguments)
        leave(store, run, index, complete=True)
    except BaseException as error:
        for sock in control.values():
            sock.close()
        if transport is not None:
            transport.close()
        if isinstance(error, Exception):
            with contextlib.suppress(GroupError):  # the store may be what is gone
                leave(store, run, index, complete=False)
        raise
    finally:
        listener.close()
    session = Session(chosen, group, index, transport, roll=roll, local_rank=local_rank, limit_s=limit_s)
    session.watcher = Watcher(roll, control, session.on_peer_failure, session.left, liveness_s)
    session.watcher.start()
    return session


def _own_connections(entry: registry.Entry, run: str, place: Place, arguments: Mapping[str, Any]) -> Transport:
    """A transport whose library connects the ranks itself; a fault of one rank ends the wait of the others."""
    try:
        transport: Transport = entry.target(place, **arguments)
    except Exception as error:
        if not isinstance(error, RollCallError):  # which others have told
            tell_failed(place.store, run, f"rank {place.rank}: {error}")
        raise
    return transport
