"""This process's way to the rendezvous of its run, start after start: the place, the secret, the connection.

Owns what differs between launchers. Rank 0 serves the meeting (``wire.meeting_sockets``) while a start takes: at the
address that all know (``env://``, ``srun``, ``syncline run``, arguments), or at one that it tells over MPI or in a
store of torch's. The port is free again afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import GroupError, HandshakeError, PeerError, SecretError, UsageError
from ..wire.handshake import run_id
from ..wire.listener import dial, open_door
from ..wire.meeting import Meeting
from ..wire.meeting_sockets import PURPOSE, MeetingClient, MeetingServer
from ..wire.reports import FAILED, blame
from .address import Told, addresses_here, find_address, hear, interface_address, tell
from .environment import Environment

log = logging.getLogger("syncline")

CONNECT_S = 30.0
"""What making the connections may take at least, however late the last process has come."""

_LATE_S = 5.0
"""How long a rank 0 that could not join goes on telling why, where no launcher ends the others: processes that are
started together come within the seconds that importing a framework takes. One that comes later finds nobody, which its
own error says."""

_ENDS_ALL = frozenset({"syncline", "torchrun", "mpirun"})
"""Launchers that end all processes when one has ended with an error: nobody else is coming."""

_KNOCK_S = 5.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True)
class Joined:
    """What a process has when it has come to the meeting: its connection, the secret, or a key in place of one."""

    client: MeetingClient
    secret: bytes
    environment: Environment


class MeetingPoint:
    """This process's way to the meetings of its run; one for all starts of a process."""

    def __init__(self, environment: Environment) -> None:
        self.asked = environment
        self._environment: Environment | None = environment if environment.address or environment.store else None
        self._kept: socket.socket | None = None  # keeps the port that MPI was told from being given to others
        self._inherited = environment.meeting_fd
        self._server: MeetingServer | None = None

    def close(self) -> None:
        """Serve no longer."""
        self._end_last()
        if self._kept is not None:
            self._kept.close()

    @contextmanager
    def join(self, run: str, secret: str | bytes | None, interface: str | None, timeout: float) -> Iterator[Joined]:
        """Come to the meeting of ``run``; an error inside the block ends the start on every rank, with its text.

        ``secret`` and ``interface`` are those of ``syncline.init``. Raises GroupError if rank 0 cannot be reached
        within ``timeout`` seconds, UsageError if there is no way to meet.
        """
        deadline = time.monotonic() + timeout
        if self._environment is None:
            self._environment, self._kept = find_address(self.asked, interface, timeout)
        environment = self._environment
        given = secret_bytes(environment.secret if secret is None else secret)
        self._end_last()
        client: MeetingClient | None = None
        try:
            if environment.rank == 0:
                client, given = self._serve(environment, run, given, interface, deadline)
            else:
                client, given = _call(environment, run, given, deadline)
            client.limit(deadline, timeout)
            key = client.enter()
            yield Joined(client, given or key, environment)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            if isinstance(error, Exception):
                _blame(environment.rank, error)
            if client is not None:
                client.give_up(type(error).__name__ if interrupted else str(error))
            if self._server is not None:
                alone = interrupted or environment.launcher in _ENDS_ALL
                self._server.close(0.0 if alone else min(_LATE_S, max(0.0, deadline - time.monotonic())))
            raise
        finally:
            if client is not None:
                client.close()
        self._end_last()

    def _serve(
        self, environment: Environment, run: str, secret: bytes, interface: str | None, deadline: float
    ) -> tuple[MeetingClient, bytes]:
        """Rank 0's part: open the doors, say where they are, and come in."""
        limit_s = max(0.0, deadline - time.monotonic())
        doors = self._open(environment, interface)
        here = doors[0].getsockname()
        key = b""
        if not secret:
            log.warning(
                "no secret is set: whoever reaches rank 0's port, or %s, can join this run. Set"
                " SYNCLINE_SECRET to the same random text on all hosts, or use init(secret=)",
                environment.store_name,
            )
            key = secrets.token_bytes(32)
        proof = secret
        if environment.agent_store and key:
            proof = key  # told in the store
        meeting = Meeting(environment.world, key, environment.where)
        server = self._server = MeetingServer(doors, run_id(run), proof, meeting, limit_s + 2 * CONNECT_S)
        try:
            where = f"{here[0]}:{here[1]}"
            client = MeetingClient(server.adopt(0, f"serving at {where}"), where, environment.world)
            if environment.agent_store:
                told = Told(str(here[0]), int(here[1]), key)
                tell(environment, run, told, limit_s)
        except BaseException:
            server.close()
            raise
        return client, secret

    def _open(self, environment: Environment, interface: str | None) -> list[socket.socket]:
        """The doors: at all that rank 0's address stands for here, and first on the interface asked for."""
        if self._inherited is not None:
            found, self._inherited = _inherited_door(self._inherited, environment.port), None
            if found is not None:
                return [found]
        port = 0 if environment.agent_store else environment.port
        if port == 0 and not environment.agent_store:
            raise UsageError("rank 0 needs a port to meet at: give address=host:port, or MASTER_PORT")
        addresses = addresses_here(environment)
        with contextlib.suppress(UsageError):  # one that there is not is told to all, at the other doors
            if interface:
                addresses = list(dict.fromkeys([interface_address(interface), *addresses]))
        doors: list[socket.socket] = []
        try:
            for address in addresses:
                try:
                    doors.append(open_door(address, port, environment.world))
                except OSError as error:
                    last = not doors and address == addresses[-1]
                    if last or error.errno != errno.EADDRNOTAVAIL:  # such an address is told to all, too
                        raise
        except OSError as error:
            for door in doors:
                door.close()
            raise GroupError(
                f"rank 0 cannot listen on port {port} of {address}: {error.strerror}. Does another run use it, or"
                " another process that says it is rank 0? Choose a free port (MASTER_PORT, or address=). If it is"
                " torch.distributed of this script, call syncline.init() first: it lets go of the port"
            ) from error
        return doors

    def _end_last(self) -> None:
        """A start is over, or the next one begins after one that has failed."""
        if self._server is not None:
            self._server.close()
            self._server.join()
            self._server = None


