"""What another user could have written is not read: links, groups, owners, at any depth, before and after a check."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline.kernels.private import NotPrivateError, check_contents, path_of, private_folder, read_file

SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def link(path: Path) -> None:
    """A link to the very same, elsewhere."""
    elsewhere = path.with_name(f"{path.name}-elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (link, "is a link"),
    "group": (lambda path: path.chmod(0o770), "can be written to by its group"),
    "others": (lambda path: path.chmod(0o707), "can be written to by everybody"),
    "sticky": (lambda path: path.chmod(0o1777), "can be written to by everybody"),
    "setgid": (lambda path: path.chmod(0o2770), "can be written to by its group"),
}
if os.geteuid() == 0:
    SPOILT["owner"] = lambda path: os.chown(path, SOMEBODY, -1), f"belongs to another user \\(uid {SOMEBODY}\\)"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """``a/b`` with a folder and files in it."""
    inner = tmp_path / "a" / "b" / "inner"
    inner.mkdir(parents=True)
    (inner / "code").write_bytes(b"machine code")
    (tmp_path / "a" / "b" / "table").write_bytes(b"a table")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o700)
    return tmp_path


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with private_folder(tmp_path / "cache", "a", "b") as fd:
            assert os.path.samestat(os.fstat(fd), (tmp_path / "cache" / "a" / "b").stat())
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("where", ["a", "a/b"])
def test_a_folder_of_the_path_that_others_may_have_changed_is_refused(cache: Path, where: str, how: str) -> None:
    spoil, said = SPOILT[how]
    spoil(cache / where)
    with pytest.raises(NotPrivateError, match=f"{cache / where} {said}"), private_folder(cache, "a", "b"):
        pass


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("where", ["table", "inner", "inner/code"])
def test_so_is_what_lies_in_it(cache: Path, where: str, how: str) -> None:
    spoil, said = SPOILT[how]
    with private_folder(cache, "a", "b") as fd:
        check_contents(fd, cache / "a" / "b")
        assert read_file(fd, "table", cache / "a" / "b") == b"a table"
        spoil(cache / "a" / "b" / where)
        with pytest.raises(NotPrivateError, match=f"{where} {said}"):
            check_contents(fd, cache / "a" / "b")
        if where == "table":
            with pytest.raises(NotPrivateError, match=said):
                read_file(fd, "table", cache / "a" / "b")


def test_what_is_no_file_keeps_nobody_waiting(cache: Path) -> None:
    os.mkfifo(cache / "a" / "b" / "pipe", 0o600)
    with private_folder(cache, "a", "b") as fd:
        with pytest.raises(NotPrivateError, match="pipe is neither a file nor a folder"):
            check_contents(fd, cache / "a" / "b")
        with pytest.raises(NotPrivateError, match="neither a file nor a folder"):
            read_file(fd, "pipe", cache / "a" / "b")


def test_a_folder_that_is_replaced_after_the_check_is_not_the_one_that_is_used(cache: Path) -> None:
    with private_folder(cache, "a", "b") as fd:
        (cache / "a" / "b").rename(cache / "a" / "was b")
        (cache / "a" / "b").mkdir(mode=0o777)
        (cache / "a" / "b" / "table").write_bytes(b"another's")
        assert read_file(fd, "table", cache / "a" / "b") == b"a table"
        assert (path_of(fd) / "table").read_bytes() == b"a table"


def test_the_way_to_the_cache_may_be_a_link(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Homes and caches lie on other disks; who replaces that link has no folder that passes to put behind it."""
    root = tmp_path_factory.mktemp("home") / "cache"
    root.symlink_to(cache)
    with private_folder(root, "a", "b") as fd:
        assert read_file(fd, "table", root) == b"a table"


@as_root
def test_roots_files_are_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.kernels.private.os.geteuid", lambda: SOMEBODY)
    with private_folder(cache, "a", "b") as fd:
        check_contents(fd, cache / "a" / "b")
