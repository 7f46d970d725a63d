"""Forming the group: every process says who and where it is, all read it, and connections are made in pairs.

Records go through the launcher's store, signed with the run's secret; a record that is signed with another one names
the process that has a wrong secret. A process that finds a fault writes it into the store, so that all others end with
the same error at once instead of waiting for their time limit. Of each pair, the higher index dials. Process 0, which
may be the one that serves the store, leaves last.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import GroupError, HandshakeError, RollCallError
from .handshake import run_id, seal
from .listener import Listener, dial
from .store import Store

_POLL_S = 0.01
_DIAL_S = 10.0
_COMPLETE_S = 30.0
"""How long process 0 waits for the others to be through, once all have come."""


@dataclass(frozen=True)
class Member:
    """One process of the group, as it describes itself in the roll call.

    ``index`` counts workers first, then servers; ``world`` is the number of processes it believes in. ``machine`` is
    equal for processes that can reach each other's memory, ``pid_space`` for those that see each other's pids.
    ``terms`` is what all must agree on (version, strategy). ``cores`` is how many the process may use.
    """

    index: int
    world: int
    host: str
    machine: str
    pid: int
    pid_space: str
    address: str
    port: int
    unix: str
    terms: dict[str, str]
    cores: int = 1

    @property
    def where(self) -> str:
        """Host and process, for messages."""
        return f"{self.host}, pid {self.pid}"


@dataclass(frozen=True)
class Roll:
    """The group as one process sees it after the roll call."""

    index: int
    members: tuple[Member, ...]
    run: str
    secret: bytes

    @property
    def hosts(self) -> int:
        """On how many hosts the processes are: those of one can share memory."""
        return len({member.machine for member in self.members})

    @property
    def near(self) -> frozenset[int]:
        """The other processes of this process's host."""
        here = self.members[self.index].machine
        return frozenset(peer.index for peer in self.members if peer.machine == here and peer.index != self.index)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host number of every process, in order of appearance."""
        order: dict[str, int] = {}
        return tuple(order.setdefault(member.machine, len(order)) for member in self.members)

    def name(self, index: int) -> str:
        """How messages call a process."""
        return f"rank {index} ({self.members[index].where})"


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


def call_roll(store: Store, run: str, secret: bytes, me: Member, timeout: float, hint: Callable[[int], str]) -> Roll:
    """Write the own record, wait for all others, and check that all agree.

    ``hint`` tells where a rank was expected ("node 1"), for the error that names the missing. Raises RollCallError.
    """
    if store.add(f"{run}/claim/{me.index}", 1) > 1:
        other = store.get(f"{run}/member/{me.index}")
        who = f" by {_parse(other)[0].where}" if other else ""
        raise _fail(store, run, f"rank {me.index} is taken{who}; {me.where} claims it too: give every process its own")
    text = json.dumps(asdict(me), sort_keys=True)
    store.set(f"{run}/member/{me.index}", json.dumps([text, seal(secret, text.encode())]).encode())
    deadline = time.monotonic() + timeout
    members: dict[int, Member] = {}
    while len(members) < me.world:
        for index in range(me.world):
            raw = None if index in members else store.get(f"{run}/member/{index}")
            if raw is not None:
                members[index] = _admit(store, run, secret, me, raw)
        check_failed(store, run)
        if len(members) < me.world:
            if time.monotonic() > deadline:
                raise _fail(store, run, _missing(me, members, timeout, hint))
            time.sleep(_POLL_S)
    return Roll(me.index, tuple(members[index] for index in range(me.world)), run, secret)


def connect(
    store: Store, roll: Roll, listener: Listener, purpose: str, near: Collection[int], timeout: float
) -> dict[int, socket.socket]:
    """One proved connection to every other process, for one purpose; raises GroupError naming who is missing.

    Those to the processes in ``near``, which are of this host, are UNIX sockets; all ranks must choose alike.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(roll.index):
            found[peer] = _dial(roll, peer, purpose, peer in near, deadline)
        waiting = set(range(roll.index + 1, len(roll.members)))
        while waiting:
            for peer in sorted(waiting):
                sock = listener.take(peer, purpose, 0.05)
                if sock is not None:
                    found[peer] = sock
                    waiting.discard(peer)
            check_failed(store, roll.run)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(roll.name(peer) for peer in sorted(waiting))
                raise GroupError(f"no {purpose} connection within {timeout:.0f} s from {names}")
    except BaseException:
        for sock in found.values():
            sock.close()
        raise
    return found


