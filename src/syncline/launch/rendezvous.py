"""The rendezvous of one process: where the meeting of its run is, the secret, and the connection to it.

Owns the differences between launchers. Rank 0 serves the meeting (``wire.meeting_sockets``) while a group forms. All
processes know its address (``env://``, ``srun``, ``syncline run``, arguments), or rank 0 publishes it over MPI, or in a
store of torch (torchrun's TCPStore, or the store of a process group). The port is free again afterwards.

A store cannot prove who wrote a value, and its calls may exceed their time limits. Rank 0 therefore writes a key beside
the address, which guards against accidents, and calls of the store run in a thread that may be abandoned.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import queue
import re
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import GroupError, HandshakeError, PeerError, SecretError, UsageError
from ..wire.handshake import run_id
from ..wire.listener import dial, open_door
from ..wire.meeting import Meeting
from ..wire.meeting_sockets import PURPOSE, MeetingClient, MeetingServer
from ..wire.reports import FAILED, blame
from ..wire.tls import Credentials, credentials
from .address import addresses_here, find_address, interface_address
from .environment import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("syncline")

T = TypeVar("T")

CONNECT_S = 30.0
"""The least time for making the connections, however late the last process arrives."""

_LATE_S = 5.0
"""How long a rank 0 that could not join keeps telling the reason, if no launcher ends the other processes.

Processes that are started together arrive within the seconds that importing a framework takes. A process that arrives
later reports that nobody answers.
"""

_ENDS_ALL = frozenset({"syncline", "torchrun", "mpirun"})
"""Launchers that end all processes after one has failed: no further process arrives."""

_KNOCK_S = 5.0
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_VALUE_BYTES = 4096
_ADDRESS = re.compile(r"[0-9A-Za-z.:%_-]{1,255}")


@dataclass(frozen=True)
class Joined:
    """A process that is in the meeting: its connection, and the secret, or a key in place of a secret."""

    client: MeetingClient
    secret: bytes
    environment: Environment
    tls: Credentials | None = None


@dataclass(frozen=True)
class MeetingAddress:
    """Where rank 0 serves the meeting. ``key`` is empty if the run has a secret."""

    address: str
    port: int
    key: bytes = b""


class Rendezvous:
    """This process's way to the meetings of its run. One object serves all groups that the process joins in turn.

    ``check`` is called in every wait for other processes; it raises to end the wait.
    """

    def __init__(self, environment: Environment, check: Callable[[], None] | None = None) -> None:
        self.asked, self._check = environment, check
        self._environment: Environment | None = environment if environment.address or environment.store else None
        self._kept: socket.socket | None = None  # reserves the port that rank 0 has published over MPI
        self._inherited = environment.meeting_fd
        self._server: MeetingServer | None = None

    def close(self) -> None:
        """Stop serving."""
        self._end_last()
        if self._kept is not None:
            self._kept.close()

    @contextmanager
    def join(
        self, run: str, secret: str | bytes | None, interface: str | None, timeout: float, tls: str | None = None
    ) -> Iterator[Joined]:
        """Join the meeting of ``run``. An error inside the block ends the start on every rank, with its text.

        ``secret``, ``interface`` and ``tls`` are those of ``syncline.init``. Raises GroupError if rank 0 cannot be
        reached within ``timeout`` seconds, UsageError if there is no way to meet.
        """
        deadline = time.monotonic() + timeout
        if self._environment is None:
            self._environment, self._kept = find_address(self.asked, interface, timeout)
        environment = self._environment
        given = secret_bytes(environment.secret if secret is None else secret)
        self._end_last()
        client: MeetingClient | None = None
        try:
            sealing = credentials(tls, given, run_id(run), environment.rank)
            if environment.rank == 0:
                client = self._serve(environment, run, given, interface, deadline, sealing)
            else:
                client = _call(environment, run, given, deadline, sealing, self._check)
            client.limit(deadline, timeout)
            if self._check is not None:
                client.look_after(self._check)
            key = client.enter()
            yield Joined(client, given or key, environment, sealing)
        except BaseException as error:
            interrupted = not isinstance(error, Exception)
            if not interrupted and (isinstance(error, SecretError) or not isinstance(error, GroupError | PeerError)):
                # This process has ended the start, not another one.
                rank, reason = environment.rank, f"{FAILED}{type(error).__name__}: {error}"
                blame(rank, f"rank {rank}", reason, own=True)
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
        self,
        environment: Environment,
        run: str,
        secret: bytes,
        interface: str | None,
        deadline: float,
        tls: Credentials | None,
    ) -> MeetingClient:
        """Rank 0: open the doors, publish their address, and enter."""
        limit_s = max(0.0, deadline - time.monotonic())
        doors = self._open(environment, interface)
        address, port = doors[0].getsockname()[:2]
        key = b""
        if not secret:
            log.warning(
                "no secret is set: whoever reaches rank 0's port, or %s, can join this run. Set"
                " SYNCLINE_SECRET to the same random text on all hosts, or use init(secret=)",
                environment.store_name,
            )
            key = secrets.token_bytes(32)
        proof = secret or (key if environment.agent_store else b"")  # all processes find the key in the store
        meeting = Meeting(environment.world, key, environment.where)
        server = self._server = MeetingServer(doors, run_id(run), proof, meeting, limit_s + 2 * CONNECT_S, tls)
        try:
            where = f"{address}:{port}"
            client = MeetingClient(server.adopt(0, f"serving at {where}"), where, environment.world)
            if environment.agent_store:
                publish(environment, run, MeetingAddress(str(address), int(port), key), limit_s)
        except BaseException:
            server.close()
            raise
        return client

    def _open(self, environment: Environment, interface: str | None) -> list[socket.socket]:
        """The doors, at all local addresses for rank 0's address; the address of the given interface is first."""
        if self._inherited is not None:
            found, self._inherited = _inherited_door(self._inherited, environment.port), None
            if found is not None:
                return [found]
        port = 0 if environment.agent_store else environment.port
        if port == 0 and not environment.agent_store:
            raise UsageError("rank 0 needs a port to meet at: give address=host:port, or MASTER_PORT")
        addresses = addresses_here(environment)
        with contextlib.suppress(UsageError):  # all ranks learn of a missing interface at the other doors
            if interface:
                addresses = list(dict.fromkeys([interface_address(interface), *addresses]))
        doors: list[socket.socket] = []
        try:
            for address in addresses:
                try:
                    doors.append(open_door(address, port, environment.world))
                except OSError as error:
                    last = not doors and address == addresses[-1]
                    if last or error.errno != errno.EADDRNOTAVAIL:  # all ranks learn of such an address, too
                        raise
        except OSError as error:
            for door in doors:
                door.close()
            raise GroupError(
                f"rank 0 cannot listen on port {port} of {address}: {error.strerror}. Does another run use it, or"
                " another process that says it is rank 0? Choose a free port (MASTER_PORT, or address=). If it is"
                " torch.distributed of this script, call syncline.init() first: it releases the port"
            ) from error
        return doors

    def _end_last(self) -> None:
        """End the server of a group that has formed, or has failed to form."""
        if self._server is not None:
            self._server.close()
            self._server.join()
            self._server = None


