"""What the process that starts a measured run and the processes that run it tell each other.

Owns the ``Job`` that goes down as an argument, and a line between the starter and each process, on which both send JSON
objects, one per line of text: reports come up, orders go down. Does not know what the objects mean. There is no pickle,
and a line that is not JSON is an error of the run, not of the reader.

On one machine a line is a pair of pipes, one pair per process, which keeps lines whole however long they are. A
launcher passes no descriptors on, so every process opens its pipes as files of the starter in /proc; no pipe has a name
in a folder that could be left behind. Between hosts a process calls the starter over TCP, and both prove that they hold
a secret made for the run, which travels in the environment (``RemoteMailbox``). That call also says where the processes
meet: a launcher decides where rank 0 runs, so rank 0 takes a port there and the starter tells it to all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from syncline.errors import GroupError, HandshakeError, SynclineError, UsageError
from syncline.launch.address import interface_address, own_address
from syncline.launch.environment import Environment, recognise
from syncline.wire.handshake import Hello, run_id
from syncline.wire.listener import Doors, bind_here, dial, open_door

from .report.result_file import finite

START_S = 120.0
"""Until all processes of another launcher have called: it may have to load what they run from a slow disk."""

_TOLD_S = START_S + 30.0
"""How long a process that has come waits for the others, which the starter ends before."""

LINE_BYTES = 1 << 26
"""The longest message: a result's curve of a million looks fits."""

_READ_BYTES = 1 << 16
_DIAL_S = 30.0
_COMING_S = 0.05
_RUN = "measured"
_PURPOSE = "report"
_INTERFACE = "SYNCLINE_INTERFACE"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process has to do. ``batch`` is the global batch, ``iterations`` the length of the whole run.

    ``reports`` says where every process finds its line, workers first. ``evaluate_every`` is how many steps lie between
    two looks at how accurate the model is, 0 for an epoch; ``target`` is the accuracy whose time is asked for;
    ``framework`` is what trains. Medians leave out ``warmup`` first iterations, by default a fifth, at most ten.
    Without ``scored`` no look is taken at how accurate the model is.
    """

    workload: str
    strategy: str
    batch: int
    iterations: int
    seed: int
    reports: tuple[str, ...]
    evaluate_every: int = 0
    target: float | None = None
    framework: str = "torch"
    warmup: int | None = None
    scored: bool = True

    def to_json(self) -> str:
        """The job as the argument of the script."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read the script's argument back."""
        data = json.loads(text)
        return cls(**{**data, "reports": tuple(data["reports"])})


class Connection:
    """A process's end of its line; writes block while the line is full.

    ``address`` is that of a ``Mailbox``. A process that calls over TCP learns where all meet, and finds it in
    MASTER_ADDR and MASTER_PORT from then on. Raises GroupError where the starter cannot be reached, UsageError where
    the launcher has not started as many processes as there are lines; the starter is told that too.
    """

    def __init__(self, address: str, place: Environment | None = None, processes: int = 1) -> None:
        self._kept: socket.socket | None = None
        self._watched = False
        if address.startswith("/"):
            up, down = address.split()
            self._up = os.open(up, os.O_WRONLY)
            self._orders = os.fdopen(os.open(down, os.O_RDONLY), "rb")
            self.send("here")
        else:
            assert place is not None
            sock = _call(address, place, processes)
            _keep_alive(sock)
            own = str(sock.getsockname()[0])
            self._up = sock.detach()
            self._orders = os.fdopen(os.dup(self._up), "rb")
            self._arrive(place, processes, own)

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; numbers that are not finite become null, since JSON has none."""
        line = json.dumps({"kind": kind, **finite(content)}, allow_nan=False).encode() + b"\n"
        view = memoryview(line)
        while view:
            view = view[os.write(self._up, view) :]

    def fail(self, error: Exception) -> None:
        """Tell the starter what ends this process."""
        self.send("error", at=time.time(), text=f"{type(error).__name__}: {error}")

    def hear(self) -> Any:
        """What the starter says next; None when it is gone, or has nothing more to say."""
        with suppress(OSError):
            line = self._orders.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def end_with_starter(self) -> None:
        """End this process when the starter is gone; nothing more can be heard then. Called once."""
        self._watched = True
        threading.Thread(target=self._wait_for_end, name="bench-starter", daemon=True).start()

    def close(self) -> None:
        """Close this end; a thread that waits for the starter does so until the process ends."""
        os.close(self._up)
        if not self._watched:
            self._orders.close()
        if self._kept is not None:
            self._kept.close()

    def _wait_for_end(self) -> None:
        while self.hear() is not None:
            pass
        os._exit(1)

    def _arrive(self, place: Environment, processes: int, own: str) -> None:
        """Say where this process is, and learn where all meet."""
        if place.world != processes:
            started = f"{place.launcher} has started {place.world}: leave their number to the row"
            if place.launcher == "none":
                started = "the launcher tells them no rank in OMPI_COMM_WORLD_RANK, PMI_RANK or SLURM_PROCID"
            error = UsageError(f"the row needs {processes} processes, and {started}")
            self.fail(error)
            raise error
        port = 0
        if place.rank == 0:
            self._kept = bind_here("::" if ":" in own else "0.0.0.0")
            port = self._kept.getsockname()[1]
        self.send("here", network=f"{_BOOT.read_text().strip()} {_NETWORK.readlink()}", address=own, port=port)
        came, _, _ = select.select([self._up], [], [], _TOLD_S)
        told = self.hear() if came else None
        if told is None:
            why = "is gone" if came else f"has not said within {_TOLD_S:.0f} s where rank 0 is"
            raise GroupError(f"rank {place.rank} of {processes}: the process that started this one {why}")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = told["address"], str(told["port"])


def connect(reports: Sequence[str]) -> Connection:
    """This process's line among those of all, by its rank; see ``Connection``."""
    place = recognise()
    found = Connection(reports[min(place.rank, len(reports) - 1)], place, len(reports))
    if place.launcher in ("mpirun", "srun"):  # whose processes may be on hosts where nobody else ends them
        found.end_with_starter()
    return found


