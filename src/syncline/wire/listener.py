"""Listening and connecting: authenticates callers, calls listeners, and connects all pairs of a group.

``Doors`` is a thread over listening sockets. It runs all handshakes concurrently, each with a time limit, so a silent
stranger delays no other caller. It reads no byte beyond the handshake. If too many handshakes are unfinished, it drops
the oldest. It logs the first refusals in full, then one line whenever their number has doubled: a million strangers
make some twenty lines.

A ``Listener`` has a process's doors while a group forms: TCP on one interface, and an abstract UNIX socket for
processes of this network namespace. In each pair the higher index dials (``connect``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import GroupError, HandshakeError, SecretError, UsageError
from . import handshake
from .bell import DescriptorBell
from .meeting import Member, Roll
from .tls import Credentials, Sealed, refusal

log = logging.getLogger("syncline.wire")

IN_FULL = 8
"""The number of refusals that are logged one by one."""

HANDSHAKE_S = 5.0
"""The time limit for one handshake."""

CALLERS = 256
"""The number of unfinished handshakes that are kept, in addition to two for every expected process."""

_BACKLOG = 4096
_PAUSE_S = 0.05

Check = Callable[[handshake.Hello], None]
"""Raises HandshakeError for an authenticated caller that is not expected."""

Admit = Callable[[handshake.Hello, socket.socket, str], None]
"""Takes the connection, in blocking mode, of an authenticated caller; the text is the caller's address."""

Refused = Callable[[handshake.Hello, str, str], None]
"""Called for a refused caller, with its first message, its address and the reason."""

PURPOSES = ("control", "data")

_CHECK_S = 0.25
"""The time between two calls of ``check``."""

_TRY_S = 0.1
"""The least time limit of a call, however late it is."""

_DIAL_S = 10.0
_LOOK_S = 0.05
_AGAIN_S = 0.05
_WORD_S = 2.0
"""How long to wait for the meeting's message that names a failed process, if a peer has received it earlier."""

_CROWDED = HandshakeError, BlockingIOError, ConnectionResetError, BrokenPipeError
"""The errors of a call to a peer that too many strangers call: a UNIX socket with a full queue refuses callers, and the
peer drops the oldest unfinished handshakes."""


class Refusals:
    """Counts and logs the refusals of one door. Used by one thread at a time."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0
        self._told = 0
        self._latest: tuple[str, str] = "", ""

    def add(self, origin: str, why: str) -> None:
        """Record that a caller from the address ``origin`` was refused."""
        self._count += 1
        self._latest = origin, why
        if self._count <= IN_FULL:
            self._log.warning("refused a connection from %s: %s", origin, why)
            self._told = self._count
        elif self._count >= 2 * self._told:
            self._tell_count()

    def close(self) -> None:
        """Log the number of refusals if it has grown since the last line. Callable repeatedly."""
        if self._count > self._told:
            self._tell_count()

    def _tell_count(self) -> None:
        self._told = self._count
        self._log.warning("refused %d connections so far, the latest from %s: %s", self._count, *self._latest)


def open_door(address: str, port: int = 0, world: int = 1) -> socket.socket:
    """A TCP socket that listens on an address of this machine, for ``world`` calls at once. Raises OSError."""
    reuse = bool(port)  # connections of an earlier start may still be closing there
    return _bound(_family(address), (address, port), reuse, world)


def bind_here(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A TCP socket bound to a port of this machine, by default a free one, and not listening.

    While it is open the kernel gives the port to no process that asks for a free one. A socket with SO_REUSEADDR, such
    as this one, can still listen on it.
    """
    return _bound(_family(address), (address, port), reuse=True)


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _bound(family: int, name: tuple[str, int] | str, reuse: bool, world: int = 0) -> socket.socket:
    """A bound socket, which listens if ``world`` is given."""
    sock = socket.socket(family)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(name)
        if world:
            sock.listen(min(2 * world + 128, _BACKLOG))
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(eq=False)
class _Caller:
    """A connection in its handshake: the size and the received part of its next message, and its messages so far."""

    sock: socket.socket
    descriptor: int
    origin: str
    deadline: float
    wanted: int = handshake.HELLO_BYTES
    got: bytes = b""
    said: handshake.Hello | None = None
    reply: bytes = b""
    sealed: Sealed | None = None
    """The TLS connection over ``sock``, from its handshake on."""

    @property
    def progress(self) -> str:
        """How far its handshake has come, for messages."""
        if self.sealed is not None:
            return "in its TLS part"
        return f"after {len(self.got)} of {self.wanted} bytes"


