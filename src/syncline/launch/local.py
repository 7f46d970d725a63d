"""Starts all processes of a run on this machine and ends them together.

After a failure the other processes get a grace period to print their own errors, then SIGTERM, then SIGKILL. The exit
status is that of the first process that failed. An interrupt is passed on, and SIGKILL follows soon. One loop in the
caller's thread serves the descriptors of processes, outputs and signals.

Rank 0 inherits the listening socket of the rendezvous, so no other process can take the port. A second port
(MASTER_PORT) is kept free for a store that the command opens itself, as torch.distributed does. A server gets a
sentence in its place, because a process group of torch would wait for it forever.

A ``Placement`` can start a process elsewhere, for example by a command that enters another network namespace. Ranks
report failures through ``wire.reports``.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

from ..errors import UsageError
from ..wire import reports
from ..wire.listener import bind_here
from ..wire.reports import Reports
from .child import Child
from .environment import NO_GROUP, REPEATS, worker_places
from .relay import Lines

GRACE_S = 10.0
"""From the first failure to SIGTERM. The other processes print their errors meanwhile."""

TERM_S = 5.0
"""From SIGTERM to SIGKILL after a failure."""

STOP_S = 2.0
"""From an interrupt, which all processes get, to SIGKILL. Scripts may save their state meanwhile."""

LEFT_S = 1.0
"""The same for processes without state to save."""

TIMED_OUT = 124
"""The exit status of a run that exceeded its time limit, as with timeout(1)."""

_REASON_CHARS = 400
_ENDINGS = 8
"""Of so many ended replacements the endings are kept."""
_READ_BYTES = 1 << 16
_STALE = (
    *("TORCHELASTIC_", "SYNCLINE_MEETING_", "SYNCLINE_PROCESS", "SYNCLINE_RUN_ID", "SYNCLINE_TRACE_PARTS"),
    *("SYNCLINE_FLIGHT_MEMORY", "SYNCLINE_SAMPLES", REPEATS, "SYNCLINE_ELASTIC", reports.VARIABLE),
    *("GROUP_RANK", "ROLE_"),
)
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SYNCLINE_LAUNCHER", "SYNCLINE_SERVERS", *_STALE)

Output = Callable[[int, str], None]
"""Called with a rank and a line of its output, without the line's end."""


@dataclass(frozen=True)
class Placement:
    """Where a process is started, by default on this machine without changes.

    Processes of one ``host`` are local to each other. ``prefix`` stands before the command and must become it (exec),
    so that signals arrive. ``env`` is added to the environment. ``bind`` makes a socket like ``bind_here`` on that
    host, at an address that the other ranks reach; only rank 0's is called.
    """

    host: str = ""
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    bind: Callable[[int], socket.socket] = lambda port: bind_here(port=port)


def here(rank: int) -> Placement:  # noqa: ARG001 - the signature of every function that places ranks
    """Every rank on this machine without changes."""
    return Placement()


Placing = Callable[[int], Placement]
"""Returns where a rank is started."""


@dataclass(frozen=True)
class Ending:
    """The end of one process: its ``status`` as in shells, and whether the launcher had ``told`` it to end.

    ``vanished``: it ended with status 0 in the middle of a run, which counts as 1.
    """

    rank: int
    name: str
    status: int
    told: bool
    vanished: bool = False

    @property
    def text(self) -> str:
        """The process and how it ended, for messages."""
        return f"{self.name} {self.how}"

    @property
    def how(self) -> str:
        """The clause without its subject."""
        if self.told and self.status:
            return "was ended by the launcher"
        if self.vanished:
            return "ended with status 0 in the middle of the run, without syncline.shutdown() (os._exit?)"
        number = self.status - 128
        if 0 < number < signal.NSIG:
            known = {item.value: item.name for item in signal.Signals}
            return f"was killed by {known.get(number, f'signal {number}')}"
        return f"ended with status {self.status}"


