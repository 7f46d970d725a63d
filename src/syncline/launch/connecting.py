"""Makes the session of a process: rendezvous, connections, transport, watcher, engine.

The processes meet, connect all pairs, authenticate, and begin to watch the control connections. The strategy names the
transport. A world of one worker needs none of this.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

from .. import registry
from ..engine.driver import LIMIT_S
from ..engine.flight import Flight
from ..engine.trace import Observer
from ..errors import UsageError
from ..nouns import Group
from ..session.checks import Checks
from ..session.member import Membership, Process
from ..session.session import Session
from ..strategy.strategy import Strategy, check_asked
from ..strategy.words import AUTO, BSP, NONE
from ..sync import backup_of
from ..timeline import folder
from ..timeline.flight_memory import FlightPlace
from ..timeline.recording import SessionSpans
from ..transports import Carrier, Place, Transport
from ..transports._auto import Auto, AutoWithLibrary
from ..transports.inproc import Hub
from ..tuning import algorithm_choice, codec_choice, schedule_choice
from ..version import __version__
from ..wire import listener, meeting_sockets, watch
from ..wire.handshake import run_id
from ..wire.listener import Listener, connect
from ..wire.meeting import Roll
from ..wire.meeting_sockets import MeetingClient
from ..wire.reports import absolve
from ..wire.tls import OFF
from ..wire.watch import LIVENESS_S, Watcher
from . import relay
from .address import listen_address
from .rendezvous import CONNECT_S, Rendezvous

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

    ``observers`` belong to the first processes, in order; ``nodes`` has the workers' host numbers. There is no watcher.
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
        session.leave_out(asked)
        session.chooses_schedule = workers > 1 and schedule_choice.is_wanted(asked, workers)
        session.process.neighbours = [other.process for other in sessions if other is not session]
    return sessions


def alone(
    strategy: Strategy, recording: SessionSpans | None = None, *, joins: bool = False, serves: bool = False
) -> Session:
    """The session of a single process, which exchanges nothing: of a worker, or of one before it ``joins`` others.

    ``serves``: it joins them as a server.
    """
    group = Group(1, strategy.servers)
    observer = None if recording is None else recording.file
    member = Membership(Process(group, int(serves), None, observer=observer))
    chosen = strategy
    if joins and backup_of(strategy.sync_mode()):  # which are among the others: one process has none
        chosen = replace(strategy, sync=BSP)
    chosen = replace(chosen.resolve(group), sync=strategy.sync)
    session = Session(chosen, member, left_open=strategy.architecture == AUTO)
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
    tls: str | None = None,
    recording: SessionSpans | None = None,
    flight: FlightPlace | None = None,
    checks: Checks = Checks(),  # noqa: B008 - a frozen value
    elastic: str = "",
) -> Session:
    """Join the processes that meet at ``point`` under the name ``run``: workers, then the strategy's servers.

    ``secret``, ``interface``, ``timeout`` and ``tls`` are as in ``syncline.init``. If the strategy leaves the
    architecture open, the workers measure the best algorithm for each size (``tuning``). A ``recording`` goes on until
    the session ends. ``flight`` is the memory for this process's flight record. All processes must ask for the same
    ``checks``, and for the same numbers of workers of an ``elastic`` run.
    """
    check_asked(strategy)
    tls = tls or os.environ.get("SYNCLINE_TLS")  # here, so that it holds for every session, whoever begins it
    if tls not in (None, "", OFF) and _sums(strategy):
        name = strategy.transport.name
        raise UsageError(f"tls={tls} with {name}(checksum=on): TLS finds altered bytes already, leave out checksum=on")
    if point.asked.world == 1:
        _count_workers(strategy, 1)  # raises for a strategy with servers, before a search for the rendezvous
    observer, traced = (None, "off") if recording is None else (recording.file, "on")
    with ExitStack() as undo:
        with point.join(run, secret, interface, timeout, tls) as joined:
            environment, client = joined.environment, joined.client
            workers = _count_workers(strategy, environment.world)
            make_room(environment.world)
            if strategy.native_inside or strategy.transport == AUTO or strategy.transport.name == "tcp":
                # Compiled now if necessary, before others wait for this process.
                importlib.import_module("syncline.kernels.streams")
            if _sums(strategy):
                importlib.import_module("syncline.kernels.checksums")
            address = listen_address(environment, interface)
            terms = {"strategy": str(strategy), "version": __version__, folder.VARIABLE: traced}
            terms[algorithm_choice.VARIABLE] = algorithm_choice.mode()
            terms |= {"checks": checks.asked, "elastic": elastic}
            doors = Listener(address, run_id(run), joined.secret, environment.rank, environment.world, tls=joined.tls)
            with closing(doors):
                roll = client.call_roll(doors.describe(terms), run, joined.secret)
                # All processes are present now: connecting gets its full time, however late the last one came.
                deadline = max(client.deadline, time.monotonic() + CONNECT_S)
                client.limit(deadline, max(timeout, CONNECT_S))
                client.look_after(watch.Stops(roll, liveness_s).check)
                group = Group(workers, strategy.servers, roll.nodes[:workers])
                chosen = strategy.resolve(group, hosts=roll.hosts)
                watch.prepare(roll)
                control = connect(roll, doors, "control", (), deadline, client.check)
                for sock in control.values():
                    undo.callback(sock.close)
                transport = _transport(chosen, roll, doors, client, address, deadline)
                undo.callback(transport.close)
                if roll.index == 0:
                    absolve()
                client.through()
        process = Process(
            group,
            roll.index,
            transport,
            roll=roll,
            local_rank=environment.local_rank,
            limit_s=limit_s,
            observer=observer,
            flight=None if flight is None else _begun(flight, roll, workers),
        )
        session = Session(chosen, Membership(process), left_open=strategy.architecture == AUTO)
        session.checks = checks
        with _ending(session):
            process.watcher = Watcher(roll, control, process.on_peer_failure, process.left, liveness_s, process.answer)
            process.watcher.start()
        undo.pop_all()
    with _ending(session):
        _tune(session, strategy)
        if recording is not None:
            recording.attach(session)
    return session


def _sums(strategy: Strategy) -> bool:
    """Whether the strategy's transport is asked for checksums of its frames."""
    if strategy.transport == AUTO:
        return False
    option = registry.get("transports", strategy.transport.name).capabilities.get("sums", "")
    return strategy.transport.arguments.get(option) == "on"


