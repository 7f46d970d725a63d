"""One process's open doors while a group forms, how the others call there, and the addresses of this machine.

A TCP door on one interface only, and an abstract UNIX door for processes that share this network namespace. Who may
come in is decided in ``doors``; the doors close when the group is complete.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ..errors import GroupError, HandshakeError, SecretError, UsageError
from . import handshake
from .doors import HANDSHAKE_S, Doors, open_door, open_unix_door

PURPOSES = ("control", "data")

_CHECK_S = 0.25
"""How often ``check`` is called."""

_TRY_S = 0.1
"""What a call may take at least, however late it is."""


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
        self._world = world
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

    def take(self, peer: int, purpose: str, timeout: float) -> socket.socket | None:
        """The connection that ``peer`` opened for ``purpose``; None when it has not come within ``timeout``."""
        return self.take_some((peer,), purpose, timeout).get(peer)

    def take_some(self, peers: Collection[int], purpose: str, timeout: float) -> dict[int, socket.socket]:
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
    """Connect to a listener and prove ourselves.

    ``where`` is an address and port, or the name of an abstract UNIX socket. A name is tried at each of its addresses.
    ``check`` is called meanwhile, and ends the call when it raises. Raises OSError when nobody is there, HandshakeError
    when the other end hangs up, and SecretError when it proves to hold another secret, or none.
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
    """Read that many bytes before ``deadline`` (time.monotonic); raises HandshakeError when they do not come.

    ``check`` is called now and then.
    """
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


def addresses_towards(address: str, port: int) -> list[str]:
    """The addresses of this machine from which those of ``address`` are reached, in their order; no packet is sent."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise GroupError(f"cannot resolve the address {address!r}: {error.strerror}") from error
    addresses: dict[str, None] = {}
    failures: list[OSError] = []
    for family, kind, proto, _, end in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                addresses[_address_towards(probe, end)] = None
        except OSError as error:  # such as IPv6 where there is none
            failures.append(error)
    if not addresses:
        raise GroupError(f"no route to {address}: {failures[0].strerror}; check address= and interface=")
    return list(addresses)


def _address_towards(probe: socket.socket, end: tuple[Any, ...]) -> str:
    """The address itself where it is this machine's, else the one from which it is reached."""
    if not ipaddress.ip_address(end[0]).is_unspecified:
        with contextlib.suppress(OSError):  # the kernel calls one of its addresses from another one of them
            probe.bind((end[0], 0, *end[2:]))
            return str(end[0])
    probe.connect(end)
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
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", os.fsencode(name)[:15]))  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(entry for _, entry in socket.if_nameindex())
            raise UsageError(f"interface {name!r} has no IPv4 address ({error.strerror}); there are {known}") from error
    return socket.inet_ntoa(found[20:24])
