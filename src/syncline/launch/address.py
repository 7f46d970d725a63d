"""The addresses of this machine, and the address of the rendezvous if the launcher gives none.

``mpirun`` tells a process its rank but no address. Rank 0 then takes a port and broadcasts it over MPI, with a secret
made for the run. Without mpi4py, processes of one host meet at a port derived from the job's name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import secrets
import socket
from dataclasses import replace
from typing import Any

from ..errors import GroupError, UsageError
from ..wire.listener import bind_here
from .environment import Environment, derived_port


def find_address(
    environment: Environment, interface: str | None, timeout: float
) -> tuple[Environment, socket.socket | None]:
    """The environment with an address, and a socket that reserves its port while open.

    All processes call it; ``interface`` is rank 0's. Raises UsageError if the processes have no way to meet, GroupError
    after ``timeout`` seconds.
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
    return _told(environment, data), kept


def _told(environment: Environment, data: bytes) -> Environment:
    """The environment with what rank 0 tells over MPI. GroupError for anything else."""
    try:
        told = json.loads(data)
        texts = [told[name] for name in ("address", "run", "secret")]
        port = told["port"]
        if not all(isinstance(text, str) and text.isprintable() for text in texts) or type(port) is not int:
            raise ValueError
        address, run, secret = texts
        return replace(
            environment,
            address=address,
            port=port,
            run_id=environment.run_id or run,
            secret=environment.secret or secret.encode(),
        )
    except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise GroupError(
            "what rank 0 tells over MPI is no address in the format of this version: run the same version of Syncline"
            " on all hosts"
        ) from error


def listen_address(environment: Environment, interface: str | None) -> str:
    """The address of the given interface, by default of the one that leads to rank 0's machine."""
    return interface_address(interface) if interface else addresses_here(environment)[0]


def addresses_here(environment: Environment) -> list[str]:
    """This machine's addresses on the way to rank 0's address. The first can be reached from the other hosts."""
    if not environment.address:  # the store is a file, which all hosts may share
        try:
            return [own_address()]
        except GroupError:
            return ["127.0.0.1"]
    found = addresses_towards(environment.address, environment.port or 1)
    elsewhere = environment.local_world < environment.world and not _is_loopback(environment.address)
    if elsewhere and all(map(_is_loopback, found)):
        # Systems give their own name an address such as 127.0.1.1, which leads every other host to itself.
        with contextlib.suppress(GroupError):
            found.insert(0, own_address())
    return found


def _is_loopback(address: str) -> bool:
    """Whether an address or a name refers to the local host on every host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
        return found.is_loopback or found.is_unspecified
    except ValueError:
        return address == "localhost" or address.endswith(".localhost")


def addresses_towards(address: str, port: int) -> list[str]:
    """This machine's source addresses for packets to ``address``: one per resolved address, in the resolver's order.

    No packet is sent.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        why = getattr(error, "strerror", None) or error
        raise GroupError(f"cannot resolve the address {address!r:.80}: {why}") from error
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
    """The address itself if it belongs to this machine, else the address from which packets to it leave."""
    if not ipaddress.ip_address(end[0]).is_unspecified:
        with contextlib.suppress(OSError):  # the kernel may connect two of its own addresses
            probe.bind((end[0], 0, *end[2:]))
            return str(end[0])
    probe.connect(end)
    return str(probe.getsockname()[0])


def own_address() -> str:
    """An address of this machine that other hosts may reach: its name's address, else its first interface's.

    GroupError if there is none.
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
    """The address of a network interface (``eth0``), or ``name`` itself if it is an address."""
    import fcntl
    import struct

    try:
        socket.getaddrinfo(name, 0, flags=socket.AI_NUMERICHOST)
        return name
    except (OSError, UnicodeError):
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", os.fsencode(name)[:15]))  # SIOCGIFADDR
        except OSError as error:
            known = ", ".join(entry for _, entry in socket.if_nameindex())
            raise UsageError(f"interface {name!r} has no IPv4 address ({error.strerror}); there are {known}") from error
    return socket.inet_ntoa(found[20:24])