def secret_bytes(secret: str | bytes | None) -> bytes:
    """A secret as bytes, which are empty for None. Raises UsageError for an empty secret."""
    if secret is None:
        return b""
    if not secret:
        raise UsageError(
            "secret= is empty, which proves nothing: give the same random text on all ranks (python -c 'import secrets;"
            " print(secrets.token_hex(32))'), or leave it out"
        )
    return os.fsencode(secret) if isinstance(secret, str) else secret


def _call(
    environment: Environment,
    run: str,
    secret: bytes,
    deadline: float,
    tls: Credentials | None,
    check: Callable[[], None] | None,
) -> MeetingClient:
    """The other ranks: find the meeting's address, and connect as soon as rank 0 serves it."""
    limit_s = max(0.0, deadline - time.monotonic())
    at = MeetingAddress(environment.address, environment.port)
    if environment.agent_store:
        at = look_up(environment, run, limit_s)
    rank, pause = environment.rank, _PAUSE_S
    failure: HandshakeError | OSError | None = None
    while True:
        if environment.agent_store and not secret and not at.key:
            raise SecretError(_without(rank))
        left, where = deadline - time.monotonic(), f"{at.address}:{at.port}"
        try:
            proof, within_s = secret or at.key, max(0.1, min(_KNOCK_S, left))
            sock = dial((at.address, at.port), run_id(run), proof, rank, 0, PURPOSE, within_s, tls=tls)
            return MeetingClient(sock, where, environment.world)
        except (HandshakeError, OSError) as error:
            if not isinstance(failure, SecretError):
                failure = error
                if isinstance(error, SecretError):  # a stranger may hold the port until rank 0 starts
                    log.warning("rank %d: the process at %s, where rank 0 should be, has another secret", rank, where)
        if time.monotonic() >= deadline:
            raise _unreachable(rank, where, bool(secret), failure, limit_s) from failure
        if check is not None:
            check()
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if environment.agent_store:  # its value may be from an earlier start
            before = at
            with contextlib.suppress(GroupError):
                at = look_up(environment, run, max(_PAUSE_S, deadline - time.monotonic()))
            failure = failure if at == before else None


