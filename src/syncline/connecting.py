"""Making sessions: between the processes of a run, and between threads of one process.

Between processes: roll call over the launcher's store, proved connections among all pairs, the transport that the
strategy asks for, and the watcher over the control connections. Between threads there is nothing to prove or to watch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from . import registry, tuning
from .engine import LIMIT_S
from .errors import UsageError
from .launch.environment import Environment
from .launch.store import failing_together, find_secret, listen_address
from .session import Session
from .strategy import Strategy
from .transports import Place, Transport
from .transports.auto import Auto
from .transports.inproc import Hub
from .tuning import codec_choice
from .types import Group
from .version import __version__
from .wire import watch
from .wire.handshake import run_id
from .wire.listener import Listener
from .wire.rollcall import Roll, call_roll, check_failed, connect, describe_self, leave
from .wire.store import Store
from .wire.watch import LIVENESS_S, Watcher
from .words import AUTO


def in_process(strategy: str, workers: int) -> list[Session]:
    """Sessions of a whole group between the threads of this process: workers first, then servers. For tests."""
    chosen = Strategy.parse(strategy).resolve(Group(workers), inproc=True)
    group = Group(workers, chosen.servers)
    if group.processes == 1:
        return [Session(chosen, group, 0, None)]
    hub = Hub(group.processes)
    sessions = [Session(chosen, group, index, hub.transport(index)) for index in range(group.processes)]
    for session in sessions:
        session.ending.neighbours = [other.ending for other in sessions if other is not session]
    return sessions


def connect_session(
    strategy: Strategy,
    environment: Environment,
    store: Store,
    run: str,
    *,
    secret: str | bytes | None = None,
    interface: str | None = None,
    timeout: float = 120.0,
    liveness_s: float = LIVENESS_S,
    limit_s: float = LIMIT_S,
) -> Session:
    """Join the processes of a run: roll call, connections, watcher, engine.

    The processes of ``environment`` are workers first, then the strategy's servers; they meet in ``store`` under the
    name ``run``. ``secret``, ``interface`` and ``timeout`` are those of ``syncline.init``. Where the strategy leaves
    the architecture open, the workers measure what to run at which size (``tuning``).
    """
    workers = environment.world - strategy.servers
    with failing_together(store, run, environment, timeout):
        if workers < 1:
            raise UsageError(
                f"{strategy} needs {strategy.servers} server processes and at least one worker, there are"
                f" {environment.world} processes: start more (syncline run -n WORKERS --servers SERVERS)"
            )
        key = find_secret(store, run, environment, secret, timeout)
        address = listen_address(environment, interface)
        formed = _form(strategy, environment, store, run, key, address, timeout)
    group = Group(workers, strategy.servers, formed.roll.nodes[:workers])
    session = Session(
        formed.strategy,
        group,
        environment.rank,
        formed.transport,
        roll=formed.roll,
        local_rank=environment.local_rank,
        limit_s=limit_s,
    )
    ending = session.ending
    ending.watcher = Watcher(formed.roll, formed.control, session.on_peer_failure, ending.left, liveness_s)
    ending.watcher.start()
    _tune(session, strategy)
    return session


@dataclass(frozen=True)
class _Formed:
    """What a group's start leaves behind in one process."""

    roll: Roll
    strategy: Strategy
    control: dict[int, socket.socket]
    transport: Transport


def _form(
    strategy: Strategy, environment: Environment, store: Store, run: str, key: bytes, address: str, timeout: float
) -> _Formed:
    """Roll call and connections; nothing stays open where they fail."""
    index, processes = environment.rank, environment.world
    listener = Listener(address, run_id(run), key, index)
    with closing(listener), ExitStack() as undo:
        terms = {"strategy": str(strategy), "version": __version__, tuning.VARIABLE: tuning.mode()}
        me = describe_self(index, processes, listener, terms)
        roll = call_roll(store, run, key, me, timeout, environment.where)
        workers = processes - strategy.servers
        chosen = strategy.resolve(Group(workers, strategy.servers, roll.nodes[:workers]), hosts=roll.hosts)
        carried = _carried(chosen, roll)
        watch.prepare(roll)
        control = connect(store, roll, listener, "control", (), timeout)
        for sock in control.values():
            undo.callback(sock.close)
        if [_connection(name) for name in carried] == ["own"]:
            failed = partial(check_failed, store, run)
            place = Place(index, processes, store, f"{run}/{chosen.transport.name}", address, timeout, failed)
            transport: Transport = registry.get("transports", chosen.transport.name).target(
                place, **chosen.transport.arguments
            )
        else:
            unix = {peer for name, peers in carried.items() if _connection(name) == "unix" for peer in peers}
            transport = _transport(chosen, index, carried, connect(store, roll, listener, "data", unix, timeout))
        undo.callback(transport.close)
        leave(store, run, index, processes)
        undo.pop_all()
    return _Formed(roll, chosen, control, transport)


def _tune(session: Session, asked: Strategy) -> None:
    """Measure what the strategy leaves open; a rank that fails in it ends the session for all."""
    workers = session.group.workers
    if workers == 1 or tuning.mode() == "off":
        return
    try:
        if tuning.is_wanted(asked, session.strategy, workers):
            tuning.tune(session)
        if codec_choice.is_wanted(asked, workers):
            codec_choice.choose_codec(session, asked)
    except BaseException as error:
        session.fail(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
        session.shutdown()
        raise


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