def leave(store: Store, run: str, index: int, world: int) -> None:
    """This process is through with the store, because its group is complete.

    Process 0, with which the store may go, returns only when all others are through, or after a limit. Raises
    RollCallError when another process has found a fault.
    """
    check_failed(store, run)
    if index != 0:
        store.add(f"{run}/left", 1)
        return
    deadline = time.monotonic() + _COMPLETE_S
    while not all_left(store, run, world) and time.monotonic() < deadline:
        check_failed(store, run)
        time.sleep(_POLL_S)
    check_failed(store, run)


def give_up(store: Store, run: str, index: int, fault: str) -> None:
    """This process could not join, for a ``fault`` that all others shall read, unless one is known already."""
    tell_failed(store, run, fault)
    if index != 0:
        store.add(f"{run}/left", 1)


def all_left(store: Store, run: str, world: int) -> bool:
    """Whether no process but process 0 will ask the store for anything any more."""
    return store.add(f"{run}/left", 0) >= world - 1


def check_failed(store: Store, run: str) -> None:
    """Raise the fault that another process wrote down, if any."""
    fault = store.get(f"{run}/failed")
    if fault is not None:
        raise RollCallError(fault.decode())


def tell_failed(store: Store, run: str, fault: str) -> None:
    """Write a fault down, so that no other process waits in vain; the first one stays."""
    if store.add(f"{run}/faults", 1) == 1:
        store.set(f"{run}/failed", fault.encode())


def _dial(roll: Roll, peer: int, purpose: str, use_unix: bool, deadline: float) -> socket.socket:
    member = roll.members[peer]
    where: tuple[str, int] | str = member.unix if use_unix else (member.address, member.port)
    shown = f"{roll.name(peer)} at {'its UNIX socket' if use_unix else f'{member.address}:{member.port}'}"
    limit = min(_DIAL_S, max(0.1, deadline - time.monotonic()))
    try:
        return dial(where, run_id(roll.run), roll.secret, roll.index, peer, purpose, limit)
    except HandshakeError as error:
        raise HandshakeError(f"{shown} refused: {error}") from error
    except OSError as error:
        raise GroupError(
            f"cannot connect to {shown}: {error.strerror or error}; check that the hosts reach each other on that"
            " address, or give interface="
        ) from error


def _parse(raw: bytes) -> tuple[Member, str, str]:
    try:
        text, signature = json.loads(raw)
        return Member(**json.loads(text)), text, str(signature)
    except (ValueError, TypeError) as error:
        raise RollCallError(
            "a record in the store is not one of this version: does another program, or another version, use the same"
            " store?"
        ) from error


def _admit(store: Store, run: str, secret: bytes, me: Member, raw: bytes) -> Member:
    member, text, signature = _parse(raw)
    if signature != seal(secret, text.encode()):
        raise _fail(store, run, f"rank {member.index} ({member.where}) has another secret than rank {me.index}")
    if member.world != me.world:
        raise _fail(
            store,
            run,
            f"rank {member.index} ({member.where}) counts {member.world} processes, rank {me.index} ({me.where})"
            f" counts {me.world}: give all the same world size",
        )
    for term, mine in me.terms.items():
        if member.terms.get(term) != mine:
            raise _fail(
                store,
                run,
                f"rank {member.index} ({member.where}) has {term} {member.terms.get(term)!r}, rank {me.index}"
                f" ({me.where}) has {mine!r}: all ranks need the same",
            )
    return member


def _missing(me: Member, members: Iterable[int], timeout: float, hint: Callable[[int], str]) -> str:
    came = set(members)
    missing = [f"rank {index}{hint(index)}" for index in range(me.world) if index not in came]
    return (
        f"after {timeout:.0f} s {len(missing)} of {me.world} processes have not come: {', '.join(missing)};"
        " see what they printed, or give more time with init(timeout=)"
    )


def _fail(store: Store, run: str, fault: str) -> RollCallError:
    tell_failed(store, run, fault)
    return RollCallError(fault)