def _unreachable(
    rank: int, where: str, has_secret: bool, failure: HandshakeError | OSError, limit_s: float
) -> GroupError:
    """The error of a process that has called until its deadline."""
    if not isinstance(failure, SecretError):
        why = getattr(failure, "strerror", None) or str(failure)
        return GroupError(
            f"rank {rank} cannot reach the meeting of rank 0 at {where} within {limit_s:.0f} s: {why}; is rank 0"
            " running, and are address and port right?"
        )
    if not has_secret:
        return SecretError(_without(rank))
    return SecretError(
        f"rank {rank} has another secret than the process at {where}, which should be rank 0: give all ranks the same"
        " SYNCLINE_SECRET or init(secret=)"
    )


def _without(rank: int) -> str:
    return (
        f"rank {rank} has no secret, but rank 0 has one: set SYNCLINE_SECRET to the same text on all hosts, or give"
        " all ranks the same init(secret=)"
    )


def _inherited_door(fd: int, port: int) -> socket.socket | None:
    """The listening socket that the launcher opened. None if the descriptor is another file by now."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        door = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with contextlib.suppress(OSError):
        listening = door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listening and door.family in (socket.AF_INET, socket.AF_INET6) and door.getsockname()[1] == port:
            os.close(fd)
            return door
    door.close()
    return None


def publish(environment: Environment, run: str, at: MeetingAddress, limit_s: float) -> None:
    """Write the address of the meeting of ``run`` to torch's store. GroupError if the store does not take it."""
    value = json.dumps([at.address, at.port, at.key.hex()])
    _with_store(environment, limit_s, lambda store: store.set(_key(run), value))


def look_up(environment: Environment, run: str, limit_s: float) -> MeetingAddress:
    """Read the address of the meeting of ``run``. GroupError if rank 0 has not written it within ``limit_s``."""
    within = datetime.timedelta(seconds=limit_s)

    def read(store: Store) -> bytes:
        store.wait([_key(run)], within)  # a waiting get would block other threads that use the same connection
        return store.get(_key(run))

    value = bytes(_with_store(environment, limit_s, read))
    try:
        if len(value) > _VALUE_BYTES:
            raise ValueError
        address, port, key = json.loads(value)
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ValueError
        return MeetingAddress(address, port, bytes.fromhex(key))
    except (ValueError, TypeError, RecursionError) as error:
        raise GroupError(
            f"the meeting's address in {environment.store_name} is not in the format of this version: does another"
            " program, or another version, use the same store?"
        ) from error


def _key(run: str) -> str:
    return f"syncline/{run}/meeting"


def _with_store(environment: Environment, limit_s: float, call: Callable[[Store], T]) -> T:
    """The result of a call that another thread makes. After ``limit_s`` that thread is abandoned."""
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(call(environment.store or _torchruns_store(environment, limit_s)))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, name="syncline-agent-store", daemon=True).start()
    where = f", at {environment.address}:{environment.port}," if environment.address else ""
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        answer = TimeoutError("no answer")
    if not isinstance(answer, Exception):
        return answer
    name = environment.store_name
    place = "there" if environment.store is None else f"in {name}"
    what = f"told {name} where to meet" if environment.rank == 0 else f"heard {place} where rank 0 is"
    running, apart = "", ""
    if environment.store is None:
        running = "is torchrun running there, and "
        apart = "; where nodes join or leave, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun"
    raise GroupError(
        f"rank {environment.rank} has not {what}{where} within {limit_s:.0f} s:"
        f" {str(answer).splitlines()[0] if str(answer) else type(answer).__name__}; {running}has rank 0 come this far?"
        f" see what it printed{apart}"
    ) from answer


def _torchruns_store(environment: Environment, limit_s: float) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        environment.address,
        environment.port,
        is_master=False,
        timeout=datetime.timedelta(seconds=limit_s),
        wait_for_workers=False,
    )
