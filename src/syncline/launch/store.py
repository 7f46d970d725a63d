"""Where the processes of a run meet: the launcher's store, the shared secret, the address to listen on."""

from __future__ import annotations

import datetime
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import GroupError, UsageError
from ..wire.listener import interface_address, local_address_towards
from ..wire.rollcall import all_left, check_failed, give_up, tell_failed
from ..wire.store import Store
from .environment import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

log = logging.getLogger("syncline")

_POLL_S = 0.01
_LATE_S = 15.0
_READ_S = 2.0
"""How long a rank 0 that could not join serves the store: for ranks that are still starting, and to be read at all."""


class TorchStore:
    """torch's TCPStore behind the three calls that the roll call needs; they raise GroupError once it is gone."""

    def __init__(self, store: TCPStore) -> None:
        self.raw = store

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        with _reported():
            self.raw.set(key, value)  # type: ignore[arg-type]  # bytes are what it keeps

    def get(self, key: str) -> bytes | None:
        """Read a value; None when nobody has written it yet."""
        with _reported():
            found: bytes | None = self.raw.get(key) if self.raw.check([key]) else None
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        with _reported():
            return int(self.raw.add(key, amount))


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupError(
            f"the store in which the processes meet is gone ({str(error).splitlines()[0]}): rank 0, or the launcher,"
            " has ended; see what it printed"
        ) from error


def open_store(environment: Environment, timeout: float) -> Store:
    """Connect to the launcher's store; rank 0 serves it where the launcher's agent does not.

    Raises GroupError when the port is taken or rank 0's machine does not answer within ``timeout`` seconds.
    """
    from torch._C._distributed_c10d import TCPStore

    serves = environment.rank == 0 and not environment.agent_store
    where = f"{environment.address}:{environment.port}"
    listening: dict[str, Any] = {}
    if serves and environment.store_fd is not None:
        listening["master_listen_fd"] = environment.store_fd
    elif serves:
        _check_free(environment.address, environment.port)
    try:
        store = TCPStore(
            environment.address,
            environment.port,
            is_master=serves,
            timeout=datetime.timedelta(seconds=timeout),
            wait_for_workers=False,
            use_libuv=not listening,
            **listening,
        )
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise GroupError(
            f"rank {environment.rank} cannot reach the store of rank 0 at {where} within {timeout:.0f} s: {reason};"
            " is rank 0 running, and are address and port those of its machine?"
        ) from error
    return TorchStore(store)


def find_secret(
    store: Store, run: str, environment: Environment, given: str | bytes | None, timeout: float = 120.0
) -> bytes:
    """The secret given, the environment's, or else a key in the store, which guards against accidents only.

    Raises GroupError when rank 0 has a secret and this rank has none, or rank 0 does not come within ``timeout``.
    """
    key = f"{run}/accident-key"
    secret = environment.secret if given is None else given
    if secret is not None:
        if environment.rank == 0:
            store.set(key, b"")  # says that there is none, to those who look for it
        return secret.encode() if isinstance(secret, str) else secret
    if environment.rank == 0:
        log.warning(
            "no secret is set: whoever reaches the store can join this run. Set SYNCLINE_SECRET to the same random"
            " text on all hosts, or use init(secret=)"
        )
        store.set(key, secrets.token_bytes(32))
    deadline = time.monotonic() + timeout
    while (found := store.get(key)) is None:
        check_failed(store, run)
        if time.monotonic() > deadline:
            raise GroupError(f"rank 0 has not come within {timeout:.0f} s; see what it printed")
        time.sleep(_POLL_S)
    if not found:
        fault = (
            f"rank {environment.rank} has no secret, rank 0 has one: set SYNCLINE_SECRET to the same text on all hosts,"
            " or give all the same init(secret=)"
        )
        tell_failed(store, run, fault)
        raise GroupError(fault)
    return found


@contextmanager
def failing_together(store: Store, run: str, environment: Environment, timeout: float) -> Iterator[None]:
    """What ends this block with an error ends it on every rank, with that error's text.

    The error is raised at once. A rank 0 that fails while others may still come, which they may for ``timeout``
    seconds, serves its store a little longer, in a thread that the end of the interpreter waits for: they would wait
    in vain for a store that is gone.
    """
    late = time.monotonic() + timeout
    try:
        yield
    except BaseException as error:
        rank, interrupted = environment.rank, not isinstance(error, Exception)
        with suppress(GroupError):  # the store may be what is gone
            give_up(store, run, rank, f"rank {rank}: {type(error).__name__ if interrupted else error}")
            serves = rank == 0 and not environment.agent_store
            if serves and not interrupted and not all_left(store, run, environment.world):
                now = time.monotonic()
                until = max(min(now + _LATE_S, late), now + _READ_S)
                threading.Thread(
                    target=_keep, args=(store, run, environment.world, until), name="syncline-store-of-failed-start"
                ).start()
        raise


def _keep(store: Store, run: str, world: int, until: float) -> None:
    with suppress(GroupError):
        while not all_left(store, run, world) and time.monotonic() < until:
            time.sleep(_POLL_S)


def listen_address(environment: Environment, interface: str | None) -> str:
    """The address of the interface asked for, or the one from which rank 0's machine is reached."""
    if interface:
        return interface_address(interface)
    return local_address_towards(environment.address, environment.port or 1)


def _check_free(address: str, port: int) -> None:
    """A clear error for a port that something else holds."""
    if port == 0:
        raise UsageError("rank 0 needs a port to meet at: give address=host:port, or MASTER_PORT")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise GroupError(
                f"rank 0 cannot listen on port {port}: {error.strerror}. Does another run use it, or another process"
                " that says it is rank 0? Choose a free port (MASTER_PORT, or address=)"
            ) from error
