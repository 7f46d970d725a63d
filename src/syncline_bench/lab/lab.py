"""A lab: hosts on one machine that reach only each other, over links of a chosen rate.

Owns the order of a lab's creation and removal, the measurement of its goodput, and the start of MPI jobs in it.
``namespaces`` makes hosts, ``links`` the network, and ``records`` stores the owner of each lab and has names and
addresses. The machine's own namespaces stay unchanged.

The end of the context removes the lab and ends everything in it, and SIGTERM and SIGHUP end the context. If the owner
is killed, the kernel closes the pipes that hold the hosts, and commands that ``launch`` started end too. The next lab
that starts removes any remaining processes and the record.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, TracebackType

from syncline.errors import SynclineError, UsageError
from syncline.launch.local import Placement
from syncline.launch.mpi_library import MpiLibrary, find_library
from syncline.nouns import Rate
from syncline.wire.listener import bind_here

from . import links, records
from .links import Shape, shape
from .namespaces import Host, check_able, end_marked, run_tool, within
from .records import Record, Registry

_AGENT = ("-m", "syncline_bench.lab.agent")
_SKIP_S = 1.0
_MARGIN_S = 20.0
_BLOCK_BYTES = 1 << 18
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        self._signals = contextlib.ExitStack()
        self._ignore_signals: Callable[[], None] = lambda: None

    def __enter__(self) -> Lab:
        check_able()
        self._ignore_signals = self._signals.enter_context(_ended_by_signals())
        try:
            self._record = self._registry.claim(self._asked, self._count, self.rate, end_marked)
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
        self, ranks: int, command: Sequence[str], library: str | MpiLibrary = "openmpi", per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """The command line that starts ``command`` as an MPI job of the lab, and the variables to add.

        ``library`` is a found library, or its name. Raises UsageError if it is not installed or the ranks do not fit.
        """
        self.placement(ranks - 1, per_host)  # raises if the last rank has no host
        found = find_library(library) if isinstance(library, str) else library
        if not isinstance(found, MpiLibrary):
            raise UsageError(f"{library} cannot run in the lab: {found}")
        if found.name == "intelmpi":
            raise UsageError("Intel MPI does not run in a lab, whose agent its launcher refuses: use openmpi or mpich")
        names = [self.host_name(host) for host in range(math.ceil(ranks / per_host))]
        build = _openmpi if found.name == "openmpi" else _mpich
        arguments, settings = build(found, names, per_host, self.interface)
        with self.bind(0) as free:  # no other program runs on that host, so the port stays free
            port = free.getsockname()[1]
        meeting = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(port), "SYNCLINE_SECRET": secrets.token_hex(32)}
        started, usual = found.command(ranks, command)
        at = len(found.launcher)
        argv = [*self.enter(0), *started[:at], *arguments, *started[at:]]
        return argv, {**self.environ(), **meeting, **usual, **settings}

    def goodput(self, seconds: float = 2.0) -> float:
        """Measure a TCP stream from host 0 to host 1 for ``seconds`` after a second of warm-up, in bytes/s."""
        if self.hosts < 2:
            raise UsageError("the goodput is measured between two hosts, and this lab has one: make it with hosts=2")
        return goodput(self, seconds)

    def close(self) -> None:
        """Remove the lab and end everything in it. A second call does nothing."""
        with self._signals:
            self._ignore_signals()
            self._remove()
            self._ignore_signals = lambda: None

    def _remove(self) -> None:
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


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[Callable[[], None]]:
    """Let SIGTERM and SIGHUP raise an exception in the context, as Ctrl-C does, so that the lab is removed.

    Yields a function that ignores these signals from then on, so that they cannot interrupt the removal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        sys.exit(128 + number)

    def ignore() -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _configure(host: Host, tool: str, lines: Sequence[str]) -> None:
    run_tool(*host.enter(), tool, "-batch", "-", feed="\n".join(lines) + "\n")


# The goodput of one TCP stream. iperf3 measures if it is installed, because others can check its figure; else a stream
# between two threads does. Both exclude the first second, in which TCP finds the rate.


def goodput(lab: Lab, seconds: float) -> float:
    """Measure the goodput of one stream from host 0 to host 1, in bytes per second."""
    return _iperf3(lab, seconds) if shutil.which("iperf3") else stream(lab, seconds)


