"""The launchers of a row's processes: this process itself, an MPI library's launcher, or Slurm's ``srun``.

Owns the values of ``--launcher`` and the command line with which a launcher starts a number of processes. The only
command that this module runs asks a launcher for its MPI library. The processes find their rank by
``launch.environment`` and report by ``messages``.

Open MPI passes only named variables (``-x``) on to other hosts; MPICH and Slurm pass all of them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from syncline.errors import UsageError
from syncline.launch.mpi_library import LIBRARIES, MpiLibrary, find_library

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

    ``auto``, ``local``, ``openmpi`` and ``mpich`` stand alone or before arguments of that launcher; ``mpirun``,
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


_CHOICES = "choose local, mpirun, mpiexec, openmpi, mpich or srun, or a launcher's path, with arguments if needed"


def mpi_launcher() -> Launcher | str:
    """The launcher of the installed MPI library, or the reason why there is none."""
    found = find_library("mpi")
    return _of_library("mpirun", found, ()) if isinstance(found, MpiLibrary) else found


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
