"""How tests start processes under MPI: what is installed, and the command for each library.

Two wheels in one environment share the name ``mpirun``; what only one of them has is therefore called: Open MPI's
``prterun``, MPICH's Hydra. ``mpi4py`` is told which library to load.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

LIBRARIES = ("openmpi", "mpich")


def mpi_command(library: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The beginning of a command that starts so many ranks, and its environment; skips where there is no such MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    prefix = Path(sys.prefix)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "MPI_"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    if library == "openmpi":
        launcher, loaded = prefix / "bin" / "prterun", prefix / "lib" / "libmpi.so.40"
        command = [str(launcher), "--personality", "ompi", "--map-by", ":oversubscribe", "--bind-to", "none"]
        for name in ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"):
            environ[name] = str(prefix)
        environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        for tool in ("OMPI", "PRTE"):  # containers run as root
            environ[f"{tool}_ALLOW_RUN_AS_ROOT"] = environ[f"{tool}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    else:
        launcher, loaded = prefix / "bin" / "mpiexec.hydra", prefix / "lib" / "libmpi.so.12"
        command = [str(launcher), "-bind-to", "none"]
    if not (launcher.is_file() and loaded.is_file()):
        pytest.skip(f"{library} is not installed as a wheel: pip install 'syncline[{library}]'")
    environ["MPI4PY_LIBMPI"] = str(loaded)
    return [shutil.which("env") or "env", *command, "-n", str(ranks)], environ
