"""Listening and connecting: accepts callers that prove themselves, dials, and connects all pairs of a group.

``Doors`` is a thread over listening sockets. It holds all handshakes at once, each with a time limit, and reads no byte
beyond the handshake, so a silent stranger delays nobody. Of too many handshakes it drops the oldest. It logs the first
refusals in full, then one line whenever their number has doubled: a million strangers make some twenty lines.

A ``Listener`` is a process's doors while a group forms: TCP on one interface, and an abstract UNIX socket for processes
of this network namespace. Of each pair the higher index dials (``connect``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import GroupError, HandshakeError, SecretError, UsageError
from . import handshake
from .bell import DescriptorBell
from .meeting import Member, Roll

log = logging.getLogger("syncline.wire")

IN_FULL = 8
"""Refusals that have a line each."""

HANDSHAKE_S = 5.0
"""Time limit for one handshake."""

CALLERS = 256
"""Unfinished handshakes that are kept, beside two for every process that is expected."""

_BACKLOG = 4096
_PAUSE_S = 0.05

Check = Callable[[handshake.Hello], None]
"""Raises HandshakeError for a caller that has proved itself and is not wanted."""

Admit = Callable[[handshake.Hello, socket.socket, str], None]
"""Takes the connection, blocking, of a caller that has proved itself; the text is whence it came."""

Refused = Callable[[handshake.Hello, str, str], None]
"""Is told of a caller whose claim was refused: what it said, whence it came, and why."""

PURPOSES = ("control", "data")

_CHECK_S = 0.25
"""How often ``check`` is called."""

_TRY_S = 0.1
"""What a call may take at least, however late it is."""

_DIAL_S = 10.0
_LOOK_S = 0.05
_AGAIN_S = 0.05
_WORD_S = 2.0
"""How long the meeting may take to say who has failed, where a peer has heard of it before."""

_CROWDED = HandshakeError, BlockingIOError, ConnectionResetError, BrokenPipeError
"""How a call ends at a peer whose doors a crowd is at, of whatever strangers: a UNIX socket whose queue is full takes
nobody, and of unfinished handshakes the peer lets the oldest go."""


class Refusals:
    """Counts and logs the refusals of one door; used from one thread at a time."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._told = 0
        self._latest: tuple[str, str] = "", ""

    def add(self, whence: str, why: str) -> None:
        """Somebody from ``whence`` was refused."""
        self._count += 1
        self._latest = whence, why
        if self._count <= IN_FULL:
            self._log.warning("refused a connection from %s: %s", whence, why)
            self._told = self._count
        elif self._count >= 2 * self._told:
            self._tell_count()

    def close(self) -> None:
        """The door is closed: say how many there were that no line has counted yet. May be called again."""
        if self._count > self._told:
            self._tell_count()

    def _tell_count(self) -> None:
        self._told = self._count
        self._log.warning("refused %d connections so far, the latest from %s: %s", self._count, *self._latest)


def open_door(address: str, port: int = 0, world: int = 1) -> socket.socket:
    """A TCP socket that listens on an address of this machine, for ``world`` calls at once; raises OSError."""
    door = bind_here(address, port, again=bool(port))  # connections of an earlier start may still be closing there
    return _listening(door, world)


def open_unix_door(name: str, world: int = 1) -> socket.socket:
    """A UNIX socket that listens under an abstract name, for processes that share this network namespace."""
    door = socket.socket(socket.AF_UNIX)
    with _closing_after_errors(door):
        door.bind(f"\0{name}")
    return _listening(door, world)


