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

from . import registry, tuning
from .engine import LIMIT_S
from .errors import GroupError, RollCallError, UsageError
from .session import Session
from .strategy import AUTO, Strategy
from .transports import Place, Transport
from .transports.auto import Auto
from .transports.inproc import Hub
from .tuning import codec_choice
from .types import Group
from .version import __version__
from .wire.handshake import run_id
from .wire.listener import Listener
from .wire.rollcall import Roll, call_roll, check_failed, connect, describe_self, leave, tell_failed
from .wire.store import Store
from .wire.watch import LIVENESS_S, Watcher


def in_process(strategy: str, workers: int) -> list[Session]:
    """Sessions of a whole group between the threads of this process: workers first, then servers. For tests."""
    chosen = Strategy.parse(strategy).resolve(Group(workers), inproc=True)
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

    ``index`` counts workers first, then the strategy's servers; ``address`` is the one to listen on. Where the
    strategy leaves the architecture open, the workers measure what to run at which size (``tuning``).
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
        terms = {"strategy": str(strategy), "version": __version__, tuning.VARIABLE: tuning.mode()}
        me = describe_self(index, processes, listener, terms)
        roll = call_roll(store, run, secret, me, timeout, hint)
        group = Group(workers, strategy.servers, roll.nodes[:workers])
        chosen = strategy.resolve(group, hosts=roll.hosts)
        carried = _carried(chosen, roll)
        control = connect(store, roll, listener, "control", (), timeout)
        if [_connection(name) for name in carried] == ["own"]:
            name, arguments = chosen.transport.name, chosen.transport.arguments
            failed = partial(check_failed, store, run)
            place = Place(index, processes, store, f"{run}/{name}", address, timeout, failed)
            transport = _own_connections(registry.get("transports", name), run, place, arguments)
        else:
            unix = {peer for name, peers in carried.items() if _connection(name) == "unix" for peer in peers}
            transport = _transport(chosen, index, carried, connect(store, roll, listener, "data", unix, timeout))
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
    if workers > 1 and tuning.mode() != "off":
        try:
            if tuning.is_wanted(strategy, chosen, workers):
                tuning.tune(session)
            if codec_choice.is_wanted(strategy, workers):
                codec_choice.choose_codec(session, strategy)
        except BaseException as error:
            session.fail(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
            session.shutdown()
            raise
    return session


def _carried(strategy: Strategy, roll: Roll) -> dict[str, frozenset[int]]:
    """The transports that carry this process's messages, by name, and to which peers."""
    others = frozenset(range(len(roll.members))) - {roll.index}
    if strategy.transport != AUTO:
        return {strategy.transport.name: others}
    carried = {"shm": roll.near, "tcp": others - roll.near}
    return {name: peers for name, peers in carried.items() if peers}


def _connection(name: str) -> str:
    """The kind of connection that a transport needs; raises UsageError for one that needs none."""
    connection: str | None = registry.get("transports", name).capabilities.get("connection")
    if connection is None:
        raise UsageError(f"transport={name} does not reach other processes: use shm, tcp or auto")
    return connection


def _transport(
    strategy: Strategy, index: int, carried: Mapping[str, frozenset[int]], socks: Mapping[int, socket.socket]
) -> Transport:
    """The transport over proved connections; several as one where ``carried`` names several."""
    made = {
        registry.get("transports", name).target(
            index, {peer: socks[peer] for peer in peers}, **strategy.transport.arguments
        ): peers
        for name, peers in carried.items()
    }
    return Auto(index, made) if len(made) > 1 else next(iter(made))


def _own_connections(entry: registry.Entry, run: str, place: Place, arguments: Mapping[str, Any]) -> Transport:
    """A transport whose library connects the ranks itself; a fault of one rank ends the wait of the others."""
    try:
        transport: Transport = entry.target(place, **arguments)
    except Exception as error:
        if not isinstance(error, RollCallError):  # which others have told
            tell_failed(place.store, run, f"rank {place.rank}: {error}")
        raise
    return transport
