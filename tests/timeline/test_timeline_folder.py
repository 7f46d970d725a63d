"""Parts of a timeline beside it, in a folder that others may write to: what another user has put there is not used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline.timeline.chrome import write
from syncline.timeline.folder import Assembly, folder_of, open_part
from syncline.timeline.spans import SUFFIXES, read

SOMEBODY = 54321
VICTIM = b"a file of mine"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder such as /tmp; what is made in it is not kept from others by a mask."""
    tmp_path.chmod(0o1777)
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


@pytest.fixture
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder elsewhere, with files of the names of parts."""
    folder = tmp_path_factory.mktemp("mine")
    for name in ("process-0-0.spans", "process-0-0.names", "title", "run-0"):
        (folder / name).write_bytes(VICTIM)
    return folder


def link(path: Path, mine: Path) -> None:
    path.symlink_to(mine)


def folder_with(mode: int) -> Callable[[Path, Path], None]:
    def make(path: Path, _: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return make


def foreign(path: Path, _: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    path.mkdir(mode=0o755)
    os.chown(path, SOMEBODY, -1)


SPOILT = {
    "link": (link, "is a link: remove it"),
    "group": (folder_with(0o770), "can be written to by its group: .*chmod go-w"),
    "others": (folder_with(0o1777), "can be written to by everybody: .*chmod go-w"),
    "owner": (foreign, rf"belongs to another user \(uid {SOMEBODY}\): remove it"),
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("begin", [lambda target: open_part(folder_of(target), 0, 0), Assembly])
def test_a_folder_that_is_not_this_users_alone_is_refused(
    shared: Path, mine: Path, how: str, begin: Callable[[Path], object]
) -> None:
    spoil, says = SPOILT[how]
    target = shared / "t.json.gz"
    spoil(folder_of(target), mine)
    with pytest.raises(UsageError, match=f"{folder_of(target)} {says}.*choose another path"):
        begin(target)
    assert [path.read_bytes() for path in mine.iterdir()] == [VICTIM] * 4
    assert how == "link" or not list(folder_of(target).iterdir())


def test_what_is_made_is_this_users_alone(shared: Path) -> None:
    assembly = Assembly(shared / "t.json")
    folder = Path(assembly.environ("a run")["SYNCLINE_TRACE_PARTS"])
    open_part(folder, 0, 0).close()
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder)] == [0o700] * 2
    parts = [path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")]
    assert [path.stat().st_mode & 0o777 for path in parts] == [0o600] * 2


def test_links_in_place_of_parts_are_replaced(shared: Path, mine: Path) -> None:
    """As a copy of somebody's folder may have them."""
    folder = folder_of(shared / "t.json")
    folder.mkdir(mode=0o700)
    for suffix in SUFFIXES:
        (folder / f"process-0-0{suffix}").symlink_to(mine / f"process-0-0{suffix}")
    file = open_part(folder, 0, 0)
    file.close()
    assert read(file.paths[0]).notes["process"] == 0
    assert all(path.read_bytes() == VICTIM for path in mine.iterdir())


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_timeline_is_not_written_through_links(shared: Path, mine: Path, name: str) -> None:
    """Neither through one in its place, nor through those of names that it might be written under first."""
    victim = mine / "title"
    for guess in (name, f".{name}", f".{name}.{os.getpid()}"):
        (shared / guess).symlink_to(victim)
    write(shared / name, [])
    assert victim.read_bytes() == VICTIM
    assert not (shared / name).is_symlink()


def test_a_folder_that_others_may_read_is_taken_from_them(shared: Path) -> None:
    """As an earlier run, or a mask, has left it."""
    folder = folder_of(shared / "t.json")
    folder.mkdir()
    folder.chmod(0o755)
    open_part(folder, 0, 0).close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_another_process_tries_there_is_left_to_it(shared: Path) -> None:
    """One of another host or container may have the same number."""
    folder = folder_of(shared / "t.json")
    folder.mkdir(mode=0o700)
    theirs = folder / f".{os.getpid()}"
    theirs.write_bytes(VICTIM)
    open_part(folder, 0, 0).close()
    assert theirs.read_bytes() == VICTIM


def test_links_to_folders_are_not_followed_when_runs_are_removed(shared: Path, mine: Path) -> None:
    folder = folder_of(shared / "t.json")
    folder.mkdir(mode=0o700)
    (folder / "run-0").symlink_to(mine)
    with pytest.raises(UsageError, match="run-0 is a link: remove it"):
        Assembly(shared / "t.json").environ("a run")
    assert [path.read_bytes() for path in mine.iterdir()] == [VICTIM] * 4
