"""Machine code that is kept: for which text, where, and by several processes at once."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.kernels import compiled

LIMIT_S = 120.0

ADD_UP = """
import numpy as np
from syncline.kernels.passes import CODES, sum_arrays
from syncline.kernels.compiled import _place
a, b = np.arange(5.0), np.ones(5)
addresses = np.array([a.ctypes.data, b.ctypes.data])
sum_arrays(CODES["float64"], 8, addresses, addresses[:1], 5)
place = _place()
print(place and place.path, sum(sum_arrays.stats.cache_hits.values()), a.tolist())
"""


def test_another_text_of_any_kernel_is_another_folder(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1")
    names = [compiled.folder_name(tmp_path)]
    for file, text in (("one.py", "x = 2"), ("two.py", "y = 1")):
        (tmp_path / file).write_text(text)
        names.append(compiled.folder_name(tmp_path))
    (tmp_path / "notes.txt").write_text("no kernel")
    assert compiled.folder_name(tmp_path) == names[-1]
    assert len(set(names)) == 3


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The user's cache, and the folder for temporary files."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(compiled, "_place", compiled._place.__wrapped__)
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    return cache, temporary


def chosen() -> Path | None:
    """Where machine code would be kept."""
    place = compiled._place()
    return None if place is None else place.path


def test_the_users_cache_comes_first(places: tuple[Path, Path]) -> None:
    found = chosen()
    assert found is not None
    assert found.parent == places[0] / "syncline"


def test_a_folder_that_stays_locked_is_not_waited_for_without_end(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_deadline", lambda: 0.0)
    monkeypatch.setattr(compiled, "_warn", compiled._warn.__wrapped__)
    folder = chosen()
    assert folder is not None
    with (folder / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        elsewhere = chosen()
        assert elsewhere is not None
        assert elsewhere.parent.parent == places[1]
        monkeypatch.setattr(compiled, "_place", lambda: compiled.Place(folder))  # locked since it was looked at
        assert compiled.compiled("int64(int64)")(lambda x: x + 1)(1) == 2
        assert not list(folder.rglob("*.nb?"))
    assert [("another process has locked" in said) for said in caplog.messages] == [True, True]


def test_where_the_cache_cannot_be_written_a_temporary_folder_does(places: tuple[Path, Path]) -> None:
    (places[0] / "syncline").write_text("a file in the way")
    found = chosen()
    assert found is not None
    assert found.parent == places[1] / f"syncline-{os.getuid()}"
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_to_is_not_used(places: tuple[Path, Path]) -> None:
    """Whoever can write there could have this process run what he likes."""
    (places[0] / "syncline").write_text("a file in the way")
    open_to_all = places[1] / f"syncline-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert chosen() is None


@pytest.mark.parametrize("where", [".", "inner", "inner/code.nbi"])
@pytest.mark.parametrize("how", ["group", "others", "link", "owner"])
def test_a_cache_that_others_could_have_written_is_not_used_and_said_once(
    places: tuple[Path, Path], where: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chosen()
    assert folder is not None
    (folder / "inner").mkdir(mode=0o700)
    (folder / "inner" / "code.nbi").touch(mode=0o600)
    assert chosen() == folder
    spoil(folder / where, how)
    again = chosen()
    assert again is not None
    assert again.parent.parent == places[1]
    (said,) = caplog.messages
    assert f"it is kept in {again}" in said
    assert str(folder / where) in said
    assert "remove it" in said


def spoil(path: Path, how: str) -> None:
    if how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 54321, -1)
    else:
        path.chmod(0o770 if how == "group" else 0o707)


def test_numbas_own_folder_is_held_to_the_same(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = places[0] / "numba"
    monkeypatch.setattr(compiled.config, "CACHE_DIR", str(own))
    assert chosen() == own
    (own / "other").mkdir(mode=0o777)  # another package's business
    (ours,) = own.glob("kernels_*")
    assert chosen() == own
    ours.chmod(0o775)
    assert chosen() is None
    assert f"{ours} can be written to by its group" in caplog.text
    ours.chmod(0o755)
    assert chosen() == own
    own.chmod(0o775)
    assert chosen() is None


def test_processes_that_compile_at_once_both_work_and_the_next_one_loads(tmp_path: Path) -> None:
    """Whatever the umask: what others may write would not be loaded."""
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environ["XDG_CACHE_HOME"] = str(tmp_path)

    def start() -> subprocess.Popen[str]:
        script = f"import os\nos.umask(0o002)\n{ADD_UP}"
        return subprocess.Popen([sys.executable, "-c", script], env=environ, text=True, stdout=-1, stderr=-1)

    def ended(process: subprocess.Popen[str]) -> tuple[Path, int]:
        out, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        assert not errors
        folder, loaded, values = out.split(maxsplit=2)
        assert values.strip() == "[1.0, 2.0, 3.0, 4.0, 5.0]"
        return Path(folder), int(loaded)

    for process in [start(), start()]:
        folder, _ = ended(process)
        assert folder.parent == tmp_path / "syncline"
    assert list(folder.rglob("*.nbc"))
    assert ended(start()) == (folder, 1)
