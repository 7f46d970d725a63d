"""Where a comparison's processes run, and what starts them: this machine, a lab, or the hosts of a launcher.

Owns the values of ``--launcher`` (this process itself, an MPI library's launcher, or Slurm's ``srun``), the command
line with which a launcher starts a number of processes, the lab's lifetime, and the measurement of its links before the
first row. ``lab`` builds a lab and is imported only if one is needed. The processes find their rank by
``launch.environment`` and report by ``messages``. Open MPI passes only named variables (``-x``) on to other hosts;
MPICH and Slurm pass all of them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from syncline.errors import SynclineError, UsageError
from syncline.launch.local import LocalRun, Output, here
from syncline.launch.mpi_library import LIBRARIES, MpiLibrary, find_library
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value
from syncline.strategy.strategy import Strategy

from .contenders import peer_of
from .messages import Mailbox, RemoteMailbox
from .report.comparison import BASELINE

if TYPE_CHECKING:
    from .lab.lab import Lab

_MPI = ("mpirun", "mpiexec", "prterun", "orterun")
_ASK_S = 20.0
_COUNTS = ("-n", "-np", "--n", "--np", "--ntasks")
_OPENMPI_NAMES = ("Open MPI", "OpenRTE", "PRRTE", "prterun")
_LIBRARIES_READ = ("GLOO_", "NCCL_", "UCX_", "MPI4PY_", "MKL_", "OPENBLAS_", "JAX_", "XLA_FLAGS", "TF_", "KERAS_")
_PASSED_ON = ("SYNCLINE_", *_LIBRARIES_READ, "OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
_SRUN = ("--export=ALL", "--kill-on-bad-exit=1", "--input=none")
"""Defaults that precede the user's arguments, which may override them. Whatever a job script has set, srun passes
variables on, ends all processes if one fails, and reads no input."""

Kind = Literal["auto", "local", "openmpi", "mpich", "srun"]


@dataclass(frozen=True)
class Launcher:
    """Starts processes. ``text`` is the user's request; ``words`` are a launcher and the user's arguments for it.

    ``auto`` is this process, or an MPI library's launcher for strategies over MPI. ``settings`` is the MPI library
    whose settings the processes get; None for a launcher that the user named by its path.
    """

    text: str
    kind: Kind
    words: tuple[str, ...] = ()
    settings: MpiLibrary | None = None

    @property
    def name(self) -> str:
        """The name for error texts."""
        return Path(self.words[0]).name if self.words else self.text

    def command(
        self, processes: int, command: Sequence[str], env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """The command line that starts ``command`` in each process, and the variables to add, including ``env``."""
        if self.kind == "srun":
            launcher, *given = self.words
            return [launcher, *_SRUN, *given, "--ntasks", str(processes), *command], dict(env)
        crowded = processes > len(os.sched_getaffinity(0))
        added = {**({} if self.settings is None else self.settings.settings(crowded)), **env}
        named: list[str] = []
        if self.kind == "openmpi":
            names = {*added, *(name for name in os.environ if name.startswith(_PASSED_ON)), "OMP_NUM_THREADS"}
            named = [word for name in sorted(names) if not name.startswith(("OMPI_", "PRTE_")) for word in ("-x", name)]
        return [*self.words, *named, "-n", str(processes), *command], added


AUTO, LOCAL = Launcher("auto", "auto"), Launcher("local", "local")


def read_launcher(text: str) -> Launcher:
    """The launcher that a text names. Raises UsageError if the name is unknown or the launcher is not installed.

    ``auto``, ``local`` and the names of MPI libraries stand alone or before arguments of that launcher; ``mpirun``,
    ``mpiexec`` and ``srun`` may be paths.
    """
    text = text.strip()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--launcher {text!r} cannot be read: {error}") from None
    if not words:
        raise UsageError(f"--launcher is empty: {_CHOICES}")
    head, *given = words
    base = Path(head).name
    if head in ("auto", "local"):
        if given:
            raise UsageError(f"--launcher {head} takes no arguments, got {shlex.join(given)}")
        return AUTO if head == "auto" else LOCAL
    if head not in LIBRARIES and base != "srun" and not base.startswith(_MPI):
        raise UsageError(f"--launcher {head!r} is unknown: {_CHOICES}")
    _check_counts(text, given)
    if base == "srun":
        return Launcher(text, "srun", (_found(head, "Slurm's launcher"), *given))
    return _mpi(text, head, given)


_CHOICES = (
    f"choose local, mpirun, mpiexec, {', '.join(LIBRARIES)} or srun, or a launcher's path, with arguments if needed"
)


def launcher_of(library: MpiLibrary) -> Launcher:
    """The launcher of an MPI library."""
    return _of_library("mpirun", library, ())


def _mpi(text: str, head: str, given: Sequence[str]) -> Launcher:
    if head in LIBRARIES or head in ("mpirun", "mpiexec"):
        found = find_library(head if head in LIBRARIES else "mpi")
        if isinstance(found, MpiLibrary):
            return _of_library(text, found, given)
        if head in LIBRARIES or shutil.which(head) is None:
            raise UsageError(f"--launcher {head}: {found}")
    path = _found(head, "an MPI library's launcher")
    return Launcher(text, _asked(path), (path, *given))


def _of_library(text: str, library: MpiLibrary, given: Sequence[str]) -> Launcher:
    kind: Kind = "openmpi" if library.name == "openmpi" else "mpich"
    return Launcher(text, kind, (*library.launcher, *given), library)


def _found(head: str, what: str) -> str:
    path = shutil.which(head)
    if path is None:
        raise UsageError(f"--launcher {head}: {what} was not found; install it, or give its path")
    return path


def _asked(path: str) -> Kind:
    """The MPI library of a launcher, from the launcher's own output."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_ASK_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--launcher {path} did not answer --version: {error}; check that it is a launcher") from None
    return "openmpi" if any(name in done.stdout + done.stderr for name in _OPENMPI_NAMES) else "mpich"


def _check_counts(text: str, given: Sequence[str]) -> None:
    """Raise UsageError if the arguments set the number of processes, because each row sets it."""
    for word in given:
        name = word.partition("=")[0]
        if name in _COUNTS or (word.startswith("-n") and word[2:].isdecimal()):
            raise UsageError(f"--launcher {text!r}: leave {word} out, each row has its own number of processes")


@dataclass(frozen=True)
class Site:
    """A place for the processes of a row, with its launcher and the speed of its links.

    ``lab`` is None outside a lab. ``rate`` is the links' rate in bits/s, ``goodput_bytes_per_s`` the measured goodput
    of one TCP stream; both are None if nothing limits the links.
    """

    lab: Lab | None = None
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
        found = find_library("mpi")
        if isinstance(found, str):
            raise SynclineError(f"transport=mpi needs the launcher of an MPI library: {found}")
        return launcher_of(found)

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
            argv, added = self.lab.mpi_command(processes, command, launcher.settings or launcher.kind)
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