class Doors:
    """Listening sockets of process ``index`` and the thread that serves them, until closed."""

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
        tls: Credentials | None = None,
    ) -> None:
        self._doors = tuple(doors)
        self._run, self._secret, self._index = run, secret, index
        self._admit, self._check, self._refused = admit, check, refused
        self._tls = tls
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
        """Close the doors and the connections in their handshakes. Callable repeatedly."""
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
            # All handshakes have the same time limit, so the first one is the first to exceed it.
            first = next(iter(callers.values()), None)
            limit = None if first is None else max(0.0, first.deadline - time.monotonic())
            for key, _ in self._selector.select(limit):
                if isinstance(key.data, _Caller):
                    if callers.get(key.fd) is key.data:  # not dropped in this turn
                        self._hear(key.data)
                elif key.data is not None:
                    key.data(key.fileobj)
            now = time.monotonic()
            for caller in [caller for caller in callers.values() if caller.deadline <= now]:
                self._refuse(caller, f"it fell silent during the handshake, {caller.progress}")

    def _accept(self, door: socket.socket) -> None:
        try:
            sock, origin = door.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._refusals.add("somebody", f"cannot accept it: {error.strerror}")
            time.sleep(_PAUSE_S)  # this process has no free descriptor at the moment
            return
        if len(self._callers) >= self._most:
            self._refuse(next(iter(self._callers.values())), "too many handshakes are unfinished")
        sock.setblocking(False)
        name = f"{origin[0]}:{origin[1]}" if isinstance(origin, tuple) else "this machine"
        caller = _Caller(sock, sock.fileno(), name, time.monotonic() + self._handshake_s)
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        """Read a part of a caller's message, and answer a complete one."""
        try:
            if caller.sealed is not None:
                self._seal(caller, caller.sealed)
                return
            part = caller.sock.recv(caller.wanted - len(caller.got))
            if not part:
                raise HandshakeError(f"it closed the connection during the handshake, {caller.progress}")
            caller.got += part
            if len(caller.got) == caller.wanted:
                self._answer(caller)
        except BlockingIOError:
            return
        except Exception as error:  # of whatever kind: one caller must not end the others' handshakes
            self._refuse(caller, refusal(error))

    def _answer(self, caller: _Caller) -> None:
        raw, caller.got = caller.got, b""
        tls = None if caller.sock.family == socket.AF_UNIX else self._tls
        if caller.said is None:
            said = handshake.read_hello(raw)
            if said.run != self._run:
                raise HandshakeError("it belongs to another run")
            if said.target != self._index:
                raise HandshakeError(f"it looks for rank {said.target}, but this is rank {self._index}")
            caller.said, caller.reply = said, handshake.answer(self._secret, said, tls is not None)
            caller.wanted = handshake.MAC_BYTES
            caller.sock.sendall(caller.reply)  # fits the empty buffer of any socket
            return
        handshake.check_proof(self._secret, caller.said, caller.reply, raw, tls is not None)
        if tls is None:
            self._welcome(caller, caller.said)
        else:
            caller.sock = caller.sealed = tls.wrap(caller.sock, listening=True)

    def _seal(self, caller: _Caller, sealed: Sealed) -> None:
        """Go on with the handshake of TLS. The bytes of this end fit the empty buffer of any socket."""
        assert self._tls is not None
        assert caller.said is not None
        try:
            sealed.do_handshake()
        except ssl.SSLWantReadError:
            return
        self._tls.check(sealed, caller.said.source)
        self._welcome(caller, caller.said)

    def _welcome(self, caller: _Caller, said: handshake.Hello) -> None:
        self._check(said)
        caller.sock.sendall(handshake.WELCOME)
        self._forget(caller)
        caller.sock.setblocking(True)
        self._admit(said, caller.sock, caller.origin)

    def _refuse(self, caller: _Caller, why: str) -> None:
        claim = "" if caller.said is None else f", which says that it is rank {caller.said.source}"
        self._refusals.add(caller.origin + claim, why)
        if caller.said is not None:
            self._refused(caller.said, caller.origin, why)
        self._forget(caller)
        caller.sock.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.descriptor)  # TLS may have taken the socket's own
        del self._callers[caller.descriptor]


class Listener:
    """Accepts connections for process ``index`` of ``world`` until closed; ``take`` returns them."""

    def __init__(
        self,
        address: str,
        run: bytes,
        secret: bytes,
        index: int,
        world: int,
        handshake_s: float = HANDSHAKE_S,
        tls: Credentials | None = None,
    ) -> None:
        """Open the doors. Raises UsageError unless ``address`` belongs to this machine."""
        self._index, self._world = index, world
        self.tls = tls
        """The credentials for TCP connections, which are plain for None."""
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
            unix = _bound(socket.AF_UNIX, f"\0{self.unix}", False, world)
            undo.callback(unix.close)
            self._doors = Doors(
                (tcp, unix), run, secret, index, self._admit,
                check=self._check, world=world, handshake_s=handshake_s, tls=tls,
            )  # fmt: skip
            undo.pop_all()

    def describe(self, terms: dict[str, str]) -> Member:
        """The record of this process, for the meeting."""
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
        """The connections that ``peers`` have opened for ``purpose``. Waits up to ``timeout`` for the first."""

        def there() -> list[int]:
            return [peer for peer in peers if (peer, purpose) in self._ready]

        with self._came:
            self._came.wait_for(there, timeout)
            return {peer: self._ready.pop((peer, purpose)) for peer in there()}

    def close(self) -> None:
        """Close the doors and all connections that were not taken. Callable repeatedly."""
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

    def _admit(self, said: handshake.Hello, sock: socket.socket, origin: str) -> None:  # noqa: ARG002
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
    tls: Credentials | None = None,
) -> socket.socket:
    """Connect to a listener and authenticate. ``check`` is called meanwhile and may raise.

    ``where`` is an address and port, or the name of an abstract UNIX socket, which ``tls`` does not concern. All
    addresses of a name are tried. Raises OSError if nothing listens, HandshakeError if the listener closes the
    connection, SecretError if it has another secret or none.
    """
    deadline = time.monotonic() + timeout
    hello = partial(handshake.hello, run, source, target, purpose)
    if isinstance(where, str):
        return _dial_end(socket.AF_UNIX, f"\0{where}", hello, secret, deadline, check)
    try:
        found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    except UnicodeError:  # of a part that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, f"{where[0]!r:.80} is no name of a host") from None
    ends = list(dict.fromkeys((family, end) for family, *_, end in found))
    failures: list[OSError | HandshakeError] = []
    for number, (family, end) in enumerate(ends):
        now = time.monotonic()
        limit = now + max(_TRY_S, deadline - now) / (len(ends) - number)
        try:
            return _dial_end(family, end, hello, secret, limit, check, tls)
        except (OSError, HandshakeError) as error:
            failures.append(error)
    # An answer tells more than a missing one.
    raise max(failures, key=lambda error: isinstance(error, HandshakeError) + isinstance(error, SecretError))


