"""MPI jobs in a lab: the library's launcher runs on host 0 and reaches the other hosts through ``agent``.

Owns the settings that make Open MPI and MPICH use only the lab's links. Both libraries detect ranks that share a
kernel, and would otherwise send messages between hosts through it (MPICH's UCX reads the other process's memory).
``launch.mpi_library`` has the settings that every run of a library needs.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from syncline.errors import UsageError
from syncline.launch.mpi_library import MpiLibrary, find_library

_AGENT = ("-m", "syncline_bench.lab.agent")


class Hosts(Protocol):
    """The part of a lab that an MPI job needs."""

    @property
    def interface(self) -> str:
        """The name of the hosts' network interface."""
        ...

    def host_name(self, host: int) -> str:
        """The name of a host, which all hosts can resolve."""
        ...

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        ...

    def enter(self, host: int) -> list[str]:
        """The command prefix that runs a command on a host."""
        ...

    def bind(self, host: int) -> socket.socket:
        """A TCP socket on a host, bound and not listening."""
        ...

    def environ(self) -> dict[str, str]:
        """The environment of commands in the lab."""
        ...


def mpi_command(
    lab: Hosts, ranks: int, command: Sequence[str], library: str, per_host: int
) -> tuple[list[str], dict[str, str]]:
    """The command line of a job, and the variables to add. Raises UsageError if the library is not installed."""
    found = find_library(library)
    if not isinstance(found, MpiLibrary):
        raise UsageError(f"{library} cannot run in the lab: {found}")
    used = math.ceil(ranks / per_host)
    names = [lab.host_name(host) for host in range(used)]
    build = _openmpi if found.name == "openmpi" else _mpich
    arguments, settings = build(found, names, per_host, lab.interface)
    with lab.bind(0) as free:  # no other program runs on that host, so the port stays free
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": str(port), "SYNCLINE_SECRET": secrets.token_hex(32)}
    started, usual = found.command(ranks, command)
    at = len(found.launcher)
    return [*lab.enter(0), *started[:at], *arguments, *started[at:]], {**lab.environ(), **meeting, **usual, **settings}


def _openmpi(
    library: MpiLibrary, names: Sequence[str], per_host: int, interface: str
) -> tuple[list[str], Mapping[str, str]]:
    """Open MPI's arguments and settings. The launcher is PRRTE since version 5, before it ORTE (agent variable rsh)."""
    agent = " ".join((sys.executable, *_AGENT))
    settings = {
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_prte_if_include": interface,
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_btl_tcp_if_include": interface,
        # Open MPI's own TCP: other layers would bypass the link.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp" if per_host == 1 else "self,sm,tcp",
    }
    launcher = Path(library.launcher[0])
    prefix = Path(sys.prefix)
    if launcher.is_relative_to(prefix):
        # A wheel is not in the folder that it was built for: set the prefix of its parts on the other hosts.
        settings |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(prefix))
    hosts = ",".join(f"{name}:{per_host}" for name in names)
    return ["--host", hosts, "--map-by", "slot"], settings


def _mpich(
    library: MpiLibrary,  # noqa: ARG001 - the signature of both
    names: Sequence[str],
    per_host: int,
    interface: str,
) -> tuple[list[str], Mapping[str, str]]:
    """MPICH's arguments and settings. Its launcher is Hydra; its network layer is libfabric or UCX, as built."""
    settings = {
        # As "rsh", the launcher adds no options of its own, which would precede these arguments.
        "HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(_AGENT),
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": interface,
        "UCX_TLS": "self,tcp",
        "UCX_NET_DEVICES": interface,
    }
    arguments = ["-launcher", "rsh", "-launcher-exec", sys.executable, "-iface", interface]
    return [*arguments, "-hosts", ",".join(names), "-ppn", str(per_host)], settings
