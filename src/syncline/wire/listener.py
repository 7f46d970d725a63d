"""One process's open doors while a group forms: accepts peers that prove themselves, refuses and logs strangers.

A TCP door on one interface only, and an abstract UNIX door for processes that share this network namespace. One thread
holds all handshakes at once, each with a time limit, and reads no byte more than the handshake has: a stranger who
connects and says nothing, or half of it, keeps nobody waiting. Of too many unfinished handshakes the oldest is dropped.
The doors close when the group is complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from ..errors import GroupError, HandshakeError, UsageError
from . import handshake
from .refusals import Refusals

log = logging.getLogger("syncline.wire")

HANDSHAKE_S = 5.0
"""Time limit for one handshake."""

_CALLERS = 256
"""Handshakes under way at a time."""

_PAUSE_S = 0.05


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


@dataclass(eq=False)
class _Doors:
    """The two listening sockets and who stands in them."""

    tcp: socket.socket
    unix: socket.socket
    callers: dict[int, _Caller] = field(default_factory=dict)  # by descriptor, oldest first


class Listener:
    """Accepts connections for process ``index`` until closed; ``take`` hands them out by peer and purpose."""

    def __init__(self, address: str, run: bytes, secret: bytes, index: int, handshake_s: float = HANDSHAKE_S) -> None:
        """Open the doors; raises UsageError when ``address`` is not one of this machine's."""
        self._run, self._secret, self._index = run, secret, index
        self._handshake_s = handshake_s
        self._came = threading.Condition()
        self._ready: dict[tuple[int, str], socket.socket] = {}
        self._closing = False
        self._refusals = Refusals(log)
        tcp = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            tcp.bind((address, 0))
        except OSError as error:
            tcp.close()
            raise UsageError(f"cannot listen on {address}: {error.strerror}; give another interface=") from error
        self.address: str = address
        self.port: int = tcp.getsockname()[1]
        self.unix = f"syncline-{secrets.token_hex(12)}"
        self._doors = _Doors(tcp, socket.socket(socket.AF_UNIX))
        self._doors.unix.bind(f"\0{self.unix}")
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for door in (self._doors.tcp, self._doors.unix):
            door.listen(128)
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name="syncline-listener", daemon=True)
        self._thread.start()

    def take(self, peer: int, purpose: str, timeout: float) -> socket.socket | None:
        """The connection that ``peer`` opened for ``purpose``; None when it has not come within ``timeout``."""
        with self._came:
            self._came.wait_for(lambda: (peer, purpose) in self._ready, timeout)
            return self._ready.pop((peer, purpose), None)

    def close(self) -> None:
        """Close the doors, unfinished handshakes, and what nobody took. May be called again."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._bell)
        left = [caller.sock for caller in self._doors.callers.values()]
        for sock in (self._doors.tcp, self._doors.unix, *left, *self._ready.values()):
            sock.close()
        self._ready.clear()
        self._refusals.close()

    def _serve(self) -> None:
        callers = self._doors.callers
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
        if len(self._doors.callers) >= _CALLERS:
            self._refuse(next(iter(self._doors.callers.values())), "too many handshakes are unfinished")
        sock.setblocking(False)
        name = f"{whence[0]}:{whence[1]}" if isinstance(whence, tuple) else "this machine"
        caller = _Caller(sock, name, time.monotonic() + self._handshake_s)
        self._doors.callers[sock.fileno()] = caller
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
        key = caller.said.source, caller.said.purpose
        with self._came:
            if key in self._ready:
                raise HandshakeError(f"rank {caller.said.source} is connected already")
            caller.sock.sendall(handshake.WELCOME)
            self._forget(caller)
            caller.sock.setblocking(True)
            self._ready[key] = caller.sock
            self._came.notify_all()

    def _refuse(self, caller: _Caller, why: str) -> None:
        self._refusals.add(caller.whence, why)
        self._forget(caller)
        caller.sock.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        del self._doors.callers[caller.sock.fileno()]


def _progress(caller: _Caller) -> str:
    return f"after {len(caller.got)} of {caller.wanted} bytes"


def dial(
    where: tuple[str, int] | str, run: bytes, secret: bytes, source: int, target: int, purpose: str, timeout: float
) -> socket.socket:
    """Connect to a listener and prove ourselves.

    ``where`` is an address and port, or the name of an abstract UNIX socket. Raises OSError when nobody is there and
    HandshakeError when the other end refuses or cannot prove itself.
    """
    deadline = time.monotonic() + timeout
    if isinstance(where, str):
        sock = socket.socket(socket.AF_UNIX)
        end: tuple[str, int] | str = f"\0{where}"
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        end = where
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.settimeout(timeout)
        sock.connect(end)
        said = handshake.hello(run, source, target, purpose)
        sock.sendall(said.raw)
        reply = read_exactly(sock, handshake.ANSWER_BYTES, deadline)
        sock.sendall(handshake.check_answer(secret, said, reply))
        if read_exactly(sock, 1, deadline) != handshake.WELCOME:
            raise HandshakeError("it refused this connection")
        sock.settimeout(None)
        undo.pop_all()
    return sock


def read_exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Read that many bytes before ``deadline`` (time.monotonic); raises HandshakeError when they do not come."""
    found = b""
    while len(found) < nbytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise HandshakeError(f"it fell silent during the handshake, after {len(found)} of {nbytes} bytes")
        sock.settimeout(left)
        try:
            part = sock.recv(nbytes - len(found))
        except TimeoutError:
            continue
        if not part:
            raise HandshakeError("it closed the connection during the handshake")
        found += part
    return found


def local_address_towards(address: str, port: int) -> str:
    """The address of this machine from which ``address`` is reached; no packet is sent."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise GroupError(f"cannot resolve the address {address!r}: {error.strerror}") from error
    family, kind, proto, _, end = found[0]
    with socket.socket(family, kind, proto) as probe:
        try:
            probe.connect(end)
        except OSError as error:
            raise GroupError(f"no route to {address}: {error.strerror}; check address= and interface=") from error
        return str(probe.getsockname()[0])


def own_address() -> str:
    """An address of this machine that other machines may reach: its name's, or its first interface's.

    Raises GroupError when it has none but the loopback's.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET, socket.SOCK_STREAM)
        addresses = [str(end[0]) for *_, end in found if not str(end[0]).startswith("127.")]
        if addresses:
            return addresses[0]
    for _, name in socket.if_nameindex():
        with contextlib.suppress(UsageError):
            address = interface_address(name)
            if not address.startswith("127."):
                return address
    raise GroupError(
        f"{socket.gethostname()} has no address that other hosts could reach: give interface=, or MASTER_ADDR and"
        " MASTER_PORT"
    )


def interface_address(name: str) -> str:
    """The address of a network interface (``eth0``), or ``name`` itself when it is an address."""
    import fcntl
    import struct

    try:
        socket.getaddrinfo(name, 0, flags=socket.AI_NUMERICHOST)
        return name
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(entry for _, entry in socket.if_nameindex())
            raise UsageError(f"interface {name!r} has no IPv4 address ({error.strerror}); there are {known}") from error
    return socket.inet_ntoa(found[20:24])