def _iperf3(lab: Lab, seconds: float) -> float:
    # iperf3 accepts whole seconds only.
    span = str(max(1, round(seconds)))
    with lab.bind(1) as reserved:
        port = str(reserved.getsockname()[1])
    where = ["-B", lab.address(1), "-p", port]
    server = subprocess.Popen(
        [*lab.enter(1), "iperf3", "--server", "--one-off", "--forceflush", *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        _wait_until_listening(server)
        client = [*lab.enter(0), "iperf3", "--client", lab.address(1), "-p", port, "--json"]
        client += ["--time", span, "--omit", str(round(_SKIP_S))]
        try:
            done = subprocess.run(client, capture_output=True, text=True, timeout=seconds + _MARGIN_S, check=False)
            found = json.loads(done.stdout)
            return float(found["end"]["sum_received"]["bits_per_second"]) / 8
        except subprocess.TimeoutExpired:
            raise SynclineError(
                f"iperf3 between two hosts of the lab did not end within {seconds + _MARGIN_S:.0f} s: see whether the"
                " machine is overloaded, or remove iperf3 to measure without it"
            ) from None
        except (ValueError, KeyError):
            raise SynclineError(f"iperf3 failed: {(done.stdout + done.stderr).strip()}") from None
    finally:
        server.kill()
        server.communicate()


def _wait_until_listening(server: subprocess.Popen[str]) -> None:
    """Wait until the server listens. If it has ended instead, its output closes, and the client reports the failure."""
    watch = threading.Timer(_MARGIN_S, server.kill)
    watch.start()
    try:
        for line in server.stdout or ():
            if "listening" in line:
                return
    finally:
        watch.cancel()


def stream(lab: Lab, seconds: float) -> float:
    """Measure with a stream between two threads of this process. Returns the receiver's bytes per second."""
    with lab.bind(1) as listener, lab.bind(0) as sender:
        listener.listen(1)
        listener.settimeout(_MARGIN_S)
        sender.settimeout(_MARGIN_S)
        sender.connect(listener.getsockname())
        receiver, _ = listener.accept()
        receiver.settimeout(_MARGIN_S)
        with receiver:
            thread = threading.Thread(target=fill, args=(sender,), name="syncline-lab-stream", daemon=True)
            thread.start()
            try:
                arrival_rate(receiver, _SKIP_S)
                return arrival_rate(receiver, seconds)
            finally:
                receiver.close()
                with contextlib.suppress(OSError):  # the closed receiver may have ended the connection already
                    sender.shutdown(socket.SHUT_RDWR)
                thread.join(_MARGIN_S)


def fill(sock: socket.socket) -> None:
    """Send until the other end closes the connection, or takes nothing for as long as the socket's time limit."""
    block = bytes(_BLOCK_BYTES)
    try:
        while True:
            sock.sendall(block)
    except OSError:  # the receiver closes the connection after the measurement
        return


def arrival_rate(sock: socket.socket, seconds: float) -> float:
    """Measure the bytes per second that arrive, including unread ones, because a busy machine may read late."""
    block = bytearray(_BLOCK_BYTES)
    count = -_lying(sock)
    start = now = time.monotonic()
    while now - start < seconds:
        received = sock.recv_into(block)
        if not received:
            raise SynclineError("the stream that measures a link ended early: see whether its sender was interrupted")
        count += received
        now = time.monotonic()
    return (count + _lying(sock)) / (now - start)


def _lying(sock: socket.socket) -> int:
    """The number of bytes that have arrived but are not yet read."""
    found = bytearray(4)
    fcntl.ioctl(sock, termios.FIONREAD, found)
    return int.from_bytes(found, sys.byteorder)


# MPI jobs: the library's launcher runs on host 0 and reaches the other hosts through ``agent``. These settings make
# Open MPI and MPICH use only the lab's links. Both libraries detect ranks that share a kernel, and would otherwise send
# messages between hosts through it (MPICH's UCX reads the other process's memory). ``launch.mpi_library`` has the
# settings that every run of a library needs.


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
    if library.root:
        # A wheel is not in the folder that it was built for: set the prefix of its parts on the other hosts.
        settings |= dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), library.root)
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
