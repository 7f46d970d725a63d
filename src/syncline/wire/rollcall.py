"""Forming the group: what a process says of itself, and the connections that are made in pairs.

Processes meet (``meeting``), so that all know all, and a fault of one ends the start of all with the same text. Then of
each pair the higher index dials.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import GroupError, HandshakeError, SecretError
from .handshake import run_id
from .listener import Listener, dial
from .member import Member, Roll

_DIAL_S = 10.0
_LOOK_S = 0.05
_AGAIN_S = 0.05
_WORD_S = 2.0
"""How long the meeting may take to say who has failed, where a peer has heard of it before."""

_CROWDED = HandshakeError, BlockingIOError, ConnectionResetError, BrokenPipeError
"""How a call ends at a peer whose doors a crowd is at, of whatever strangers: a UNIX socket whose queue is full takes
nobody, and of unfinished handshakes the peer lets the oldest go."""

Check = Callable[[], None]
"""Raises when another process has found a fault."""


def describe_self(index: int, world: int, listener: Listener, terms: dict[str, str]) -> Member:
    """This process's own record."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network, pids = (Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "pid"))
    return Member(
        index,
        world,
        socket.gethostname(),
        f"{boot} {network}",
        os.getpid(),
        f"{boot} {pids}",
        listener.address,
        listener.port,
        listener.unix,
        terms,
        len(os.sched_getaffinity(0)),
    )


def connect(
    roll: Roll, listener: Listener, purpose: str, near: Collection[int], deadline: float, check: Check
) -> dict[int, socket.socket]:
    """One proved connection to every other process, for one purpose; raises GroupError naming who is missing.

    Those to the processes in ``near``, which are of this host, are UNIX sockets; all ranks must choose alike.
    ``deadline`` is a time of time.monotonic.
    """
    begun = time.monotonic()
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(roll.index):
            found[peer] = _dial(roll, peer, purpose, peer in near, deadline, check)
        waiting = set(range(roll.index + 1, len(roll.members)))
        while waiting:
            found |= listener.take_some(waiting, purpose, _LOOK_S)
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


def _dial(roll: Roll, peer: int, purpose: str, use_unix: bool, deadline: float, check: Check) -> socket.socket:
    member = roll.members[peer]
    where: tuple[str, int] | str = member.unix if use_unix else (member.address, member.port)
    shown = f"{roll.name(peer)} at {'its UNIX socket' if use_unix else f'{member.address}:{member.port}'}"
    try:
        while True:
            try:
                left = max(0.1, min(_DIAL_S, deadline - time.monotonic()))
                return dial(where, run_id(roll.run), roll.secret, roll.index, peer, purpose, left, check)
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


def _hear_why(check: Check, limit_s: float) -> None:
    """Wait a while for the news of a process that has failed: who has closed its doors may have heard them before."""
    deadline = time.monotonic() + limit_s
    check()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        check()
