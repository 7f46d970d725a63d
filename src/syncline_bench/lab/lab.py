"""A lab: hosts on one machine that reach each other over links of a chosen rate, and nobody else.

Owns the order in which a lab is made and taken down. What it consists of is in the other files: ``namespaces`` (hosts),
``links`` and ``shaping`` (the network), ``records`` (who owns which lab), ``naming``. Nothing is made in the machine's
own namespaces.

What happens when: leaving the context takes the lab down, with everything that still runs in it. When the owner is
killed, the kernel closes the pipes that keep the hosts; commands started by ``launch`` die with it too. What has
escaped that, and the lab's record, is removed by the next lab that starts.
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

from . import goodput, links, mpi, naming
from .namespaces import Host, check_able, end_marked, run_tool, within
from .records import Record, Registry
from .shaping import Shape, shape


class Lab:
    """Hosts with links of ``rate`` bits per second each way (None: unshaped): a context, made on entry, gone on exit.

    Hosts are numbered from 0. ``name`` defaults to the first free one of lab0, lab1, ... Everything runs in the thread
    that calls. Raises UsageError for a name in use, a rate that links cannot have, or a user or machine that cannot
    make namespaces. Making one takes some 50 ms per host.
    """

    def __init__(self, hosts: int = 4, rate: Rate | None = None, name: str | None = None) -> None:
        if not 1 <= hosts <= naming.MAX_HOSTS:
            raise UsageError(f"a lab has 1 to {naming.MAX_HOSTS} hosts, not {hosts}")
        self._asked = None if name is None else naming.check_name(name)
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
        """What the lab is called."""
        return self._entered().name

    @property
    def hosts(self) -> int:
        """How many hosts it has."""
        return self._count

    @property
    def rate(self) -> Rate | None:
        """What every host may send, and receive, in bits per second on the wire; None when unshaped."""
        return None if self._shape is None else self._shape.rate

    @property
    def interface(self) -> str:
        """The name of every host's network interface."""
        return links.INTERFACE

    def host_name(self, host: int) -> str:
        """The name of a host, which the other hosts resolve to its address."""
        return naming.host_name(self.name, self._checked(host))

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return naming.address(self.name, self._checked(host))

    def enter(self, host: int) -> list[str]:
        """The arguments that stand before a command to run it on a host, in the current working directory.

        They replace themselves by the command, so that its signals, output and status are those of the process.
        """
        return self._host(host).enter()

    def bind(self, host: int, port: int = 0) -> socket.socket:
        """A TCP socket of this process on a port of a host, by default a free one, bound and not listening."""
        return within(self._host(host).pid, partial(bind_here, self.address(host), port))

    def environ(self) -> dict[str, str]:
        """What commands in the lab find in their environment: the interface that libraries are to use.

        Names and namespaces of hosts come again in the next lab, whose links may be others: what was measured to choose
        algorithms in this one is not to be used there.
        """
        return {
            "SYNCLINE_TUNING": os.environ.get("SYNCLINE_TUNING", "fresh"),
            "SYNCLINE_INTERFACE": self.interface,
            "GLOO_SOCKET_IFNAME": self.interface,
            "NCCL_SOCKET_IFNAME": self.interface,
        }

    def placement(self, rank: int, per_host: int = 1) -> Placement:
        """Where ``launch.local`` starts a rank: ranks fill one host after the other, ``per_host`` on each."""
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
        """What starts ``command`` as an MPI job of the lab: arguments, and what to add to the environment.

        ``library`` is openmpi or mpich. Raises UsageError when it is not installed or the ranks do not fit.
        """
        self.placement(ranks - 1, per_host)  # the last one has a place
        return mpi.mpi_command(self, ranks, command, library, per_host)

    def goodput(self, seconds: float = 2.0) -> float:
        """The bytes per second that one TCP stream gets from host 0 to host 1, measured for so long (and a second)."""
        if self.hosts < 2:
            raise UsageError("the goodput is measured between two hosts, this lab has one")
        return goodput.measure(self, seconds)

    def close(self) -> None:
        """Take the lab down and end everything in it; a second call does nothing."""
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
        hosts_file.write_text(naming.hosts_file(record.name, self._count))
        self._switch = Host(f"{record.name}-switch", record.mark, hosts_file)
        for number in range(self._count):
            self._hosts.append(Host(naming.host_name(record.name, number), record.mark, hosts_file))
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
            raise UsageError("the lab is made when its context is entered: with Lab(...) as lab")
        return self._record


def _configure(host: Host, tool: str, lines: Sequence[str]) -> None:
    run_tool(*host.enter(), tool, "-batch", "-", feed="\n".join(lines) + "\n")