@dataclass(frozen=True)
class Outcome:
    """The end of a run: exit status, endings in order, and the rank that failed first with its reason, if known.

    ``endings`` has those of the last replacements only; ``before`` is the number of the others.
    """

    status: int
    endings: tuple[Ending, ...]
    culprit: tuple[int, str] | None = None
    before: int = 0

    @property
    def text(self) -> str:
        """One line about the failed processes. The first culprit comes first, with its own error if known."""
        failed = [ending for ending in self.endings if ending.status]
        # Processes that ended by themselves tell more than those that the launcher ended.
        failed.sort(key=lambda ending: ending.told)
        told = [ending.text for ending in failed]
        if failed and self.culprit is not None:
            rank, reason = self.culprit
            first = next(ending for ending in self.endings if ending.rank == rank)
            rest = [ending.text for ending in failed if ending is not first]
            # The way a process ended says more than other ranks' reports, but less than its own error.
            known = first.status and not first.told and not reason.startswith(reports.FAILED)
            told = [first.text if known else f"{first.name} {_first_line(reason)}", *rest]
        if self.before:
            told.append(f"{self.before} earlier replacement{'s' * (self.before > 1)} ended too")
        return "; ".join(told) or "all processes ended with status 0"


class LocalRun:
    """The processes of one run, as a context: they start on entry, and all have ended on exit.

    ``command`` runs ``processes`` times; the last ``servers`` are servers. ``env`` is added to the environment. All
    processes inherit ``pass_fds``. ``poll`` and ``wait`` pass output to ``on_output`` line by line; without it, output
    is not captured. ``place`` returns where each rank starts. A command that starts ranks itself, such as mpirun, runs
    with ``processes=1, ranked=False`` and gets no rank, world size or store. After an interrupt processes have
    ``stop_s`` seconds, ranks at most ``LEFT_S`` if the context is left first.

    With a ``relay`` the run is elastic: the end of a process ends no other one, until all members that are left have
    ended, or too few are left to go on. It also decides when a replacement is started for a lost process. An
    ended process holds nothing in the launcher. The processes may also join the run of another
    launcher, or those of other launchers this run.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        servers: int = 0,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        on_output: Output | None = None,
        grace_s: float = GRACE_S,
        stop_s: float = STOP_S,
        place: Placing = here,
        ranked: bool = True,
        relay: Lines | None = None,
    ) -> None:
        if not command:
            raise UsageError("there is no command to start")
        if not 0 <= servers < processes:
            raise UsageError(f"{servers} servers among {processes} processes leave no worker")
        self._command = tuple(command)
        self._processes, self._servers = processes, servers
        self._env, self._pass_fds = dict(env or {}), tuple(pass_fds)
        self._on_output, self._grace_s, self._stop_s = on_output, grace_s, stop_s
        self._ranked, self._relay = ranked, relay
        self._numbers = range(processes) if relay is None else relay.numbers
        self._place, self._placements = place, {rank: place(rank) for rank in self._numbers}
        self._shared: dict[str, str] = {}  # the environment of all processes
        self._children: list[Child] = []
        self._running = 0
        self._endings: list[Ending] = []
        self._before = 0  # ended replacements whose endings are not kept
        self._partial: dict[int, bytes] = {}
        self._due: deque[tuple[float, int]] = deque()  # future signals: time, number
        self._reserved: list[socket.socket] = []  # reserve the ports during the run
        self._failed: int | None = None
        self._stopped: int | None = None
        self._told = False
        self._requests: deque[tuple[int, int]] = deque()  # from signal handlers: signal, exit status

    def __enter__(self) -> LocalRun:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._reports = Reports(self._processes)
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._goes_on:
                if self._ranked:  # another launcher needs the time to end its own ranks
                    self._stop_s = min(self._stop_s, LEFT_S)
                self.stop(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)
                self.wait()
        finally:
            self._close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The process numbers in rank order; in an elastic run, of those that have not ended."""
        return tuple(child.pid for child in self._children)

    def poll(self, timeout_s: float = 0.0) -> Outcome | None:
        """The outcome once all processes have ended. Waits for events for at most ``timeout_s``."""
        if self._goes_on:
            self._turn(timeout_s)
        if self._goes_on:
            return None
        for child in self._children:
            self._drain(child)
        return self._outcome()

    @property
    def _goes_on(self) -> bool:
        return self._running > 0 or (self._relay is not None and self._relay.away > 0)

    def _outcome(self) -> Outcome:
        endings = tuple(self._endings)
        if self._stopped is not None:
            return Outcome(self._stopped, endings)
        if self._relay is not None:
            status = 0 if self._relay.succeeded else self._failed or self._relay.failed
            return Outcome(status, endings, before=self._before)
        culprit = self._reports.culprit()
        first = next((ending for ending in endings if culprit is not None and ending.rank == culprit[0]), None)
        if first is None:
            return Outcome(self._failed or 0, endings)
        own = 0 if first.told else first.status
        return Outcome(own or self._failed or 0, endings, culprit)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until all processes have ended. After ``timeout_s`` they are told to end, with status 124."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while (outcome := self.poll(60.0 if limit is None else max(0.0, limit - time.monotonic()))) is None:
            if limit is not None and time.monotonic() >= limit:
                self.stop(signal.SIGTERM, TIMED_OUT)
                limit = None
        return outcome

    def stop(self, number: int, status: int | None = None) -> None:
        """Pass a signal on, then SIGKILL; a second call kills at once. Does not wait. Callable from signal handlers.

        ``status`` is the run's exit status, 128 + signal by default.
        """
        self._requests.append((number, 128 + number if status is None else status))
        os.eventfd_write(self._bell, 1)

    def _start(self) -> None:
        if not self._ranked:
            for rank in range(self._processes):
                self._start_one(rank, _inherited(_RANKS) | self._env, self._pass_fds)
            return
        bind = self._placements[self._numbers[0]].bind
        self._reserved += [bind(0), bind(0)]
        address, port = self._reserved[0].getsockname()[:2]
        with bind(port) as door:
            door.listen(2 * self._processes + 128)
            self._shared = {
                **_inherited(),
                "MASTER_ADDR": address,
                "SYNCLINE_MEETING_PORT": str(port),
                "SYNCLINE_PROCESSES": str(self._processes),
                "SYNCLINE_LAUNCHER": str(os.getpid()),
                "SYNCLINE_RUN_ID": secrets.token_hex(8),
                "SYNCLINE_SECRET": secrets.token_hex(32),
                "SYNCLINE_SERVERS": str(self._servers),
                **({} if self._relay is None else self._relay.shared),
            }
            if self._relay is not None:
                self._relay.attach(self._selector, {**self._shared, **self._env}, self._stop_too)
            if self._relay is not None and self._relay.joins:
                for number in self._numbers:
                    self._start_alone(number)
                return
            seats = worker_places([placement.host for placement in self._placements.values()], self._servers)
            for rank, seat in enumerate(seats):
                own = {"SYNCLINE_PROCESS": str(rank), **seat}
                fds: tuple[int, ...] = ()
                if rank == 0 and self._processes > 1:  # a single process would keep it, and its children inherit it
                    own["SYNCLINE_MEETING_FD"] = str(door.fileno())
                    fds = (door.fileno(),)
                if rank >= self._processes - self._servers:
                    own["MASTER_PORT"] = NO_GROUP
                self._start_ranked(rank, own, fds)

    def _start_ranked(self, rank: int, own: Mapping[str, str], fds: tuple[int, ...] = ()) -> None:
        """Start a process with variables of its own and further descriptors."""
        environ = {**self._shared, **self._env, "MASTER_PORT": str(self._reserved[1].getsockname()[1]), **own}
        environ |= self._reports.environ(rank)
        fds = (*self._pass_fds, self._reports.fd, *fds)
        if self._relay is not None:
            read = partial(self._relay.read, rank)
            self._selector.register(self._relay.sockets()[rank], selectors.EVENT_READ, lambda _: read())
            environ |= self._relay.environ(rank)
            fds = (*fds, self._relay.inherited(rank))
        self._start_one(rank, environ, fds)

    def _replace_lost(self) -> None:
        """Start a replacement for a lost process, if one is due. It is alone until it joins."""
        if self._relay is None or self._stopped is not None or self._due or self._relay.due(time.monotonic()) != 0:
            return
        try:
            rank = self._relay.replace(time.monotonic())
        except OSError as error:
            reports.say(f"syncline: {self._relay.note_no_start(time.monotonic(), error)}\n")
            return
        self._placements[rank] = self._place(rank)
        try:
            self._start_alone(rank)
        except OSError as error:  # the others must not end for it
            self._selector.unregister(self._relay.sockets()[rank])
            del self._placements[rank]
            reports.say(f"syncline: {self._relay.note_no_start(time.monotonic(), error, rank)}\n")

    def _start_alone(self, rank: int) -> None:
        """Start a process that joins a run: a worker or server without others until then."""
        assert self._relay is not None
        (seat,) = worker_places([""], 0)
        own = {"SYNCLINE_PROCESS": "0", "SYNCLINE_PROCESSES": "1", "SYNCLINE_SERVERS": "0", **seat}
        self._start_ranked(rank, own | ({"MASTER_PORT": NO_GROUP} if self._relay.serves(rank) else {}))

    def _start_one(self, rank: int, environ: Mapping[str, str], fds: Sequence[int]) -> None:
        placement = self._placements[rank]
        command = (*placement.prefix, *self._command)
        child = Child(rank, command, {**environ, **placement.env}, fds, self._on_output is not None)
        self._children.append(child)
        self._running += 1
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        if child.output is not None:
            os.set_blocking(child.output.fileno(), False)
            self._selector.register(child.output, selectors.EVENT_READ, child)

    def _turn(self, timeout_s: float) -> None:
        """Wait for events once and handle them, and send due signals."""
        if self._due:
            timeout_s = min(timeout_s, max(0.0, self._due[0][0] - time.monotonic()))
        elif self._relay is not None and (wait_s := self._relay.due(time.monotonic())) is not None:
            timeout_s = min(timeout_s, wait_s)
        ended: list[Child] = []
        for key, events in self._selector.select(timeout_s):
            if key.fileobj == self._bell:
                os.eventfd_read(self._bell)
            elif callable(key.data):
                key.data(events)
            elif key.fileobj is key.data.output:
                self._read(key.data)
            else:
                ended.append(key.data)
        self._take_requests()
        # If several processes ended at the same moment, a killed one is the likelier cause.
        for child in sorted(ended, key=lambda child: ((child.look() or 0) <= 128, child.rank)):
            self._note(child)
        if self._relay is not None and self._stopped is None and not self._told:
            self._end_if_over(self._relay)
        self._replace_lost()
        while self._due and self._due[0][0] <= time.monotonic():
            self._tell(self._due.popleft()[1])

    def _note(self, child: Child) -> None:
        """Record the end of a process."""
        self._selector.unregister(child.pidfd)
        status = child.look() or 0
        vanished = not status and self._reports.present(child.rank)
        status = 1 if vanished else status
        self._endings.append(Ending(child.rank, self._name(child.rank), status, self._told, vanished))
        self._running -= 1
        first = status and self._failed is None
        if first:
            self._failed = status
        if self._relay is not None:
            if told := self._relay.note_end(child.rank, status, time.monotonic()):
                reports.say(f"syncline: {told}\n")
            self._selector.unregister(self._relay.sockets()[child.rank])
            self._relay.drop(child.rank)
            self._free(child)
        elif first and self._stopped is None:
            self._end_after(self._grace_s)

    def _end_if_over(self, relay: Lines) -> None:
        """Let all processes end if an elastic run cannot go on, unless members of a view that is now known do."""
        if not relay.is_over:
            self._due.clear()
        elif not self._due:
            self._end_after(self._grace_s if relay.trains else min(LEFT_S, self._grace_s))

    def _end_after(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._due = deque([(at, signal.SIGTERM), (at + TERM_S, signal.SIGKILL)])

    def _free(self, child: Child) -> None:
        """Free what an ended process of an elastic run has held, and end the processes that it has started."""
        self._drain(child)
        if child.output is not None and not child.output.closed:
            self._selector.unregister(child.output)
        if child.look():
            child.signal(signal.SIGKILL)
        child.close()
        self._children.remove(child)
        replaced = [ending for ending in self._endings if ending.rank not in self._numbers]
        if child.rank not in self._numbers:
            del self._placements[child.rank]
        for ending in replaced[:-_ENDINGS]:
            self._endings.remove(ending)
            self._before += 1

    def _stop_too(self, number: int, status: int) -> None:
        """Stop because another launcher does. A second request would kill, so none follows one of this launcher."""
        if number == signal.SIGKILL or (self._stopped is None and not self._requests):
            self.stop(number, status)

    def _take_requests(self) -> None:
        while self._requests:
            number, status = self._requests.popleft()
            now = time.monotonic()
            if self._stopped is None:
                self._stopped = status
                self._due = deque([(now, number), (now + self._stop_s, signal.SIGKILL)])
            else:
                self._due = deque([(now, signal.SIGKILL)])

    def _tell(self, number: int) -> None:
        self._told = True
        if self._relay is not None:
            self._relay.stop(number)
        for child in self._children:
            if child.look() is None:
                child.signal(number)

    def _name(self, rank: int) -> str:
        if not self._ranked:
            return Path(self._command[0]).name
        notes = [self._placements[rank].host]
        if self._relay is not None and self._relay.joins:
            return f"worker {rank}"
        if rank not in self._numbers:
            role = "server" if self._relay is not None and self._relay.serves(rank) else "worker"
            return f"{role} {rank} ({', '.join(filter(None, ['a replacement', *notes]))})"
        workers = self._processes - self._servers
        if rank >= workers:
            notes.append(f"server {rank - workers}")
        text = ", ".join(filter(None, notes))
        return f"rank {rank} ({text})" if text else f"rank {rank}"

    def _read(self, child: Child) -> bool:
        """Pass complete lines on. False if nothing was read."""
        if child.output is None or self._on_output is None:
            return False
        data = child.output.read(_READ_BYTES)  # None if nothing is available, empty at the end
        if data == b"":
            self._selector.unregister(child.output)
            child.output.close()
        if not data:
            return False
        *lines, rest = (self._partial.get(child.rank, b"") + data).split(b"\n")
        self._partial[child.rank] = rest
        for line in lines:
            self._on_output(child.rank, line.decode(errors="replace").removesuffix("\r"))
        return True

    def _drain(self, child: Child) -> None:
        """Pass on the rest in an ended process's pipe. Processes that it has started may still hold it open."""
        if self._on_output is None:
            return
        while child.output is not None and not child.output.closed and self._read(child):
            pass
        rest = self._partial.pop(child.rank, b"")
        if rest:
            self._on_output(child.rank, rest.decode(errors="replace"))

    def _close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        for child in self._children:
            if self._failed is not None or self._stopped is not None:
                child.signal(signal.SIGKILL)  # for the processes that it has started
        for child in self._children:
            child.close()
        for sock in self._reserved:
            sock.close()
        self._selector.close()
        self._reports.close()
        os.close(self._bell)


def launch(
    command: Sequence[str],
    processes: int,
    *,
    servers: int = 0,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    on_output: Output | None = None,
    stop_s: float = STOP_S,
    place: Placing = here,
    ranked: bool = True,
    relay: Lines | None = None,
    timeout_s: float | None = None,
) -> Outcome:
    """Run a command as a group of processes to its end. Arguments are those of LocalRun.

    In the main thread SIGINT, SIGTERM and SIGHUP end the run instead of the caller.
    """
    started = LocalRun(
        command,
        processes,
        servers=servers,
        env=env,
        pass_fds=pass_fds,
        on_output=on_output,
        stop_s=stop_s,
        place=place,
        ranked=ranked,
        relay=relay,
    )
    with started as run, _forwarding(run):
        return run.wait(timeout_s)


@contextmanager
def _forwarding(run: LocalRun) -> Iterator[None]:
    """Let signals to this process end the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        run.stop(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(reason: str) -> str:
    """The first line of an error, truncated."""
    line = next(iter(reason.splitlines()), "")
    return line if len(line) <= _REASON_CHARS else f"{line[:_REASON_CHARS]} ..."


def _inherited(stale: tuple[str, ...] = _STALE) -> dict[str, str]:
    """The environment of this process without the variables of an outer run, which begin with ``stale``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(stale)}
    # N processes with a thread per core each would fight for the cores.
    inherited.setdefault("OMP_NUM_THREADS", "1")
    return inherited