def bind_here(address: str = "127.0.0.1", port: int = 0, *, again: bool = True) -> socket.socket:
    """A TCP socket bound to a port of this machine, by default a free one, and not listening.

    While it is open the kernel does not give the port to anyone that asks for a free one; a socket with SO_REUSEADDR
    can still listen on it. ``again`` sets that for this socket.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    with _closing_after_errors(sock):
        if again:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    return sock


def _listening(door: socket.socket, world: int) -> socket.socket:
    with _closing_after_errors(door):
        door.listen(min(2 * world + 128, _BACKLOG))
    return door


@contextlib.contextmanager
def _closing_after_errors(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


@dataclass(eq=False)
class _Caller:
    """A connection in its handshake: what is still to be read, and what was said so far."""

    sock: socket.socket
    whence: str
    deadline: float
    wanted: int = handshake.HELLO_BYTES
    got: bytes = b""
    said: handshake.Hello | None = None
    reply: bytes = b""


class Doors:
    """Listening sockets of process ``index`` and the thread that stands in them, until closed."""

    def __init__(
        self,
        doors: Sequence[socket.socket],
        run: bytes,
        secret: bytes,
        index: int,
        admit: Admit,
        *,
        check: Check = lambda _: None,
        refused: Refused = lambda *_: None,
        world: int = 1,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._doors = tuple(doors)
        self._run, self._secret, self._index = run, secret, index
        self._admit, self._check, self._refused = admit, check, refused
        self._most, self._handshake_s = CALLERS + 2 * world, handshake_s
        self._callers: dict[int, _Caller] = {}  # by descriptor, oldest first
        self._refusals = Refusals(log)
        self._closing = False
        self._bell = DescriptorBell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for door in self._doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name="syncline-doors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the doors and unfinished handshakes. May be called again."""
        if self._closing:
            return
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._selector.close()
        self._bell.close()
        for sock in (*self._doors, *(caller.sock for caller in self._callers.values())):
            sock.close()
        self._refusals.close()

    def _serve(self) -> None:
        callers = self._callers
        while not self._closing:
            # All have the same time limit: the oldest, which is the first, ends first.
            first = next(iter(callers.values()), None)
            limit = None if first is None else max(0.0, first.deadline - time.monotonic())
            for key, _ in self._selector.select(limit):
                if isinstance(key.data, _Caller):
                    if callers.get(key.fd) is key.data:  # not dropped in this very turn
                        self._hear(key.data)
                elif key.data is not None:
                    key.data(key.fileobj)
            now = time.monotonic()
            for caller in [caller for caller in callers.values() if caller.deadline <= now]:
                self._refuse(caller, f"it fell silent during the handshake, {_progress(caller)}")

    def _accept(self, door: socket.socket) -> None:
        try:
            sock, whence = door.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._refusals.add("somebody", f"cannot accept it: {error.strerror}")
            time.sleep(_PAUSE_S)  # out of descriptors: a while later some may be free
            return
        if len(self._callers) >= self._most:
            self._refuse(next(iter(self._callers.values())), "too many handshakes are unfinished")
        sock.setblocking(False)
        name = f"{whence[0]}:{whence[1]}" if isinstance(whence, tuple) else "this machine"
        caller = _Caller(sock, name, time.monotonic() + self._handshake_s)
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        """Read what a caller says, and answer when it is complete."""
        try:
            part = caller.sock.recv(caller.wanted - len(caller.got))
            if not part:
                raise HandshakeError(f"it closed the connection during the handshake, {_progress(caller)}")
            caller.got += part
            if len(caller.got) == caller.wanted:
                self._answer(caller)
        except BlockingIOError:
            return
        except (HandshakeError, OSError) as error:
            self._refuse(caller, str(error))

    def _answer(self, caller: _Caller) -> None:
        raw, caller.got = caller.got, b""
        if caller.said is None:
            said = handshake.read_hello(raw)
            if said.run != self._run:
                raise HandshakeError("it belongs to another run")
            if said.target != self._index:
                raise HandshakeError(f"it looks for rank {said.target}, this is rank {self._index}")
            caller.said, caller.reply = said, handshake.answer(self._secret, said)
            caller.wanted = handshake.MAC_BYTES
            caller.sock.sendall(caller.reply)  # fits any socket's empty buffer
            return
        handshake.check_proof(self._secret, caller.said, caller.reply, raw)
        self._check(caller.said)
        caller.sock.sendall(handshake.WELCOME)
        self._forget(caller)
        caller.sock.setblocking(True)
        self._admit(caller.said, caller.sock, caller.whence)

    def _refuse(self, caller: _Caller, why: str) -> None:
        claim = "" if caller.said is None else f", which says that it is rank {caller.said.source}"
        self._refusals.add(caller.whence + claim, why)
        if caller.said is not None:
            self._refused(caller.said, caller.whence, why)
        self._forget(caller)
        caller.sock.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]


