"""Open doors: accepts callers that prove themselves, refuses and logs strangers, and hands the others on.

One thread holds all handshakes at once, each with a time limit, and reads no byte more than the handshake has: a
stranger who connects and says nothing, or half of it, keeps nobody waiting. Of too many unfinished handshakes the
oldest is dropped.

Nor can whoever knocks fill the log. The first refusals are logged in full. After them one line follows whenever their
number has doubled, with the latest one as an example, and one at the end: a million strangers make some twenty lines
more.

Does not know what the callers come for: whoever opens the doors does.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import HandshakeError
from . import handshake

IN_FULL = 8
"""Refusals that have a line each."""


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


log = logging.getLogger("syncline.wire")

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


def open_door(address: str, port: int = 0, world: int = 1) -> socket.socket:
    """A TCP socket that listens at an address of this machine; raises OSError.

    ``world`` is the number of processes that may call at once.
    """
    door = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        if port:  # connections of an earlier start may still be closing there
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((address, port))
        door.listen(min(2 * world + 128, _BACKLOG))
    except BaseException:
        door.close()
        raise
    return door


def open_unix_door(name: str, world: int = 1) -> socket.socket:
    """A UNIX socket that listens under an abstract name, for processes that share this network namespace."""
    door = socket.socket(socket.AF_UNIX)
    try:
        door.bind(f"\0{name}")
        door.listen(min(2 * world + 128, _BACKLOG))
    except BaseException:
        door.close()
        raise
    return door


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
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
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
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._bell)
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
