"""The folder for machine code: where it is, when it is not used, and who waits for whom."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from syncline.kernels import places
from syncline.kernels.private import path_of, private_folder, read_file


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The user's cache, and the folder for temporary files."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(temporary))
    return cache, temporary


def chosen() -> Path | None:
    """Where machine code would be kept."""
    place = places.place_for.__wrapped__("kernels")
    return None if place is None else place.path


def test_the_users_cache_comes_first(roots: tuple[Path, Path]) -> None:
    assert chosen() == roots[0] / "syncline" / "kernels"


def test_where_the_cache_cannot_be_written_a_temporary_folder_does(roots: tuple[Path, Path]) -> None:
    (roots[0] / "syncline").write_text("a file in the way")
    found = chosen()
    assert found is not None
    assert found.parent == roots[1] / f"syncline-{os.getuid()}"
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_to_is_not_used(roots: tuple[Path, Path]) -> None:
    """Whoever can write there could have this process run what he likes."""
    (roots[0] / "syncline").write_text("a file in the way")
    open_to_all = roots[1] / f"syncline-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert chosen() is None


@pytest.mark.parametrize("where", [".", "inner", "inner/code.so", "code.o"])
@pytest.mark.parametrize("how", ["group", "others", "link", "owner"])
def test_a_cache_that_others_could_have_written_is_not_used_and_said_once(
    roots: tuple[Path, Path], where: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chosen()
    assert folder is not None
    (folder / "inner").mkdir(mode=0o700)
    for name in ("inner/code.so", "code.o"):
        (folder / name).touch(mode=0o600)
    assert chosen() == folder
    spoil(folder / where, how)
    again = chosen()
    assert again is not None
    assert again.parent.parent == roots[1]
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


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_what_is_kept_is_this_users_alone_and_replaced_in_one_piece(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with private_folder(tmp_path, "cache") as folder:
            places.keep(folder, "code", b"old")
            with (tmp_path / "cache" / "code").open("rb") as reader:
                places.keep(folder, "code", b"new")
                assert reader.read() == b"old"
            assert read_file(folder, "code", tmp_path) == b"new"
    finally:
        os.umask(before)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_stays_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(places, "LOCK_S", 0.0)
    monkeypatch.setattr(places, "_given_up", threading.Event())
    with private_folder(tmp_path, "cache") as folder, (tmp_path / "cache" / "code.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for limit_s in (0.0, 1e9):  # who has given up once does not wait again
            monkeypatch.setattr(places, "LOCK_S", limit_s)
            with pytest.raises(TimeoutError, match="stays locked"), places.alone(folder, "code"):
                pass
        with places.alone(folder, "other code"):
            pass
    (said,) = caplog.messages
    assert "another process has locked" in said


def test_one_waits_until_the_other_is_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, came = threading.Event(), threading.Event()
    monkeypatch.setattr(places.time, "sleep", lambda _: refused.set())

    def second() -> None:
        with private_folder(tmp_path, "cache") as folder, places.alone(folder, "code"):
            came.set()

    with private_folder(tmp_path, "cache") as folder:
        with places.alone(folder, "code"):
            thread = threading.Thread(target=second)
            thread.start()
            assert refused.wait(60)
            assert not came.is_set()
        assert came.wait(60)
        thread.join(60)


def test_who_has_no_home_keeps_it_in_a_temporary_folder(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's user without an entry; a relative folder would be another one everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "expanduser", homeless)
    found = chosen()
    assert found is not None
    assert found.is_relative_to(roots[1])


def homeless(path: Path) -> Path:
    raise RuntimeError(f"Could not determine home directory for {path}")


def test_folders_that_killed_processes_have_left_are_removed_and_those_in_use_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(places.tempfile, "tempdir", str(tmp_path))
    with places.of_its_own() as used:
        in_use = path_of(used).resolve()
        (in_use / "code.o").write_bytes(b"code")
        left, young = (in_use.with_name(in_use.name + end) for end in ("left", "young"))
        for folder in (left, young):
            folder.mkdir(mode=0o700)
            (folder / "code.o").write_bytes(b"code")
        for folder in (in_use, left):
            os.utime(folder, (0, 0))
        with places.of_its_own() as other:
            assert {in_use, young, path_of(other).resolve()} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == [young]
