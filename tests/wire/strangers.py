"""Connections by hand to a door that is open: whoever knocks there, whether or not it knows the run's secret."""

from __future__ import annotations

import contextlib
import socket

from syncline.wire.handshake import run_id

LIMIT_S = 20.0
RUN = run_id("a run")
SECRET = b"known to all ranks of the run"
Where = tuple[str, int] | str


def knock(where: Where) -> socket.socket:
    """A connection to a port, or to a socket of Unix by its name."""
    if isinstance(where, tuple):
        return socket.create_connection(where, LIMIT_S)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(LIMIT_S)
    sock.connect(f"\0{where}")
    return sock


def drain(sock: socket.socket) -> bytes:
    """What the other end says until it closes; a reset counts as closing."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            found += part
    return found
