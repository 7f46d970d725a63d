"""Where the processes of a comparison run, and what starts them: on this machine as it is, in a lab, by a launcher.

Owns making and removing the lab of a comparison and measuring its link before the first row, and the start of every
row's processes. What a lab is made of is ``lab``'s matter, which is imported only where one is asked for; what a
launcher is told, ``launchers``'.
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
    """What is needed of ``syncline_bench.lab.Lab``: hosts that are joined by links of one rate."""

    def placement(self, rank: int, per_host: int = 1) -> Any:
        """What LocalRun needs to start a rank inside its host."""
        ...

    def mpi_command(
        self, ranks: int, command: Sequence[str], library: str, per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """What starts an MPI job in the lab: arguments, and additions to the environment."""
        ...

    def goodput(self, seconds: float = 2.0) -> float:
        """What one TCP stream between two hosts gets, in bytes per second."""
        ...


@dataclass(frozen=True)
class Site:
    """What rows have to know of the place: how to start there, and what its links can do.

    ``lab`` is None on this machine as it is; ``rate`` is bits/s and ``goodput_bytes_per_s`` what one stream got of it,
    both None where nothing limits the links; ``name`` is the rate as a result file shows it.
    """

    lab: LabLike | None = None
    rate: Rate | None = None
    goodput_bytes_per_s: float | None = None
    launcher: Launcher = AUTO

    @property
    def name(self) -> str | None:
        """The rate as text, such as ``1Gbit``."""
        return None if self.rate is None else write_value(self.rate, Rate)

    def launcher_of(self, strategy: str) -> Launcher:
        """What starts the processes of a strategy or peer; raises SynclineError where MPI is needed and not there."""
        if self.launcher != AUTO:
            return self.launcher
        if not _over_mpi(strategy):
            return LOCAL
        found = mpi_launcher()
        if isinstance(found, str):
            raise SynclineError(f"transport=mpi needs the launcher of an MPI library: {found}")
        return found

    def mailbox(self, launcher: Launcher, processes: int) -> Mailbox:
        """The lines to so many processes: over TCP where a launcher may start them on any host."""
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
        """The processes, not started yet: those of ``command``, or the launcher that starts them."""
        if launcher == LOCAL:
            place = here if self.lab is None else self.lab.placement
            return LocalRun(command, processes, servers=servers, env=env, on_output=on_output, place=place)
        if self.lab is None:
            argv, added = launcher.command(processes, command, env)
        else:
            argv, added = self.lab.mpi_command(processes, command, launcher.kind)
        return LocalRun(argv, 1, env={**added, **env}, ranked=False, on_output=on_output)


HERE = Site()
"""This machine as it is: shared memory and loopback, as fast as they are."""


def check_site(launcher: Launcher, *, in_lab: bool) -> None:
    """Raise UsageError for a launcher that cannot start processes in a lab."""
    if in_lab and (launcher.kind == "srun" or (launcher.words and launcher.words != _bare(launcher))):
        raise UsageError(
            f"--lab and --launcher {launcher.text!r} exclude each other: a lab's hosts are its own. Use openmpi or"
            " mpich without arguments, or leave one of the two out"
        )


def _bare(launcher: Launcher) -> tuple[str, ...]:
    return () if launcher.settings is None else launcher.settings.launcher


@contextmanager
def site_of(hosts: int, rate: Rate | None, say: Callable[[str], None], launcher: Launcher = AUTO) -> Iterator[Site]:
    """This machine, or for a ``rate`` a lab of so many hosts that lives as long as the context.

    ``say`` is told what takes its time. Raises UsageError where a lab cannot be made.
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
    """Whether processes of that strategy talk over MPI, so that its launcher has to start them."""
    if strategy == BASELINE or peer_of(strategy) is not None:
        return False
    return str(Strategy.parse(strategy).transport.name) == "mpi"
