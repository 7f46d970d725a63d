"""Where rank 0 is when the launcher has given ranks but no address, as ``mpirun`` does.

MPI knows the way to all of them: rank 0 takes a port and tells the others over MPI, with a secret made for the run.
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
from .placement import bind_here


def find_address(
    environment: Environment, interface: str | None, timeout: float
) -> tuple[Environment, socket.socket | None]:
    """The environment with an address, and what keeps its port, for as long as it is open, from being given to others.

    Called by all processes alike; ``interface`` is the one that rank 0 shall use. Raises UsageError when there is no
    way to meet, GroupError after ``timeout`` seconds.
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
        kept = _keep_port(address)
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


def _keep_port(address: str) -> socket.socket:
    """A socket bound to a free port, on which only who names it may listen."""
    try:
        return bind_here(address)
    except OSError as error:
        raise GroupError(f"rank 0 cannot listen on {address}: {error.strerror}; give another interface=") from error
