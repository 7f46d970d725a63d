"""This process's single session: how it begins and ends.

Only this module knows *the* session of a process. Modules below get a session as an argument; ``api`` has the functions
for scripts. A session ends automatically at exit. An exception that ends the script is told to the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .errors import ClosedError, PeerError, SynclineError, UsageError
from .launch.child import end_with_launcher
from .launch.connecting import alone, connect_session
from .launch.environment import REPEATS, Environment, Variables, worker_places
from .launch.relay import Range, allowed, joins, joins_to_serve, may_grow, range_asked
from .launch.rendezvous import Rendezvous, secret_bytes
from .session.checks import Finite, asked_for
from .session.groups import WorkerGroup, found_group
from .session.printing import end_failed, end_quickly, watch_exceptions
from .session.session import Session
from .strategy.strategy import Strategy, check_elastic
from .timeline.flight_memory import FlightPlace, forget_records
from .timeline.recording import SessionSpans, begin_recording
from .wire import reports
from .wire.watch import LIVENESS_S

if TYPE_CHECKING:
    from .frameworks.torch import Prepared
    from .metrics import Metrics, Serving

log = logging.getLogger("syncline")


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``syncline.init``, which documents them."""

    strategy: str | None = None
    rank: int | None = None
    world_size: int | None = None
    address: str | None = None
    interface: str | None = None
    secret: str | bytes | None = None
    timeout: float = 120.0
    liveness: float = LIVENESS_S
    progress: float = 30 * 60.0
    tls: str | None = None
    check_replicas: int | None = None
    check_finite: Finite | None = None
    elastic: int | tuple[int, int | None] | None = None


class Seat(NamedTuple):
    """A process's place in a later session of its run: where rank 0 serves the meeting, its number, and all hosts.

    The last ``servers`` of the processes, each with its name in ``hosts``, are servers.
    """

    host: str
    port: int
    rank: int
    hosts: tuple[str, ...]
    servers: int


