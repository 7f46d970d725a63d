"""Makes the session of a process: rendezvous, connections, transport, watcher, engine.

The processes meet, connect all pairs, authenticate, and begin to watch the control connections. The strategy names the
transport. A world of one worker needs none of this.
"""

from __future__ import annotations

import importlib
import logging
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from .. import registry
from ..engine.driver import LIMIT_S
from ..engine.trace import Observer
from ..errors import UsageError
from ..nouns import Group
from ..session.member import Membership, Process
from ..session.session import Session
from ..strategy.strategy import Strategy, check_asked
from ..strategy.words import AUTO, NONE
from ..timeline import folder
from ..timeline.recording import SessionSpans
from ..transports import Place, Transport
from ..transports._auto import Auto
from ..transports.inproc import Hub
from ..tuning import algorithm_choice, codec_choice, schedule_choice
from ..version import __version__
from ..wire import listener, meeting_sockets, watch
from ..wire.handshake import run_id
from ..wire.listener import Listener, connect
from ..wire.meeting import Roll
from ..wire.reports import absolve
from ..wire.watch import LIVENESS_S, Watcher
from .address import listen_address
from .rendezvous import CONNECT_S, Joined, Rendezvous

log = logging.getLogger("syncline")

_EACH = 2
"""The connections to every other process: control, and data."""
_MEETING = 3
"""Further connections per process in rank 0 while the group forms: the meeting, and handshakes."""
_BESIDE = 256
"""The descriptors that the script, its framework and the start itself may use."""


def in_process(
    strategy: str, workers: int, observers: Sequence[Observer | None] = (), nodes: tuple[int, ...] = ()
) -> list[Session]:
    """The sessions of a group between threads of this process: workers, then servers. For tests and examples.

    ``observers`` are those of the first processes, ``nodes`` the workers' hosts. There is no watcher.
    """
    asked = Strategy.parse(strategy)
    check_asked(asked)
    chosen = asked.resolve(Group(workers, nodes=nodes), inproc=True)
    group = Group(workers, chosen.servers, nodes)
    told = [*observers, *[None] * group.processes][: group.processes]
    hub = Hub(group.processes)
    ends = [None] if group.processes == 1 else map(hub.transport, range(group.processes))
    sessions = [
        Session(
            chosen, Membership(Process(group, index, end, observer=told[index])), left_open=asked.architecture == AUTO
        )
        for index, end in enumerate(ends)
    ]
    for session in sessions:
        session.chooses_schedule = workers > 1 and schedule_choice.is_wanted(asked, workers)
        session.process.neighbours = [other.process for other in sessions if other is not session]
    return sessions


def alone(strategy: Strategy, recording: SessionSpans | None = None) -> Session:
    """The session of a single worker, which exchanges nothing."""
    group = Group(1)
    observer = None if recording is None else recording.file
    member = Membership(Process(group, 0, None, observer=observer))
    session = Session(strategy.resolve(group), member, left_open=strategy.architecture == AUTO)
    if recording is not None:
        recording.attach(session)
    return session


def connect_session(
    strategy: Strategy,
    point: Rendezvous,
    run: str,
    *,
    secret: str | bytes | None = None,
    interface: str | None = None,
    timeout: float = 120.0,
    liveness_s: float = LIVENESS_S,
    limit_s: float = LIMIT_S,
    recording: SessionSpans | None = None,
) -> Session:
    """Join the processes that meet at ``point`` under the name ``run``: workers, then the strategy's servers.

    ``secret``, ``interface`` and ``timeout`` are those of ``syncline.init``. If the strategy leaves the architecture
    open, the workers measure the best algorithm for each size (``tuning``). A ``recording`` goes on until the session
    ends.
    """
    check_asked(strategy)
    if point.asked.world == 1:
        _count_workers(strategy, 1)  # raises for a strategy with servers, before a search for the rendezvous
    with point.join(run, secret, interface, timeout) as joined:
        environment = joined.environment
        make_room(environment.world)
        traced = {folder.VARIABLE: "off" if recording is None else "on"}
        formed = _form(strategy, joined, run, listen_address(environment, interface), timeout, liveness_s, traced)
    observer = None if recording is None else recording.file
    session = _begin(strategy, formed, environment.local_rank, liveness_s, limit_s, observer)
    with _ending(session):
        _tune(session, strategy)
        if recording is not None:
            recording.attach(session)
    return session


def _count_workers(strategy: Strategy, processes: int) -> int:
    """The number of workers among the processes. Raises UsageError if there is none."""
    workers = processes - strategy.servers
    if workers < 1:
        raise UsageError(
            f"{strategy} needs {strategy.servers} server processes and at least one worker, there"
            f" {'are' if processes > 1 else 'is'} {processes} process{'es' * (processes > 1)}: start more (syncline run"
            " -n WORKERS --servers SERVERS)"
        )
    return workers


@dataclass(frozen=True)
class _Formed:
    """A group that has formed, as one of its processes sees it."""

    roll: Roll
    group: Group
    strategy: Strategy
    control: dict[int, socket.socket]
    transport: Transport