def _begun(place: FlightPlace, roll: Roll, workers: int) -> Flight | None:
    """Begin the flight record of this process. The process numbers of all tell this run from others."""
    everyone = repr([roll.name(index) for index in range(len(roll.members))])
    run = hashlib.sha256(everyone.encode(errors="backslashreplace")).hexdigest()[:16]
    name = f"{'server ' * (roll.index >= workers)}{roll.name(roll.index)}"
    return place.begin(roll.index, name=name, processes=len(roll.members), workers=workers, run=run)


def _count_workers(strategy: Strategy, processes: int) -> int:
    """The number of workers among the processes. Raises UsageError if there is none."""
    workers = processes - strategy.servers
    if workers < 1:
        raise UsageError(
            f"{strategy} needs {strategy.servers} server processes and at least one worker, but there"
            f" {'are' if processes > 1 else 'is'} {processes} process{'es' * (processes > 1)}: start more (syncline run"
            " -n WORKERS --servers SERVERS)"
        )
    return workers


def _tune(session: Session, asked: Strategy) -> None:
    """Make the choices that the strategy leaves open, by measuring."""
    workers = session.group.workers
    session.leave_out(asked)
    if session.left_out != NONE and session.index == 0:
        log.warning("%s: %s", session.name(0), session.reason)
    session.chooses_schedule = schedule_choice.is_wanted(asked, workers)
    if session.chooses_schedule and relay.VARIABLE in os.environ:
        session.chooses_schedule = False
        session.reason = "schedule=auto stays at fixed: the steps of an elastic run must end in their iteration"
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


def _transport(
    strategy: Strategy, roll: Roll, doors: Listener, client: MeetingClient, address: str, deadline: float
) -> Transport:
    """The strategy's transport, over connections of its own or over authenticated ones.

    ``auto`` may combine two, and carries the messages of a library that only sums inside hosts.
    """
    others = frozenset(range(len(roll.members))) - {roll.index}
    asked, arguments = strategy.transport.name, strategy.transport.arguments
    sums_inside = strategy.native_inside and registry.get("transports", asked).capabilities.get("inside") == "auto"
    carried = {asked: others}
    if strategy.transport == AUTO or sums_inside:
        near = {"shm": roll.near, "tcp": others - roll.near}
        carried = {name: peers for name, peers in near.items() if peers}
    parts = {name: registry.get("transports", name) for name in [*carried, *[asked] * sums_inside]}
    kinds = {name: part.capabilities.get("connection") for name, part in parts.items()}

    def own(carrier: Carrier | None = None) -> Any:
        left = max(0.0, deadline - time.monotonic())
        world, check = len(roll.members), client.check
        together = tuple(sorted(roll.near | {roll.index})) if strategy.native_inside else ()
        place = Place(roll.index, world, client, asked, address, left, check, roll.secret, roll.near, together, carrier)
        return parts[asked].target(place, **arguments)

    for name, kind in kinds.items():
        if kind is None:
            raise UsageError(f"transport={name} does not reach other processes: use shm, tcp or auto")
        encrypted = arguments.get(parts[name].capabilities.get("encrypts", "")) == "on"
        if kind == "own" and doors.tls is not None and not encrypted:
            raise UsageError(
                f"tls= is set, but transport={name} makes connections of its own and does not encrypt"
                " them: use tcp, shm, auto or zmq(curve=on)"
            )
    if kinds.get(asked) == "own" and not sums_inside:
        made: Transport = own()
        return made
    unix = {peer for name, peers in carried.items() if kinds[name] == "unix" for peer in peers}
    socks = connect(roll, doors, "data", unix, deadline, client.check)
    given = {} if sums_inside else arguments  # which are then the library's
    members = {
        parts[name].target(roll.index, {peer: socks[peer] for peer in peers}, **given): peers
        for name, peers in carried.items()
    }
    if sums_inside and roll.near:
        return AutoWithLibrary(roll.index, members, own(next(iter(members))))
    return Auto(roll.index, members) if len(members) > 1 else next(iter(members))


def descriptors(world: int) -> int:
    """The number of descriptors that each process of a group of ``world`` needs."""
    return (_EACH + _MEETING) * world + _BESIDE


def make_room(world: int) -> None:
    """Raise the limit of open descriptors for a group of ``world``. UsageError if the system refuses.

    The usual limit is 1024, for select(2). If possible it is raised further, to rank 0's maximum: strangers may then
    use up their share at its two pairs of doors and in the meeting.
    """
    needed = descriptors(world)
    doors, meeting = listener.CALLERS + 2 * world, meeting_sockets.MORE + 2 * world
    most = _EACH * world + 2 * doors + meeting + _BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{world} processes need {needed} descriptors in each of them, but the system allows {hard}: raise the"
            " limit"
            " (ulimit -Hn, LimitNOFILE= of systemd, nofile in limits.conf) where the processes are started"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