def _dial_end(
    family: int,
    end: Any,
    hello: Callable[[], handshake.Hello],
    secret: bytes,
    deadline: float,
    check: Callable[[], None],
    tls: Credentials | None = None,
) -> socket.socket:
    """Connect to one address of any family."""
    sock = socket.socket(family)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.settimeout(max(_TRY_S, deadline - time.monotonic()))
        sock.connect(end)
        if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
            # Nothing listens, and the kernel has given this end the port that it calls.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        said = hello()
        sock.sendall(said.raw)
        reply = read_exactly(sock, handshake.ANSWER_BYTES, deadline, check)
        try:
            proof = handshake.check_answer(secret, said, reply, tls is not None)
        except HandshakeError:
            with contextlib.suppress(OSError):
                sock.sendall(bytes(handshake.MAC_BYTES))  # an invalid proof, so that the listener reports the refusal
            raise
        sock.sendall(proof)
        if tls is not None:
            sock = _sealed(tls, sock, said.target, deadline)
            undo.callback(sock.close)
        try:
            welcome = read_exactly(sock, 1, deadline, check)
        except ssl.SSLError as error:  # the listener's reason to refuse this end's certificate
            raise HandshakeError(refusal(error)) from error
        if welcome != handshake.WELCOME:
            raise HandshakeError("it refused this connection")
        sock.settimeout(None)
        undo.pop_all()
    return sock


def _sealed(tls: Credentials, sock: socket.socket, target: int, deadline: float) -> Sealed:
    """The TLS connection to process ``target``. HandshakeError, with the reason."""
    sealed = tls.wrap(sock, listening=False)
    try:
        sealed.settimeout(max(_TRY_S, deadline - time.monotonic()))
        sealed.do_handshake()
        tls.check(sealed, target)
    except ssl.SSLError as error:
        sealed.close()
        raise HandshakeError(refusal(error)) from error
    except BaseException:
        sealed.close()
        raise
    return sealed


def read_exactly(sock: socket.socket, nbytes: int, deadline: float, check: Callable[[], None] = lambda: None) -> bytes:
    """Read ``nbytes`` before ``deadline`` (time.monotonic), or raise HandshakeError. Calls ``check`` meanwhile."""
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
    """An authenticated connection to every other process, for one purpose. GroupError names the missing processes.

    Connections to ``near``, processes of this host, are UNIX sockets; all ranks must choose alike. ``deadline`` is a
    time of time.monotonic. ``check`` raises if another process has reported a fault.
    """
    begun = time.monotonic()
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(roll.index):
            found[peer] = _dial(roll, peer, purpose, peer in near, deadline, check, listener.tls)
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
    roll: Roll,
    peer: int,
    purpose: str,
    use_unix: bool,
    deadline: float,
    check: Callable[[], None],
    tls: Credentials | None,
) -> socket.socket:
    member = roll.members[peer]
    where: tuple[str, int] | str = member.unix if use_unix else (member.address, member.port)
    shown = f"{roll.name(peer)} at {'its UNIX socket' if use_unix else f'{member.address}:{member.port}'}"
    try:
        while True:
            try:
                left = max(0.1, min(_DIAL_S, deadline - time.monotonic()))
                return dial(where, handshake.run_id(roll.run), roll.secret, roll.index, peer, purpose, left, check, tls)
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
                "it has given up its start, because it or another process has failed: the errors of the other"
                " processes name the failed one"
            )
        else:
            why = "check that the hosts reach each other on that address, or give interface="
        raise GroupError(f"cannot connect to {shown}: {error.strerror or error}; {why}") from error


def _hear_why(check: Callable[[], None], limit_s: float) -> None:
    """Wait a while for the news that a process has failed, since a peer may have closed its doors because of it."""
    deadline = time.monotonic() + limit_s
    check()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        check()