def _call(address: str, place: Environment, processes: int) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        if place.secret is None:
            raise HandshakeError("SYNCLINE_SECRET is not in this process's environment: the launcher has to pass it on")
        return dial((host, int(port)), run_id(_RUN), place.secret, place.rank, processes, _PURPOSE, _DIAL_S)
    except (HandshakeError, OSError) as error:
        raise GroupError(
            f"rank {place.rank} of {place.world} ({place.launcher}) cannot reach the process that started it at"
            f" {address}: {error}; {_INTERFACE} there names the interface that all hosts reach"
        ) from error


class Mailbox:
    """The starter's ends of a run's lines on this machine, one per process.

    ``addresses`` are for the processes to open; ``ended`` lists those whose lines have closed, in that order. Used as a
    context manager, which closes everything. What was sent has come ``linger_s`` after the processes' end.
    """

    linger_s = 0.0

    def __init__(self, processes: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._rest: dict[int, bytes] = {}
        self._orders: dict[int, int] = {}
        self._writing: dict[int, int] = {}  # open here until the process has opened its own
        self._places: dict[int, Message] = {}  # what each process has said that is here
        self.ended: list[int] = []
        self.environ: dict[str, str] = {}
        """What the processes need in their environment."""
        for rank in range(processes):
            reading, self._writing[rank] = os.pipe()
            os.set_blocking(reading, False)
            self._add(rank, reading)
            other, self._orders[rank] = os.pipe()
            os.close(other)  # the process opens one of its own
        own = f"/proc/{os.getpid()}/fd"
        self.addresses = tuple(f"{own}/{self._writing[rank]} {own}/{self._orders[rank]}" for rank in range(processes))

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in tuple(self._writing):
            self._release(rank)
        for fd in list(self._rest):
            self._forget(fd)
        self.close_orders()
        self._selector.close()

    @property
    def open(self) -> bool:
        """True while a process may still send."""
        return bool(self._rest)

    def tell(self, what: Any) -> None:
        """Send something to all processes; the end of one is seen by other means."""
        line = json.dumps(what).encode() + b"\n"
        for fd in self._orders.values():
            with suppress(BrokenPipeError, ConnectionError):
                _write(fd, line)

    def close_orders(self) -> None:
        """Say nothing more: processes that listen hear the end."""
        while self._orders:
            os.close(self._orders.popitem()[1])

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """The messages that have come, as (process index, message); waits up to ``timeout`` seconds for the first.

        Raises SynclineError for a line that is not a JSON object with a kind, or that has more than ``LINE_BYTES``.
        """
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(timeout):
            data = b""
            with suppress(ConnectionError):
                data = os.read(key.fd, _READ_BYTES)
            if not data:
                self.ended.append(key.data)
                self._forget(key.fd)
                continue
            *lines, rest = (self._rest[key.fd] + data).split(b"\n")
            if any(len(line) > LINE_BYTES for line in (*lines, rest)):
                raise SynclineError(f"process {key.data} sent a report of more than {LINE_BYTES} bytes")
            self._rest[key.fd] = rest
            for line in lines:
                message = _parse(key.data, line)
                if message["kind"] == "here":
                    self._here(key.data, message)
                else:
                    found.append((key.data, message))
        return found

    def rest(self) -> Iterator[list[tuple[int, Message]]]:
        """What processes that have ended had sent before, as far as it comes."""
        until = time.monotonic() + self.linger_s
        while self.open and ((last := self.receive(self.linger_s / 10)) or time.monotonic() < until):
            yield last

    def _add(self, rank: int, reading: int) -> None:
        self._selector.register(reading, selectors.EVENT_READ, rank)
        self._rest[reading] = b""

    def _here(self, rank: int, message: Message) -> None:
        """A process has its end: without this one's copy of it, its end ends the line."""
        if rank in self._places:
            raise SynclineError(f"process {rank} has said twice that it is here")
        self._places[rank] = message
        self._release(rank)

    def _release(self, rank: int) -> None:
        if rank in self._writing:  # only a line on this machine has a copy here
            os.close(self._writing.pop(rank))

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._rest[fd]
        os.close(fd)


class RemoteMailbox(Mailbox):
    """The same for processes on whatever hosts a launcher starts them, which call over TCP and prove themselves.

    Listens until all have come, at SYNCLINE_INTERFACE or the address of this machine that others reach, else on the
    loopback. ``receive`` raises SynclineError where some have not come within ``limit_s``.
    """

    linger_s = 1.0

    def __init__(self, processes: int, limit_s: float = START_S) -> None:
        super().__init__(0)
        self._processes, self._deadline, self._limit_s = processes, time.monotonic() + limit_s, limit_s
        self._callers: deque[tuple[int, socket.socket]] = deque()  # let in by the doors' thread
        self._known: set[int] = set()
        secret = secrets.token_hex(32)
        self.environ = {"SYNCLINE_SECRET": secret}
        address = _reached_at()
        try:
            door = open_door(address, world=processes)
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror}; set {_INTERFACE}") from error
        self.addresses = (f"{address}:{door.getsockname()[1]}",) * processes
        self._doors = Doors(
            (door,), run_id(_RUN), secret.encode(), processes, self._admit, check=self._check, world=processes
        )

    def __enter__(self) -> RemoteMailbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._doors.close()
        self._let_in()
        super().__exit__(kind, error, trace)

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """See ``Mailbox``."""
        if len(self._places) == self._processes:
            return super().receive(timeout)
        self._let_in()
        found = super().receive(min(timeout, _COMING_S))
        if len(self._places) < self._processes and time.monotonic() > self._deadline:
            missing = ", ".join(str(rank) for rank in range(self._processes) if rank not in self._places)
            raise SynclineError(
                f"rank {missing} of {self._processes} did not call {self.addresses[0]} within {self._limit_s:.0f} s:"
                " the launcher has not started it, or it cannot reach this address"
            )
        return found

    def _check(self, said: Hello) -> None:
        if said.purpose != _PURPOSE or said.source >= self._processes:
            raise HandshakeError(f"rank {said.source} of {self._processes} has nothing to report here")
        if said.source in self._known:
            raise HandshakeError(f"rank {said.source} is connected already")

    def _admit(self, said: Hello, sock: socket.socket, whence: str) -> None:  # noqa: ARG002
        self._known.add(said.source)
        self._callers.append((said.source, sock))

    def _let_in(self) -> None:
        while self._callers:
            rank, sock = self._callers.popleft()
            _keep_alive(sock)
            reading = sock.detach()
            self._orders[rank] = os.dup(reading)
            self._add(rank, reading)

    def _here(self, rank: int, message: Message) -> None:
        if not message.keys() >= {"network", "address", "port"}:
            raise SynclineError(f"process {rank} does not say where it is: another version of Syncline runs there")
        super()._here(rank, message)
        if len(self._places) == self._processes:
            self._doors.close()
            first = self._places[0]
            near = {place["network"] for place in self._places.values()} == {first["network"]}
            self.tell({"address": "127.0.0.1" if near else first["address"], "port": first["port"]})


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone, or cannot be reached any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _reached_at() -> str:
    """The address of this machine at which others call it."""
    asked = os.environ.get(_INTERFACE)
    if asked:
        return interface_address(asked)
    try:
        return own_address()
    except GroupError:
        return "127.0.0.1"


def _write(fd: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(fd, view) :]


def _parse(rank: int, line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict) or "kind" not in message:
        raise SynclineError(f"process {rank} sent a report that cannot be read: {line[:200]!r}")
    return message