class Process:
    """The state of a process in its run. ``process`` below is this process's instance."""

    def __init__(self) -> None:
        self.joined: Session | None = None
        self.prepared: list[Prepared] = []
        """The PyTorch models that are part of the run, with their optimizers."""
        self._of_torch: dict[tuple[int, ...], WorkerGroup] = {}  # by ranks
        self._founding = threading.Lock()  # held while a group is created: two threads may use one first
        self._rendezvous: Rendezvous | None = None
        self._variables = Variables()
        self._inits = 0
        self._check: Callable[[], None] | None = None  # called while others are waited for
        self._again = False  # whether the session follows one with other members
        self._recording: SessionSpans | None = None
        self._recordings = 0
        self._metrics: Metrics | None = None
        self._watching = False
        self._hooked = False
        self._failed = False
        self._asked = Arguments()  # those of the last ``begin``
        self.strategy = ""
        """The strategy that was asked for, as the processes of a run must agree on it."""
        self.range: Range | None = None
        """The numbers of workers of an elastic run that the script or the user asks for."""
        self.elastic: Any = None
        """The members of an elastic run, once the script has called ``syncline.elastic``."""

    @property
    def session(self) -> Session:
        """The session. Raises ClosedError if there is none."""
        if self.joined is None:
            raise ClosedError("call syncline.init() first")
        self.joined.check_usable()
        return self.joined

    def within(self, group: Any) -> Session:
        """The session of a Syncline group or of a torch group's ranks; for None, the session of all workers.

        Raises UsageError for other objects, and on a worker outside the group.
        """
        here = self.session
        if group is None:
            return here
        if isinstance(group, WorkerGroup):
            if not group.is_of(here):
                raise UsageError(
                    f"the {group!r} belongs to a run that has ended: create it again after syncline.init()"
                )
            return group.session
        if all(kind.__module__.partition(".")[0] != "torch" for kind in type(group).__mro__):
            raise UsageError(
                "group= takes the result of syncline.new_group(), one dimension of a DeviceMesh, or a ProcessGroup of"
                f" torch, not {type(group).__name__}; torch returns a different object on ranks outside a group"
            )
        from .frameworks.torch.options import ranks_of

        ranks = ranks_of(here, group)
        with self._founding:
            if ranks not in self._of_torch:
                self._of_torch[ranks] = found_group(here, ranks)
            return self._of_torch[ranks].session

    def begin(self, asked: Arguments) -> None:
        """Join the run's processes, as ``syncline.init`` documents."""
        if self.joined is not None:
            raise UsageError("syncline.init() was called already: call syncline.shutdown() first")
        self._asked = asked
        self._watch_exceptions()
        secret_bytes(asked.secret)
        self.range = None if os.environ.get(REPEATS) else range_asked(asked.elastic)
        environment = self._variables.recognise(rank=asked.rank, world_size=asked.world_size, address=asked.address)
        chosen = _choose(asked.strategy, environment, again=self._again)
        checks = asked_for(asked.check_replicas, asked.check_finite)
        self.strategy = str(chosen)
        lone = joins() and not self._again  # it has no place in the run yet: another process has its numbers
        if self._again or lone:  # workers that owned weights may be lost
            chosen = chosen.with_owners_among(environment.world, chosen.servers)
        checks.check_fit(chosen)
        metrics = None if lone else _asked_metrics()
        with self._recorded(environment.rank, unless=lone) as recording, self._kept(environment) as flight:
            if lone or (environment.world == 1 and chosen.servers == 0):
                self.joined = alone(chosen, recording, joins=lone, serves=lone and joins_to_serve())
                self.joined.lone = [] if lone or may_grow() else None
                if checks.asked:
                    log.warning("%s is without effect: a run of one worker exchanges nothing", checks.asked)
            else:
                run = f"{environment.run_id}/{self._inits}"
                self._inits += 1  # even if this one fails, so that late processes do not join the next run
                self.joined = connect_session(
                    chosen,
                    self._rendezvous_at(environment),
                    run,
                    secret=asked.secret,
                    interface=asked.interface or os.environ.get("SYNCLINE_INTERFACE"),
                    timeout=asked.timeout,
                    liveness_s=asked.liveness,
                    limit_s=asked.progress,
                    tls=asked.tls,
                    recording=recording,
                    flight=flight,
                    checks=checks,
                    elastic="" if self.range is None else str(self.range),
                )
                self._variables.count_workers(environment, chosen.servers)
        self.joined.elastic = allowed() is not None
        if metrics is not None:
            self._serve(metrics)
        self._watch_the_end(environment)  # registered last, so that it runs first at exit

    def _serve(self, metrics: Serving) -> None:
        """Serve metrics until the session ends. If that fails, a run that begins ends; a later view goes on without."""
        assert self.joined is not None
        session = self.joined
        try:
            self._metrics = metrics.begin(session)
        except SynclineError as error:
            if self._again:  # a worker that was stopped may hold the port
                reports.say(f"syncline: no metrics from here on: {error}\n")
                return
            self.joined = None
            session.fail(error)
            session.shutdown()
            raise

    @contextlib.contextmanager
    def _recorded(self, number: int, unless: bool) -> Iterator[SessionSpans | None]:
        """Record the session that begins inside, if recording is on. A session that fails to begin leaves nothing."""
        recording = None if unless else begin_recording(number, self._recordings)
        try:
            yield recording
        except BaseException:
            if recording is not None:
                recording.remove()
            raise
        self._recording, self._recordings = recording, self._recordings + 1

    @property
    def sessions(self) -> int:
        """The number of sessions that this process has begun, including those before a run that it has joined."""
        return self._recordings

    @contextlib.contextmanager
    def _kept(self, environment: Environment) -> Iterator[FlightPlace | None]:
        """The memory for the flight record of the session that begins inside, which leaves nothing if it fails to."""
        place = FlightPlace(environment.rank, str(self._inits)) if environment.world > 1 else None
        try:
            yield place
        except BaseException:
            if place is not None:
                place.remove()
            raise

    def _rendezvous_at(self, environment: Environment) -> Rendezvous:
        """The rendezvous with the other processes. It is created once, because later sessions use the same one."""
        if self._rendezvous is not None and self._rendezvous.asked != environment:
            self._rendezvous.close()
            self._rendezvous = None
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(environment, self._check)
        return self._rendezvous

    def end(self, fetch: bool) -> None:
        """Leave the run, if there is one. With ``fetch`` owners return the optimizers' state.

        Raises a failure of the run that no call has raised yet, after closing everything.
        """
        if self.joined is None:
            return
        ending, passing = self.joined, sys.exc_info()[1]
        ending.process.begin_end()
        try:
            for made in self.prepared:
                made.release(fetch and passing is None, settle=passing is None)
        finally:
            self.prepared.clear()
            self._of_torch.clear()
            self.joined = None
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
            failure = _close(ending, sys.exc_info()[1])
            self._failed |= ending.process.failed
        if failure is not None and passing is None:
            raise failure

    def lose(self) -> None:
        """End a session that has lost a process, in a process that goes on in another session."""
        failed = self._failed
        with contextlib.suppress(SynclineError):
            self.end(fetch=False)
        self._failed = failed

    def begin_again(self, place: Seat, run: str, number: int, timeout: float, check: Callable[[], None]) -> None:
        """Begin another session, named ``run``, as ``syncline run`` would have started this process.

        ``number`` is that of the session, the same on all processes: no earlier one has it. ``check`` is called while
        this process waits for the others; it raises to end the wait.
        """
        self._check, world = check, len(place.hosts)
        texts = {"SYNCLINE_PROCESS": str(place.rank), "SYNCLINE_PROCESSES": str(world)}
        texts |= worker_places(place.hosts, place.servers)[place.rank]
        if place.servers:
            texts["SYNCLINE_SERVERS"] = str(place.servers)
        texts["SYNCLINE_MEETING_PORT"] = str(place.port)
        os.environ.update(texts, MASTER_ADDR=place.host, SYNCLINE_RUN_ID=run)
        os.environ.pop("SYNCLINE_MEETING_FD", None)  # it belongs to the first session
        self._inits, self._recordings, self._again = 0, number, True  # the others may have tried more often
        forget_records(world if world > 1 else 0)
        self.begin(replace(self._asked, timeout=min(timeout, self._asked.timeout)))

    def leave(self) -> NoReturn:
        """End a server whose workers have left, or a worker that comes too late, with status 0."""
        self.end(fetch=True)
        sys.exit(0)

    def _end_at_exit(self) -> None:
        """End the session at exit. An exception could only be printed there, so a failure sets the exit status."""
        try:
            self.end(fetch=False)
        except SynclineError as error:
            end_failed(error)
        if self._failed:
            end_quickly()

    def _watch_the_end(self, environment: Environment) -> None:
        """Register the ends: goodbye at exit, release in forked children, exit with the launcher."""
        reports.join()
        if self._watching:
            return
        self._watching = True
        end_with_launcher(environment)
        atexit.register(self._end_at_exit)
        os.register_at_fork(after_in_child=self._forget)

    def _watch_exceptions(self) -> None:
        """Print an exception that ends the script, unbroken by the output of other ranks, and send it to them."""
        if not self._hooked:
            self._hooked = True
            watch_exceptions(lambda: self.joined)

    def _forget(self) -> None:
        """Forget the session in a forked child (a data loader's worker): the connections belong to the parent."""
        if self.joined is not None:
            self.joined.process.forget_in_child()
        if self._recording is not None:
            self._recording.file.forget()
        if self._metrics is not None:
            self._metrics.forget()


