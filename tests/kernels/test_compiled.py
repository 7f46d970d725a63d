"""Machine code that is kept: for which text, where, and by several processes at once."""

from __future__ import annotations

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
from syncline.kernels.compiled import _folder
a, b = np.arange(5.0), np.ones(5)
addresses = np.array([a.ctypes.data, b.ctypes.data])
sum_arrays(CODES["float64"], 8, addresses, addresses[:1], 5)
print(_folder(), a.tolist())
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
    monkeypatch.setattr(compiled, "_folder", compiled._folder.__wrapped__)
    return cache, temporary


def test_the_users_cache_comes_first(places: tuple[Path, Path]) -> None:
    assert Path(str(compiled._folder())).parent == places[0] / "syncline"


def test_where_the_cache_cannot_be_written_a_temporary_folder_does(places: tuple[Path, Path]) -> None:
    (places[0] / "syncline").write_text("a file in the way")
    found = Path(str(compiled._folder()))
    assert found.parent == places[1] / f"syncline-{os.getuid()}"
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_to_is_not_used(places: tuple[Path, Path]) -> None:
    """Whoever can write there could have this process run what he likes."""
    (places[0] / "syncline").write_text("a file in the way")
    open_to_all = places[1] / f"syncline-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert compiled._folder() is None


def test_processes_that_compile_at_once_both_work(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    both = [
        subprocess.Popen([sys.executable, "-c", ADD_UP], env=environ, text=True, stdout=-1, stderr=-1) for _ in range(2)
    ]
    for process in both:
        out, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        folder, values = out.split(maxsplit=1)
        assert Path(folder).parent == tmp_path / "syncline"
        assert values.strip() == "[1.0, 2.0, 3.0, 4.0, 5.0]"
    assert list(Path(folder).rglob("*.nbc"))
