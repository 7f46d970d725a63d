"""Where the processes of a run meet when their launcher has given them ranks but no address, as ``mpirun`` does.

MPI knows the way to all of them: rank 0 opens a port and tells the others over MPI, with a secret made for the run.
Without mpi4py, processes of one host meet at a port that follows from the job's name.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import socket
from dataclasses import replace

from ..errors import GroupError, UsageError
from ..wire.listener import interface_address, own_address
from .environment import Environment, derived_port


def find_meeting_place(environment: Environment, interface: str | None, timeout: float) -> Environment:
    """The environment with an address; unchanged when it has one. ``interface`` is the one that rank 0 shall use.

    Called by all processes alike. Raises UsageError when there is no way to meet, GroupError after ``timeout`` seconds.
    """
    if environment.address or environment.world == 1:
        return environment
    one_host = environment.local_world == environment.world
    if importlib.util.find_spec("mpi4py") is not None:
        return _over_mpi(environment, interface, one_host, timeout)
    if one_host and environment.run_id:
        return replace(environment, address="127.0.0.1", port=derived_port(environment.run_id))
    raise UsageError(
        f"{environment.launcher} says that this is process {environment.rank} of {environment.world}, but not where"
        " they meet: set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on all of them (mpirun -x, or"
        " -genv), or install mpi4py for the MPI library of this mpirun"
    )


def _over_mpi(environment: Environment, interface: str | None, one_host: bool, timeout: float) -> Environment:
    from ..transports.mpi import share

    told: dict[str, str | int] = {}
    listening: int | None = None
    if environment.rank == 0:
        address = interface_address(interface) if interface else "127.0.0.1" if one_host else own_address()
        listening, port = _listen(address)
        told = {"address": address, "port": port, "run": secrets.token_hex(8), "secret": secrets.token_hex(32)}
    rank, world = environment.rank, environment.world
    data = share(json.dumps(told).encode(), rank=rank, world=world, timeout_s=timeout)
    told = json.loads(data)
    return replace(
        environment,
        address=str(told["address"]),
        port=int(told["port"]),
        run_id=environment.run_id or str(told["run"]),
        store_fd=listening,
        secret=environment.secret or str(told["secret"]).encode(),
    )


def _listen(address: str) -> tuple[int, int]:
    """A listening socket, as a descriptor that the store takes over, and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family, backlog=1024) as door:
            port = int(door.getsockname()[1])
            return door.detach(), port
    except OSError as error:
        raise GroupError(f"rank 0 cannot listen on {address}: {error.strerror}; give another interface=") from error
