"""The connections between the process that starts a measured run (the starter) and the processes of the run.

Owns the ``Task`` in a process's command line, such as the ``Job`` of one that trains, and one connection per process.
Both ends send JSON objects, one per line: reports to the starter, orders to the processes. Nothing is pickled, and the
meaning of the objects is left to the callers. A line that is not JSON fails the run with an error that names the
process.

On one machine a connection is a pair of pipes per process, so that long lines of different processes never mix. A
launcher passes no descriptors on, so a process opens its pipes as files of the starter in /proc, and no named pipe can
be left behind. Between hosts, each process connects to the starter over TCP, and both prove that they hold the run's
secret from the environment (``RemoteMailbox``). The launcher decides where rank 0 runs: rank 0 therefore binds a port
and reports it, and the starter sends the address to all processes as their meeting point.
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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from syncline.errors import GroupError, HandshakeError, SynclineError, UsageError
from syncline.launch.address import interface_address, own_address
from syncline.launch.environment import Environment
from syncline.wire.handshake import Hello, run_id
from syncline.wire.listener import Doors, bind_here, dial, open_door

from .report.files import finite, typed

START_S = 120.0
"""The time limit for all processes of a launcher to connect. A launcher may load programs from a slow disk."""

_TOLD_S = START_S + 30.0
"""How long a connected process waits for the meeting point. The starter gives up earlier and ends all processes."""

LINE_BYTES = 1 << 26
"""The longest message. A result whose curve has a million points fits."""

_READ_BYTES = 1 << 16
_DIAL_S = 30.0
_COMING_S = 0.05
_RUN = "measured"
_PURPOSE = "report"
_INTERFACE = "SYNCLINE_INTERFACE"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")

Message = Mapping[str, Any]


_T = TypeVar("_T", bound="Task")


@dataclass(frozen=True)
class Task:
    """The base of what a process is told to do, as JSON in its command line."""

    def to_json(self) -> str:
        """The task as an argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls: type[_T], text: str) -> _T:
        """The task from the process's argument."""
        found: _T = typed(cls, json.loads(text))
        return found


@dataclass(frozen=True)
class Job(Task):
    """The task of one process. ``batch`` is the global batch, ``iterations`` the length of the whole run.

    ``evaluate_every`` is the number of steps between two evaluations, 0 for one evaluation per epoch; without
    ``scored`` there are none. ``target`` is the accuracy whose training time is wanted. Medians exclude the first
    ``warmup`` iterations, by default a fifth, at most ten.
    """

    workload: str
    strategy: str
    batch: int
    iterations: int
    seed: int
    evaluate_every: int = 0
    target: float | None = None
    framework: str = "torch"
    warmup: int | None = None
    scored: bool = True


class Connection:
    """A process's end of its connection to the starter. A write blocks while the connection is full.

    ``address`` comes from a ``Mailbox``. A process that connects over TCP also receives the meeting point of the run
    and sets MASTER_ADDR and MASTER_PORT to it. Raises GroupError if the starter cannot be reached, and UsageError if
    the launcher started a number of processes other than ``processes``; the starter receives that error too.
    """

    def __init__(self, address: str, place: Environment | None = None, processes: int = 1) -> None:
        self._kept: socket.socket | None = None
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
        """Send one message. Infinities and NaN become null, because JSON lacks them."""
        _write(self._up, json.dumps({"kind": kind, **finite(content)}, allow_nan=False).encode() + b"\n")

    def fail(self, error: Exception) -> None:
        """Report the error that ends this process."""
        self.send("error", at=time.time(), text=f"{type(error).__name__}: {error}")

    def hear(self) -> Any:
        """The starter's next order; None if the starter has closed the connection or has ended."""
        with suppress(OSError):
            line = self._orders.readline()
            return json.loads(line) if line.endswith(b"\n") else None
        return None

    def end_with_starter(self) -> None:
        """End this process when the starter closes the connection, even while it waits elsewhere. Call it once."""
        watched = os.dup(self._up)  # ``close`` leaves it open: the thread watches until the process ends
        threading.Thread(target=_end_at_hangup, args=(watched,), name="bench-starter", daemon=True).start()

    def close(self) -> None:
        """Close this end."""
        os.close(self._up)
        self._orders.close()
        if self._kept is not None:
            self._kept.close()

    def _arrive(self, place: Environment, processes: int, own: str) -> None:
        """Report this process's network and address, and receive the meeting point of the run."""
        if place.world != processes:
            started = f"{place.launcher} has started {place.world}: leave the number out, each row sets it"
            if place.launcher == "none":
                started = "the launcher sets none of OMPI_COMM_WORLD_RANK, PMI_RANK and SLURM_PROCID"
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
            why = "is gone" if came else f"has not sent the address of rank 0 within {_TOLD_S:.0f} s"
            raise GroupError(f"rank {place.rank} of {processes}: the process that started this one {why}")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = told["address"], str(told["port"])