def _progress(caller: _Caller) -> str:
    return f"after {len(caller.got)} of {caller.wanted} bytes"


class Listener:
    """Accepts connections for process ``index`` of ``world`` until closed; ``take`` hands them out."""

    def __init__(
        self,
        address: str,
        run: bytes,
        secret: bytes,
        index: int,
        world: int,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Open the doors; raises UsageError when ``address`` is not one of this machine's."""
        self._index, self._world = index, world
        self._came = threading.Condition()
        self._ready: dict[tuple[int, str], socket.socket] = {}
        self.address: str = address
        self.unix = f"syncline-{secrets.token_hex(12)}"
        try:
            tcp = open_door(address, world=world)
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror}; give another interface=") from error
        self.port: int = tcp.getsockname()[1]
        with contextlib.ExitStack() as undo:
            undo.callback(tcp.close)
            doors = tcp, open_unix_door(self.unix, world)
            undo.callback(doors[1].close)
            self._doors = Doors(
                doors, run, secret, index, self._admit, check=self._check, world=world, handshake_s=handshake_s
            )
            undo.pop_all()

    def describe(self, terms: dict[str, str]) -> Member:
        """This process's own record, for the meeting."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        cores = os.sched_getaffinity(0)
        network, pids = (Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "pid"))
        return Member(
            self._index,
            self._world,
            socket.gethostname(),
            f"{boot} {network}",
            os.getpid(),
            f"{boot} {pids}",
            self.address,
            self.port,
            self.unix,
            terms,
            f"{sum(1 << core for core in cores):x}",
        )

    def take(self, peers: Collection[int], purpose: str, timeout: float) -> dict[int, socket.socket]:
        """The connections that any of ``peers`` have opened for ``purpose``; waits up to ``timeout`` for one."""

        def there() -> list[int]:
            return [peer for peer in peers if (peer, purpose) in self._ready]

        with self._came:
            self._came.wait_for(there, timeout)
            return {peer: self._ready.pop((peer, purpose)) for peer in there()}

    def close(self) -> None:
        """Close the doors, unfinished handshakes, and what nobody took. May be called again."""
        self._doors.close()
        for sock in self._ready.values():
            sock.close()
        self._ready.clear()

    def _check(self, said: handshake.Hello) -> None:
        if said.source >= self._world or said.purpose not in PURPOSES:
            raise HandshakeError(f"rank {said.source} of {self._world} has nothing to connect for {said.purpose!r}")
        with self._came:
            if (said.source, said.purpose) in self._ready:
                raise HandshakeError(f"rank {said.source} is connected already")

    def _admit(self, said: handshake.Hello, sock: socket.socket, whence: str) -> None:  # noqa: ARG002
        with self._came:
            self._ready[said.source, said.purpose] = sock
            self._came.notify_all()


def dial(
    where: tuple[str, int] | str,
    run: bytes,
    secret: bytes,
    source: int,
    target: int,
    purpose: str,
    timeout: float,
    check: Callable[[], None] = lambda: None,
) -> socket.socket:
    """Connect to a listener and prove ourselves; ``check`` is called meanwhile and may end it by raising.

    ``where`` is an address and port, or the name of an abstract UNIX socket. All addresses of a name are tried. Raises
    OSError if nothing listens, HandshakeError if the other end hangs up, SecretError if it has another secret or none.
    """
    deadline = time.monotonic() + timeout
    hello = partial(handshake.hello, run, source, target, purpose)
    if isinstance(where, str):
        return _dial_end(socket.AF_UNIX, f"\0{where}", hello, secret, deadline, check)
    found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    ends = list(dict.fromkeys((family, end) for family, *_, end in found))
    failures: list[OSError | HandshakeError] = []
    for number, (family, end) in enumerate(ends):
        now = time.monotonic()
        limit = now + max(_TRY_S, deadline - now) / (len(ends) - number)
        try:
            return _dial_end(family, end, hello, secret, limit, check)
        except (OSError, HandshakeError) as error:
            failures.append(error)
    # What has answered tells more than what has not.
    raise max(failures, key=lambda error: isinstance(error, HandshakeError) + isinstance(error, SecretError))


def _dial_end(
    family: int,
    end: Any,
    hello: Callable[[], handshake.Hello],
    secret: bytes,
    deadline: float,
    check: Callable[[], None],
) -> socket.socket:
    """Connect to one address of any family."""
    sock = socket.socket(family)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.settimeout(max(_TRY_S, deadline - time.monotonic()))
        sock.connect(end)
        if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            # Nobody listens, and the kernel has given this end the very port that it calls.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        said = hello()
        sock.sendall(said.raw)
        reply = read_exactly(sock, handshake.ANSWER_BYTES, deadline, check)
        try:
            proof = handshake.check_answer(secret, said, reply)
        except SecretError:
            with contextlib.suppress(OSError):
                sock.sendall(bytes(handshake.MAC_BYTES))  # proves nothing, and lets the other end say who was refused
            raise
        sock.sendall(proof)
        if read_exactly(sock, 1, deadline, check) != handshake.WELCOME:
            raise HandshakeError("it refused this connection")
        sock.settimeout(None)
        undo.pop_all()
    return sock


def read_exactly(sock: socket.socket, nbytes: int, deadline: float, check: Callable[[], None] = lambda: None) -> bytes:
    """Read that many bytes before ``deadline`` (time.monotonic), else raise HandshakeError; calls ``check`` between."""
    found = b""
    while len(found) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HandshakeError(f"it fell silent during the handshake, after {len(found)} of {nbytes} bytes")
        sock.settimeout(min(left, _CHECK_S))
        try:
            part = sock.recv(nbytes - len(found))
        except TimeoutError:
            check()
            continue
        if not part:
            raise HandshakeError("it closed the connection during the handshake")
        found += part
    return found


def connect(
    roll: Roll, listener: Listener, purpose: str, near: Collection[int], deadline: float, check: Callable[[], None]
) -> dict[int, socket.socket]:
    """One proved connection to every other process, for one purpose; raises GroupError naming the missing.

    Those to ``near``, processes of this host, are UNIX sockets; all ranks must choose alike. ``deadline`` is a time of
    time.monotonic. ``check`` raises if another process has found a fault.
    """
    begun = time.monotonic()
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(roll.index):
            found[peer] = _dial(roll, peer, purpose, peer in near, deadline, check)
        waiting = set(range(roll.index + 1, len(roll.members)))
        while waiting:
            found |= listener.take(waiting, purpose, _LOOK_S)
            waiting -= found.keys()
            check()
            if waiting and time.monotonic() > deadline:
                names = ", ".join(roll.name(peer) for peer in sorted(waiting))
                raise GroupError(f"no {purpose} connection within {deadline - begun:.0f} s from {names}")
    except BaseException:
        for sock in found.values():
            sock.close()
        raise
    return found


def _dial(
    roll: Roll, peer: int, purpose: str, use_unix: bool, deadline: float, check: Callable[[], None]
) -> socket.socket:
    member = roll.members[peer]
    where: tuple[str, int] | str = member.unix if use_unix else (member.address, member.port)
    shown = f"{roll.name(peer)} at {'its UNIX socket' if use_unix else f'{member.address}:{member.port}'}"
    try:
        while True:
            try:
                left = max(0.1, min(_DIAL_S, deadline - time.monotonic()))
                return dial(where, handshake.run_id(roll.run), roll.secret, roll.index, peer, purpose, left, check)
            except _CROWDED as error:
                if isinstance(error, SecretError) or time.monotonic() >= deadline:
                    raise
                check()
                time.sleep(_AGAIN_S)
    except HandshakeError as error:
        raise HandshakeError(f"{shown} refused: {error}") from error
    except OSError as error:
        _hear_why(check, _WORD_S if isinstance(error, ConnectionRefusedError) else 0.0)
        if isinstance(error, ConnectionRefusedError):
            why = (
                "it has ended its start already, since it has failed or has heard of a process that has: the errors"
                " that other processes print say which"
            )
        else:
            why = "check that the hosts reach each other on that address, or give interface="
        raise GroupError(f"cannot connect to {shown}: {error.strerror or error}; {why}") from error


def _hear_why(check: Callable[[], None], limit_s: float) -> None:
    """Wait a while for the news of a process that has failed: who has closed its doors may have heard them before."""
    deadline = time.monotonic() + limit_s
    check()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        check()
