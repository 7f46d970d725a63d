"""Where the processes of a local run are started: on this machine as it is, or somewhere within it.

Owns what the launcher has to know of a place, and no place itself but this machine.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def bind_here(address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A TCP socket on a port of this machine, by default a free one, bound and not listening.

    While it is open the port is given to nobody who asks for a free one; who names it and sets SO_REUSEADDR may listen
    on it.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_loopback(port: int) -> socket.socket:
    return bind_here(port=port)


@dataclass(frozen=True)
class Placement:
    """Where a process is started; by default on this machine as it is.

    Processes with the same ``host`` count as local to each other. ``prefix`` stands before the command and runs it
    there; it must become the command (exec), not start it, so that signals arrive. ``env`` is added to the process's
    environment. ``bind`` makes a socket like ``bind_here`` on that host, on a port of it (0 for a free one), at the
    address where the others reach it; only that of rank 0 is called.
    """

    host: str = ""
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    bind: Callable[[int], socket.socket] = _bind_loopback


def here(rank: int) -> Placement:  # noqa: ARG001 - the signature of all that place ranks
    """Every rank on this machine as it is."""
    return Placement()


Placing = Callable[[int], Placement]
"""Says where a rank is started."""