def _end_at_hangup(fd: int) -> None:
    """Wait until the other end is closed, without reading from it, and end the process."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)  # POLLHUP and POLLERR, the latter of a pipe without readers, always count
    poll.poll()
    os._exit(1)


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
    """The starter's ends of the connections to all processes of a run on this machine.

    The processes open the ``addresses``. ``ended`` lists the processes whose connections have closed, in order. A
    message arrives at most ``linger_s`` after the end of its process. As a context manager it closes everything.
    """

    linger_s = 0.0

    def __init__(self, processes: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._rest: dict[int, bytes] = {}
        self._orders: dict[int, int] = {}
        self._writing: dict[int, int] = {}  # kept open until the process has opened its own
        self._places: dict[int, Message] = {}  # the "here" message of each connected process
        self.ended: list[int] = []
        self.environ: dict[str, str] = {}
        """Variables for the environment of the processes."""
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
        """Send a JSON value to all processes. A process that has ended is skipped; ``receive`` reports its end."""
        line = json.dumps(what).encode() + b"\n"
        for fd in self._orders.values():
            with suppress(BrokenPipeError, ConnectionError):
                _write(fd, line)

    def close_orders(self) -> None:
        """Close the direction to the processes; their ``hear`` then returns None."""
        while self._orders:
            os.close(self._orders.popitem()[1])

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """The messages that have arrived, as (process index, message). Waits up to ``timeout`` seconds for the first.

        Raises SynclineError for a line that is not a JSON object with a kind, or is longer than ``LINE_BYTES``.
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
        """The remaining messages of processes that have ended, for up to ``linger_s`` without a new one."""
        until = time.monotonic() + self.linger_s
        while self.open and ((last := self.receive(self.linger_s / 10)) or time.monotonic() < until):
            yield last

    def _add(self, rank: int, reading: int) -> None:
        self._selector.register(reading, selectors.EVENT_READ, rank)
        self._rest[reading] = b""

    def _here(self, rank: int, message: Message) -> None:
        """Close this process's copy of the pipe's writing end, so that the pipe ends when the process does."""
        if rank in self._places:
            raise SynclineError(f"process {rank} has reported its arrival twice: run the same Syncline everywhere")
        self._places[rank] = message
        self._release(rank)

    def _release(self, rank: int) -> None:
        if rank in self._writing:  # only pipes have a copy here
            os.close(self._writing.pop(rank))

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._rest[fd]
        os.close(fd)


class RemoteMailbox(Mailbox):
    """The starter's ends for processes on any hosts, which connect over TCP and prove that they hold the secret.

    Listens until all processes have connected: on SYNCLINE_INTERFACE if set, else on this machine's address for other
    hosts, else on the loopback. ``receive`` raises SynclineError if a process has not connected within ``limit_s``.
    """

    linger_s = 1.0

    def __init__(self, processes: int, limit_s: float = START_S) -> None:
        super().__init__(0)
        self._processes, self._deadline, self._limit_s = processes, time.monotonic() + limit_s, limit_s
        self._callers: deque[tuple[int, socket.socket]] = deque()  # accepted by the doors' thread
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
        """Accept callers while processes are missing, then as ``Mailbox``. SynclineError if some are late."""
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
            raise SynclineError(
                f"process {rank} did not send its address: its host has another version of Syncline installed"
            )
        super()._here(rank, message)
        if len(self._places) == self._processes:
            self._doors.close()
            first = self._places[0]
            near = {place["network"] for place in self._places.values()} == {first["network"]}
            self.tell({"address": "127.0.0.1" if near else first["address"], "port": first["port"]})


def _keep_alive(sock: socket.socket) -> None:
    """Set the kernel's keep-alive and user timeouts, which end a connection to a dead or unreachable host."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def _reached_at() -> str:
    """The address on which the starter listens: SYNCLINE_INTERFACE, else this machine's own, else the loopback."""
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
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or "kind" not in message:
        raise SynclineError(f"process {rank} sent a report that cannot be read: {line[:200]!r}")
    return message