def _asked_metrics() -> Serving | None:
    """The metrics to serve; None without SYNCLINE_METRICS. A run without them loads no server."""
    if not os.environ.get("SYNCLINE_METRICS"):
        return None
    from .metrics import serving_of

    return serving_of(os.environ)


def _choose(strategy: str | None, environment: Environment, again: bool) -> Strategy:
    """The strategy of the script or else of the launcher. It must have as many servers as were started.

    ``again``: servers may be lost.
    """
    text = strategy if strategy is not None else environment.strategy
    started = environment.servers
    if text is None:
        text = f"ps(servers={started})" if started else ""
    chosen = Strategy.parse(text)
    if (numbers := allowed()) is not None and not again:  # before any process waits for others
        check_elastic(chosen, numbers[0])
    if again and started:
        chosen = chosen.with_owners_among(environment.world, started)
    if started is not None and started != chosen.servers and environment.world > 1:
        raise UsageError(
            f"{str(chosen)!r} has {chosen.servers} server processes, but {started} were started: use syncline run"
            f" --servers {chosen.servers}"
        )
    return chosen


def _close(ending: Session, passing: BaseException | None) -> Exception | None:
    """End a session, possibly while an exception passes through. Returns the failure that no call has raised yet."""
    if isinstance(passing, Exception) and not isinstance(passing, PeerError):
        ending.fail(passing)  # the others should read the exception, not a goodbye
    failure = ending.shutdown()
    if not ending.forked:
        reports.leave()
    return failure


process = Process()