def _blame(rank: int, error: Exception) -> None:
    """Note for the launcher that this process has ended the start, where that is no other one's fault."""
    if isinstance(error, SecretError) or not isinstance(error, GroupError | PeerError):
        blame(rank, f"rank {rank}", f"{FAILED}{type(error).__name__}: {error}", own=True)


def secret_bytes(secret: str | bytes | None) -> bytes:
    """A secret as bytes, empty where there is none; raises UsageError for one that is given and empty."""
    if secret is None:
        return b""
    if not secret:
        raise UsageError(
            "secret= is empty, which proves nothing: give the same random text on all ranks (python -c 'import secrets;"
            " print(secrets.token_hex(32))'), or leave it out"
        )
    return os.fsencode(secret) if isinstance(secret, str) else secret


def _call(environment: Environment, run: str, secret: bytes, deadline: float) -> tuple[MeetingClient, bytes]:
    """The other ranks' part: find out where the meeting is, and knock until it opens."""
    limit_s = max(0.0, deadline - time.monotonic())
    told = Told(environment.address, environment.port)
    if environment.agent_store:
        told = hear(environment, run, limit_s)
    rank, pause = environment.rank, _PAUSE_S
    failure: HandshakeError | OSError | None = None
    while True:
        if environment.agent_store and not secret and not told.key:
            raise SecretError(_without(rank))
        left, where = deadline - time.monotonic(), f"{told.address}:{told.port}"
        try:
            at, proof = (told.address, told.port), secret or told.key
            sock = dial(at, run_id(run), proof, rank, 0, PURPOSE, max(0.1, min(_KNOCK_S, left)))
            return MeetingClient(sock, where, environment.world), secret
        except (HandshakeError, OSError) as error:
            if not isinstance(failure, SecretError):
                failure = error
                if isinstance(error, SecretError):  # it may be anybody, and gone when rank 0 comes
                    log.warning("rank %d: what answers at %s, where rank 0 should be, has another secret", rank, where)
        if time.monotonic() >= deadline:
            raise _unreachable(rank, where, bool(secret), failure, limit_s) from failure
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if environment.agent_store:  # which may have told the place of an earlier start
            before = told
            with contextlib.suppress(GroupError):
                told = hear(environment, run, max(_PAUSE_S, deadline - time.monotonic()))
            failure = failure if told == before else None


def _unreachable(
    rank: int, where: str, has_secret: bool, failure: HandshakeError | OSError, limit_s: float
) -> GroupError:
    """What ends a process that has called until its deadline."""
    if not isinstance(failure, SecretError):
        why = getattr(failure, "strerror", None) or str(failure)
        return GroupError(
            f"rank {rank} cannot reach the meeting of rank 0 at {where} within {limit_s:.0f} s: {why}; is rank 0"
            " running, and are address and port those of its machine?"
        )
    if not has_secret:
        return SecretError(_without(rank))
    return SecretError(
        f"rank {rank} has another secret than what answers at {where}, which should be rank 0: give all the same"
        " SYNCLINE_SECRET or init(secret=)"
    )


def _without(rank: int) -> str:
    return (
        f"rank {rank} has no secret, rank 0 has one: set SYNCLINE_SECRET to the same text on all hosts, or give all the"
        " same init(secret=)"
    )


def _inherited_door(fd: int, port: int) -> socket.socket | None:
    """The listening socket that the launcher opened; None where the descriptor is another one by now."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        door = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        listening = door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listening and door.family in (socket.AF_INET, socket.AF_INET6) and door.getsockname()[1] == port:
            os.close(fd)
            return door
    except OSError:
        pass
    door.close()
    return None
