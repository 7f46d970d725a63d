"""A lab: hosts on one machine that reach only each other, over links of a chosen rate.

Owns the order of a lab's creation and removal. ``namespaces`` makes hosts, ``links`` and ``shaping`` the network,
``records`` stores the owner of each lab, and ``naming`` has names and addresses. The machine's own namespaces stay
unchanged.

The end of the context removes the lab and ends everything in it. If the owner is killed, the kernel closes the pipes
that hold the hosts, and commands that ``launch`` started end too. The next lab that starts removes any remaining
processes and the record.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial
from types import TracebackType

from syncline.errors import UsageError
from syncline.launch.local import Placement
from syncline.nouns import Rate
from syncline.wire.listener import bind_here

from . import goodput, links, mpi, records
from .links import Shape, shape
from .namespaces import Host, check_able, end_marked, run_tool, within
from .records import Record, Registry


class Lab:
    """Hosts, numbered from 0, with links of ``rate`` bits per second in each direction (None: no limit).

    The lab exists while its context is entered. ``name`` defaults to the first free one of lab0, lab1, ... Everything
    runs in the calling thread. Raises UsageError for a name in use, a rate that links cannot have, or a user or machine
    that cannot create namespaces. The creation takes some 50 ms per host.
    """

    def __init__(self, hosts: int = 4, rate: Rate | None = None, name: str | None = None) -> None:
        if not 1 <= hosts <= records.MAX_HOSTS:
            raise UsageError(f"a lab has 1 to {records.MAX_HOSTS} hosts, not {hosts}")
        self._asked = None if name is None else records.check_name(name)
        self._shape: Shape | None = None if rate is None else shape(rate)
        self._count = hosts
        self._registry = Registry()
        self._record: Record | None = None
        self._hosts: list[Host] = []
        self._switch: Host | None = None

    def __enter__(self) -> Lab:
        check_able()
        self._record = self._registry.claim(self._asked, self._count, self.rate, end_marked)
        try:
            self._make(self._record)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The name of the lab. UsageError outside the context."""
        return self._entered().name

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self._count

    @property
    def rate(self) -> Rate | None:
        """The rate in bits per second at which every host may send, and receive; None without a limit."""
        return None if self._shape is None else self._shape.rate

    @property
    def interface(self) -> str:
        """The name of every host's network interface."""
        return links.INTERFACE

    def host_name(self, host: int) -> str:
        """The name of a host, which the other hosts resolve to its address."""
        return records.host_name(self.name, self._checked(host))

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return records.address(self.name, self._checked(host))

    def enter(self, host: int) -> list[str]:
        """The command prefix that runs a command on a host, in the current working directory.

        The prefix replaces itself by the command, so signals, output and exit status are the command's own.
        """
        return self._host(host).enter()

    def bind(self, host: int, port: int = 0) -> socket.socket:
        """A TCP socket of this process, bound to a port of a host (by default a free one), not listening."""
        return within(self._host(host).pid, partial(bind_here, self.address(host), port))

    def environ(self) -> dict[str, str]:
        """The environment of commands in the lab, which names the network interface for libraries.

        The next lab may have the same host names and other links. SYNCLINE_TUNING=fresh therefore ignores measurements
        that were stored for the choice of algorithms.
        """
        return {
            "SYNCLINE_TUNING": os.environ.get("SYNCLINE_TUNING", "fresh"),
            "SYNCLINE_INTERFACE": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
        }

    def placement(self, rank: int, per_host: int = 1) -> Placement:
        """The host of a rank for ``launch.local``. Ranks fill one host after the other, ``per_host`` on each."""
        if per_host < 1:
            raise UsageError(f"a host runs at least one rank, not {per_host}")
        host = rank // per_host
        if not 0 <= host < self.hosts:
            raise UsageError(
                f"rank {rank} has no place on {self.hosts} hosts with {per_host} ranks each: make more hosts, or put"
                " more ranks on each"
            )
        return Placement(self.host_name(host), tuple(self.enter(host)), self.environ(), partial(self.bind, host))

    def mpi_command(
        self, ranks: int, command: Sequence[str], library: str = "openmpi", per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """The command line that starts ``command`` as an MPI job of the lab, and the variables to add.

        ``library`` is openmpi or mpich. Raises UsageError if it is not installed or the ranks do not fit.
        """
        self.placement(ranks - 1, per_host)  # raises if the last rank has no host
        return mpi.mpi_command(self, ranks, command, library, per_host)

    def goodput(self, seconds: float = 2.0) -> float:
        """Measure a TCP stream from host 0 to host 1 for ``seconds`` after a second of warm-up, in bytes/s."""
        if self.hosts < 2:
            raise UsageError("the goodput is measured between two hosts, and this lab has one: make it with hosts=2")
        return goodput.measure(self, seconds)

    def close(self) -> None:
        """Remove the lab and end everything in it. A second call does nothing."""
        record, self._record = self._record, None
        if record is None:
            return
        holders = [*self._hosts, *([self._switch] if self._switch else [])]
        self._hosts, self._switch = [], None
        try:
            end_marked(record.mark)
        finally:
            for holder in holders:
                holder.end()
        self._registry.release(record)

    def _make(self, record: Record) -> None:
        hosts_file = self._registry.folder(record.name) / "hosts"
        hosts_file.write_text(records.hosts_file(record.name, self._count))
        self._switch = Host(f"{record.name}-switch", record.mark, hosts_file)
        for number in range(self._count):
            self._hosts.append(Host(records.host_name(record.name, number), record.mark, hosts_file))
        pids = tuple(host.pid for host in self._hosts)
        _configure(self._switch, "ip", links.switch(pids))
        for number, host in enumerate(self._hosts):
            _configure(host, "ip", links.host(record.name, number, self._shape))
            if self._shape is not None:
                _configure(host, "tc", [self._shape.tc(links.INTERFACE)])
        if self._shape is not None:
            _configure(self._switch, "tc", [self._shape.tc(links.port_of(number)) for number in range(self._count)])
        self._record = self._registry.complete(record, pids)

    def _host(self, number: int) -> Host:
        self._entered()
        return self._hosts[self._checked(number)]

    def _checked(self, host: int) -> int:
        if not 0 <= host < self._count:
            raise UsageError(f"there is no host {host}: the lab's hosts are 0 to {self._count - 1}")
        return host

    def _entered(self) -> Record:
        if self._record is None:
            raise UsageError("a lab exists only while its context is entered: write with Lab(...) as lab")
        return self._record


def _configure(host: Host, tool: str, lines: Sequence[str]) -> None:
    run_tool(*host.enter(), tool, "-batch", "-", feed="\n".join(lines) + "\n")