def _form(
    strategy: Strategy,
    joined: Joined,
    run: str,
    address: str,
    timeout: float,
    liveness_s: float,
    agreed: Mapping[str, str],
) -> _Formed:
    """Roll call and connections; a failure closes them all. All processes must have the same values of ``agreed``."""
    client, index, processes = joined.client, joined.environment.rank, joined.environment.world
    workers = _count_workers(strategy, processes)
    if strategy.transport == AUTO or strategy.transport.name == "tcp":
        # Compiled now if necessary, before others wait for this process.
        importlib.import_module("syncline.kernels.streams")
    doors = Listener(address, run_id(run), joined.secret, index, processes)
    with closing(doors), ExitStack() as undo:
        measured = {algorithm_choice.VARIABLE: algorithm_choice.mode()}
        terms = {"strategy": str(strategy), "version": __version__, **measured, **agreed}
        roll = client.call_roll(doors.describe(terms), run, joined.secret)
        # All processes are present now: connecting gets its full time, however late the last one came.
        deadline = max(client.deadline, time.monotonic() + CONNECT_S)
        client.limit(deadline, max(timeout, CONNECT_S))
        client.look_after(watch.Stops(roll, liveness_s).check)
        group = Group(workers, strategy.servers, roll.nodes[:workers])
        chosen = strategy.resolve(group, hosts=roll.hosts)
        carried = _carried(chosen, roll)
        watch.prepare(roll)
        control = connect(roll, doors, "control", (), deadline, client.check)
        for sock in control.values():
            undo.callback(sock.close)
        if [_connection(name) for name in carried] == ["own"]:
            left = max(0.0, deadline - time.monotonic())
            name, check = chosen.transport.name, client.check
            place = Place(index, processes, client, name, address, left, check, joined.secret, roll.near)
            transport: Transport = registry.get("transports", name).target(place, **chosen.transport.arguments)
        else:
            unix = {peer for name, peers in carried.items() if _connection(name) == "unix" for peer in peers}
            data = connect(roll, doors, "data", unix, deadline, client.check)
            transport = _transport(chosen, index, carried, data)
        undo.callback(transport.close)
        if index == 0:
            absolve()
        client.through()
        undo.pop_all()
    return _Formed(roll, group, chosen, control, transport)


def _begin(
    asked: Strategy,
    formed: _Formed,
    local_rank: int,
    liveness_s: float,
    limit_s: float,
    observer: Observer | None,
) -> Session:
    """The session of a formed group, with its watcher. A failure closes all connections."""
    roll, transport = formed.roll, formed.transport
    with ExitStack() as undo:
        for sock in formed.control.values():
            undo.callback(sock.close)
        undo.callback(transport.close)
        process = Process(
            formed.group, roll.index, transport, roll=roll, local_rank=local_rank, limit_s=limit_s, observer=observer
        )
        session = Session(formed.strategy, Membership(process), left_open=asked.architecture == AUTO)
        with _ending(session):
            process.watcher = Watcher(
                roll, formed.control, process.on_peer_failure, process.left, liveness_s, process.answer
            )
            process.watcher.start()
        undo.pop_all()
    return session


def _tune(session: Session, asked: Strategy) -> None:
    """Make the choices that the strategy leaves open, by measuring."""
    workers = session.group.workers
    if asked.codec not in (NONE, AUTO) and session.strategy.codec == NONE:
        session.reason = f"codec={asked.codec.name} compresses between hosts only, and all ranks are on one"
        if session.index == 0:
            log.warning("%s: %s", session.name(0), session.reason)
    session.chooses_schedule = schedule_choice.is_wanted(asked, workers)
    if workers == 1:
        return
    if session.is_worker:
        session.compare_plans()
    if algorithm_choice.mode() == "off":
        return
    if algorithm_choice.is_wanted(asked, session.strategy, workers):
        algorithm_choice.tune(session)
    if codec_choice.is_wanted(asked, workers):
        codec_choice.choose_codec(session, asked)


@contextmanager
def _ending(session: Session) -> Iterator[None]:
    """Let an error inside the block end the session for all processes."""
    try:
        yield
    except BaseException as error:
        session.fail(error if isinstance(error, Exception) else RuntimeError(type(error).__name__))
        session.shutdown()
        raise


def _carried(strategy: Strategy, roll: Roll) -> dict[str, frozenset[int]]:
    """The transports that carry this process's messages, by name, with the peers that they reach."""
    others = frozenset(range(len(roll.members))) - {roll.index}
    if strategy.transport != AUTO:
        return {strategy.transport.name: others}
    carried = {"shm": roll.near, "tcp": others - roll.near}
    return {name: peers for name, peers in carried.items() if peers}


def _connection(name: str) -> str:
    """The kind of connection that a transport needs. Raises UsageError for a transport within one process."""
    connection: str | None = registry.get("transports", name).capabilities.get("connection")
    if connection is None:
        raise UsageError(f"transport={name} does not reach other processes: use shm, tcp or auto")
    return connection


def _transport(
    strategy: Strategy, index: int, carried: Mapping[str, frozenset[int]], socks: Mapping[int, socket.socket]
) -> Transport:
    """The transport over authenticated connections, combined if ``carried`` names several."""
    made = {
        registry.get("transports", name).target(
            index, {peer: socks[peer] for peer in peers}, **strategy.transport.arguments
        ): peers
        for name, peers in carried.items()
    }
    return Auto(index, made) if len(made) > 1 else next(iter(made))


def make_room(world: int) -> None:
    """Raise the limit of open descriptors for a group of ``world``. UsageError if the system refuses.

    The usual limit is 1024, for select(2). It is raised further if possible, to the number that rank 0 has open while
    strangers use up their share at its two pairs of doors and in the meeting.
    """
    needed = (_EACH + _MEETING) * world + _BESIDE
    doors, meeting = listener.CALLERS + 2 * world, meeting_sockets.MORE + 2 * world
    most = _EACH * world + 2 * doors + meeting + _BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{world} processes need {needed} descriptors in each of them, the system allows {hard}: raise the limit"
            " (ulimit -Hn, LimitNOFILE= of systemd, nofile in limits.conf) where the processes are started"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
