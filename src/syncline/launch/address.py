"""Where the processes of a run meet: this machine's addresses, and how rank 0 tells the others its own.

Under ``mpirun`` ranks are known but no address: rank 0 takes a port and broadcasts it over MPI, with a secret made for
the run. Without mpi4py, processes of one host meet at a port derived from the job's name.

Where there is a store of torch's (torchrun's TCPStore, or that of a process group), rank 0 writes there where to meet,
and a key that guards against accidents. A store cannot prove who wrote a value, and its calls do not always keep a time
limit, so they run in a thread that is given up on.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import json
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import GroupError, UsageError
from ..wire.listener import bind_here
from .environment import Environment, derived_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_VALUE_BYTES = 4096

T = TypeVar("T")


def find_address(
    environment: Environment, interface: str | None, timeout: float
) -> tuple[Environment, socket.socket | None]:
    """The environment with an address, and a socket that reserves its port while open.

    All processes call it; ``interface`` is rank 0's. Raises UsageError if there is no way to meet, GroupError after
    ``timeout`` seconds.
    """
    if environment.address or environment.world == 1:
        return environment, None
    one_host = environment.local_world == environment.world
    if importlib.util.find_spec("mpi4py") is not None:
        return _over_mpi(environment, interface, one_host, timeout)
    if one_host and environment.run_id:
        return replace(environment, address="127.0.0.1", port=derived_port(environment.run_id)), None
    raise UsageError(
        f"{environment.launcher} says that this is process {environment.rank} of {environment.world}, but not where"
        " they meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on all of them (mpirun -x, or"
        " -genv), or install mpi4py for the MPI library of this mpirun"
    )


def _over_mpi(
    environment: Environment, interface: str | None, one_host: bool, timeout: float
) -> tuple[Environment, socket.socket | None]:
    from ..transports.mpi import share

    told: dict[str, str | int] = {}
    kept: socket.socket | None = None
    if environment.rank == 0:
        address = interface_address(interface) if interface else "127.0.0.1" if one_host else own_address()
        try:
            kept = bind_here(address)
        except OSError as error:
            raise GroupError(f"rank 0 cannot listen on {address}: {error.strerror}; give another interface=") from error
        told = {
            "address": address,
            "port": kept.getsockname()[1],
            "run": secrets.token_hex(8),
            "secret": secrets.token_hex(32),
        }
    rank, world = environment.rank, environment.world
    data = share(json.dumps(told).encode(), rank=rank, world=world, timeout_s=timeout)
    told = json.loads(data)
    found = replace(
        environment,
        address=str(told["address"]),
        port=int(told["port"]),
        run_id=environment.run_id or str(told["run"]),
        secret=environment.secret or str(told["secret"]).encode(),
    )
    return found, kept


@dataclass(frozen=True)
class Told:
    """Where rank 0 serves the meeting; ``key`` is empty where the run has a secret."""

    address: str
    port: int
    key: bytes = b""


def tell(environment: Environment, run: str, told: Told, limit_s: float) -> None:
    """Rank 0 writes where the processes of ``run`` meet; raises GroupError when the store does not take it."""
    value = json.dumps([told.address, told.port, told.key.hex()])
    _with_store(environment, limit_s, lambda store: store.set(_key(run), value))


def hear(environment: Environment, run: str, limit_s: float) -> Told:
    """Where the processes of ``run`` meet; raises GroupError when rank 0 has not told within ``limit_s``."""
    within = datetime.timedelta(seconds=limit_s)

    def read(store: Store) -> bytes:
        store.wait([_key(run)], within)  # another thread may use the same connection, which a get would keep
        return store.get(_key(run))

    value = bytes(_with_store(environment, limit_s, read))
    try:
        if len(value) > _VALUE_BYTES:
            raise ValueError
        address, port, key = json.loads(value)
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError
        return Told(str(address), port, bytes.fromhex(key))
    except (ValueError, TypeError) as error:
        raise GroupError(
            f"what {environment.store_name} says of the place to meet is not of this version: does another program, or"
            " another version, use the same store?"
        ) from error


def _key(run: str) -> str:
    return f"syncline/{run}/meeting"


def _with_store(environment: Environment, limit_s: float, call: Callable[[Store], T]) -> T:
    """The result of a call, which another thread makes: after ``limit_s`` nobody waits for it any more."""
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(call(environment.store or _connect(environment, limit_s)))
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
    running = "is torchrun running there, and " if environment.store is None else ""
    raise GroupError(
        f"rank {environment.rank} has not {what}{where} within {limit_s:.0f} s:"
        f" {str(answer).splitlines()[0] if str(answer) else type(answer).__name__}; {running}has rank 0 come this far?"
        " see what it printed"
    ) from answer


def _connect(environment: Environment, limit_s: float) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        environment.address,
        environment.port,
        is_master=False,
        timeout=datetime.timedelta(seconds=limit_s),
        wait_for_workers=False,
    )


def listen_address(environment: Environment, interface: str | None) -> str:
    """The address of the interface asked for, or the one from which rank 0's machine is reached."""
    return interface_address(interface) if interface else addresses_here(environment)[0]


def addresses_here(environment: Environment) -> list[str]:
    """This machine's addresses from which rank 0's is reached, and first one that the others reach."""
    if not environment.address:  # a store that is no server: a file that all hosts may have
        try:
            return [own_address()]
        except GroupError:
            return ["127.0.0.1"]
    found = addresses_towards(environment.address, environment.port or 1)
    elsewhere = environment.local_world < environment.world and not _is_loopback(environment.address)
    if elsewhere and all(map(_is_loopback, found)):
        # Systems give their own name an address such as 127.0.1.1, under which other hosts find themselves.
        with contextlib.suppress(GroupError):
            found.insert(0, own_address())
    return found


def _is_loopback(address: str) -> bool:
    """Whether an address, or a name, is each host's own wherever it is asked."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
        return found.is_loopback or found.is_unspecified
    except ValueError:
        return address == "localhost" or address.endswith(".localhost")


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
    """An address of this machine that others may reach: its name's, or its first interface's; else GroupError."""
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
