"""The place where a comparison's processes run: this machine, a lab, or the hosts of a launcher.

Owns the lab's lifetime, the measurement of its links before the first row, and the start of each row's processes.
``lab`` builds a lab and is imported only if one is needed; ``launchers`` has the launchers' command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from syncline.errors import SynclineError, UsageError
from syncline.launch.local import LocalRun, Output, here
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value
from syncline.strategy.strategy import Strategy

from .contenders import peer_of
from .launchers import AUTO, LOCAL, Launcher, mpi_launcher
from .messages import Mailbox, RemoteMailbox
from .report.rows import BASELINE


class LabLike(Protocol):
    """The part of ``syncline_bench.lab.Lab`` that a comparison needs: hosts joined by links of one rate."""

    def placement(self, rank: int, per_host: int = 1) -> Any:
        """The arguments with which LocalRun starts a rank inside its host."""
        ...

    def mpi_command(
        self, ranks: int, command: Sequence[str], library: str, per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """The command line of an MPI job in the lab, and the variables to add to its environment."""
        ...

    def goodput(self, seconds: float = 2.0) -> float:
        """Measure the goodput of one TCP stream between two hosts, in bytes per second."""
        ...


@dataclass(frozen=True)
class Site:
    """A place for the processes of a row, with its launcher and the speed of its links.

    ``lab`` is None outside a lab. ``rate`` is the links' rate in bits/s, ``goodput_bytes_per_s`` the measured goodput
    of one TCP stream; both are None if nothing limits the links.
    """

    lab: LabLike | None = None
    rate: Rate | None = None
    goodput_bytes_per_s: float | None = None
    launcher: Launcher = AUTO

    @property
    def name(self) -> str | None:
        """The links' rate as text for result files, such as ``1Gbit``."""
        return None if self.rate is None else write_value(self.rate, Rate)

    def launcher_of(self, strategy: str) -> Launcher:
        """The launcher for a strategy or peer. Raises SynclineError if it needs MPI and no MPI library is installed."""
        if self.launcher != AUTO:
            return self.launcher
        if not _over_mpi(strategy):
            return LOCAL
        found = mpi_launcher()
        if isinstance(found, str):
            raise SynclineError(f"transport=mpi needs the launcher of an MPI library: {found}")
        return found

    def mailbox(self, launcher: Launcher, processes: int) -> Mailbox:
        """The connections to this number of processes: over TCP if the launcher may use other hosts."""
        return Mailbox(processes) if launcher == LOCAL or self.lab is not None else RemoteMailbox(processes)

    def run(
        self,
        launcher: Launcher,
        command: Sequence[str],
        processes: int,
        *,
        servers: int = 0,
        env: Mapping[str, str],
        on_output: Output,
    ) -> LocalRun:
        """A run that has not started: of ``command`` in each process, or of the launcher that starts them."""
        if launcher == LOCAL:
            place = here if self.lab is None else self.lab.placement
            return LocalRun(command, processes, servers=servers, env=env, on_output=on_output, place=place)
        if self.lab is None:
            argv, added = launcher.command(processes, command, env)
        else:
            argv, added = self.lab.mpi_command(processes, command, launcher.kind)
        return LocalRun(argv, 1, env={**added, **env}, ranked=False, on_output=on_output)


HERE = Site()
"""This machine without a lab: shared memory and loopback at full speed."""


def check_site(launcher: Launcher, *, in_lab: bool) -> None:
    """Raise UsageError for a launcher that cannot start processes in a lab."""
    if in_lab and (launcher.kind == "srun" or (launcher.words and launcher.words != _bare(launcher))):
        raise UsageError(
            f"--lab and --launcher {launcher.text!r} exclude each other: a lab makes its own hosts. Use openmpi or"
            " mpich without arguments, or leave one of the two out"
        )


def _bare(launcher: Launcher) -> tuple[str, ...]:
    return () if launcher.settings is None else launcher.settings.launcher


@contextmanager
def site_of(hosts: int, rate: Rate | None, say: Callable[[str], None], launcher: Launcher = AUTO) -> Iterator[Site]:
    """This machine, or with a ``rate`` a lab of this number of hosts, which the end of the context removes.

    ``say`` receives a line about the finished lab. Raises UsageError if a lab cannot be made here.
    """
    if rate is None:
        yield Site(launcher=launcher)
        return
    from .lab import Lab

    with Lab(hosts=hosts, rate=rate) as lab:
        goodput = float(lab.goodput()) if hosts > 1 else None
        site = Site(lab, rate, goodput, launcher)
        if goodput is not None:
            say(f"lab: {hosts} hosts, links of {site.name}, goodput {goodput * 8 / 1e6:,.0f} Mbit/s")
        yield site


def _over_mpi(strategy: str) -> bool:
    """Whether the strategy's transport is MPI, so that an MPI launcher has to start the processes."""
    if strategy == BASELINE or peer_of(strategy) is not None:
        return False
    return str(Strategy.parse(strategy).transport.name) == "mpi"
