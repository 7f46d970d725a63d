"""One process's open doors while a group forms: accepts peers that prove themselves, refuses and logs strangers.

A TCP door on one interface only, and an abstract UNIX door for processes that share this network namespace. Every
connection has a time limit and its own thread of a small, bounded number, so that a stranger who connects and says
nothing keeps nobody waiting. The doors close when the group is complete.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ..errors import GroupError, HandshakeError, UsageError
from . import handshake

log = logging.getLogger("syncline.wire")

HANDSHAKE_S = 5.0
"""Time limit for one handshake."""

_DIALLERS = 16


class Listener:
    """Accepts connections for process ``index`` until closed; ``take`` hands them out by peer and purpose."""

    def __init__(self, address: str, run: bytes, secret: bytes, index: int) -> None:
        """Open the doors; raises UsageError when ``address`` is not one of this machine's."""
        self._run, self._secret, self._index = run, secret, index
        self._came = threading.Condition()
        self._ready: dict[tuple[int, str], socket.socket] = {}
        self._closing = False
        self._tcp = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            self._tcp.bind((address, 0))
        except OSError as error:
            self._tcp.close()
            raise UsageError(f"cannot listen on {address}: {error.strerror}; give another interface=") from error
        self.address: str = address
        self.port: int = self._tcp.getsockname()[1]
        self.unix = f"syncline-{secrets.token_hex(12)}"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(f"\0{self.unix}")
        self._pool = ThreadPoolExecutor(_DIALLERS, thread_name_prefix="syncline-handshake")
        self._threads = []
        for door in (self._tcp, self._unix):
            door.listen(128)
            door.settimeout(0.2)
            thread = threading.Thread(target=self._accept, args=(door,), name="syncline-listener", daemon=True)
            thread.start()
            self._threads.append(thread)

    def take(self, peer: int, purpose: str, timeout: float) -> socket.socket | None:
        """The connection that ``peer`` opened for ``purpose``; None when it has not come within ``timeout``."""
        with self._came:
            self._came.wait_for(lambda: (peer, purpose) in self._ready, timeout)
            return self._ready.pop((peer, purpose), None)

    def close(self) -> None:
        """Close the doors and what nobody took."""
        self._closing = True
        for thread in self._threads:
            thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for sock in (self._tcp, self._unix, *self._ready.values()):
            sock.close()
        self._ready.clear()

    def _accept(self, door: socket.socket) -> None:
        while not self._closing:
            try:
                sock, whence = door.accept()
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                time.sleep(0.05)
                continue
            name = f"{whence[0]}:{whence[1]}" if isinstance(whence, tuple) else "this machine"
            try:
                self._pool.submit(self._greet, sock, name)
            except RuntimeError:  # the pool is shutting down
                sock.close()

    def _greet(self, sock: socket.socket, whence: str) -> None:
        try:
            said = self._prove(sock)
        except (HandshakeError, OSError) as error:
            log.warning("refused a connection from %s: %s", whence, error or "it said nothing")
            sock.close()
            return
        with self._came:
            if (said.source, said.purpose) in self._ready:
                log.warning("refused a connection from %s: rank %d is connected already", whence, said.source)
                sock.close()
                return
            self._ready[said.source, said.purpose] = sock
            self._came.notify_all()

    def _prove(self, sock: socket.socket) -> handshake.Hello:
        deadline = time.monotonic() + HANDSHAKE_S
        said = handshake.read_hello(read_exactly(sock, handshake.HELLO_BYTES, deadline))
        if said.run != self._run:
            raise HandshakeError("it belongs to another run")
        if said.target != self._index:
            raise HandshakeError(f"it looks for rank {said.target}, this is rank {self._index}")
        reply = handshake.answer(self._secret, said)
        sock.sendall(reply)
        handshake.check_proof(self._secret, said, reply, read_exactly(sock, handshake.MAC_BYTES, deadline))
        sock.sendall(handshake.WELCOME)
        sock.settimeout(None)
        return said


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
