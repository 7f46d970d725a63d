"""MPI jobs in a lab: the library's own launcher on host 0, which reaches the other hosts through our agent.

Owns which settings make Open MPI and MPICH use the lab's links, and nothing else: they find out which ranks share a
kernel, and would pass messages between hosts through it (MPICH's UCX reads the other process's memory). What every run
of a library needs, lab or not, is in ``launch.mpi_library``.
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
    """What of a lab is needed here."""

    @property
    def interface(self) -> str:
        """The hosts' network interface."""
        ...

    def host_name(self, host: int) -> str:
        """A host's name."""
        ...

    def address(self, host: int) -> str:
        """A host's address."""
        ...

    def enter(self, host: int) -> list[str]:
        """The arguments before a command to run it on a host."""
        ...

    def bind(self, host: int) -> socket.socket:
        """A TCP socket on a host, bound and not listening."""
        ...

    def environ(self) -> dict[str, str]:
        """What every command finds in its environment."""
        ...


def mpi_command(
    lab: Hosts, ranks: int, command: Sequence[str], library: str, per_host: int
) -> tuple[list[str], dict[str, str]]:
    """What starts the job: arguments, and what to add to the environment; raises UsageError without the library."""
    found = find_library(library)
    if not isinstance(found, MpiLibrary):
        raise UsageError(f"{library} cannot run in the lab: {found}")
    used = math.ceil(ranks / per_host)
    names = [lab.host_name(host) for host in range(used)]
    build = _openmpi if found.name == "openmpi" else _mpich
    arguments, settings = build(found, names, per_host, lab.interface)
    with lab.bind(0) as free:  # no other program runs on that host, so that the port stays free
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": str(port), "SYNCLINE_SECRET": secrets.token_hex(32)}
    started, usual = found.command(ranks, command)
    at = len(found.launcher)
    return [*lab.enter(0), *started[:at], *arguments, *started[at:]], {**lab.environ(), **meeting, **usual, **settings}


def _openmpi(
    library: MpiLibrary, names: Sequence[str], per_host: int, interface: str
) -> tuple[list[str], Mapping[str, str]]:
    """Open MPI: its launcher is PRRTE since version 5, and was ORTE, which calls the agent rsh."""
    agent = " ".join((sys.executable, *_AGENT))
    settings = {
        "PRTE_MCA_plm_ssh_agent": agent,
        "PRTE_MCA_prte_if_include": interface,
        "OMPI_MCA_plm_rsh_agent": agent,
        "OMPI_MCA_btl_tcp_if_include": interface,
        # Point-to-point over its own TCP; other layers would look for faster ways than the link.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp" if per_host == 1 else "self,sm,tcp",
    }
    launcher = Path(library.launcher[0])
    prefix = Path(sys.prefix)
    if launcher.is_relative_to(prefix):
        # A wheel is not where it was built to be: tell its parts on the other hosts.
        settings |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(prefix))
    hosts = ",".join(f"{name}:{per_host}" for name in names)
    return ["--host", hosts, "--map-by", "slot"], settings


def _mpich(
    library: MpiLibrary,  # noqa: ARG001 - the signature of both
    names: Sequence[str],
    per_host: int,
    interface: str,
) -> tuple[list[str], Mapping[str, str]]:
    """MPICH, whose launcher is Hydra; it reaches the network through libfabric or UCX, whichever it was built with."""
    settings = {
        # Called as rsh is, without options of its own: they would come before these.
        "HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(_AGENT),
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": interface,
        "UCX_TLS": "self,tcp",
        "UCX_NET_DEVICES": interface,
    }
    arguments = ["-launcher", "rsh", "-launcher-exec", sys.executable, "-iface", interface]
    return [*arguments, "-hosts", ",".join(names), "-ppn", str(per_host)], settings
