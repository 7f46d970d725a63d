"""Tables kept between runs: round trip, keys, and files that cannot be read or written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from syncline.strategy.choice import Choice
from syncline.tuning import cache

CHOICE = Choice(((0, "tree"), (65536, "ring")))
TIMES = {"tree": [1e-5, 1e-2], "ring": [2e-5, 1e-3]}
PLACES = [("host", "machine", 2), ("host", "machine", 2)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "syncline" / "tuning"


def test_what_is_written_is_read() -> None:
    assert cache.read("key") is None
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    assert cache.read("key") == CHOICE
    assert cache.read("another") is None


def test_the_times_are_kept_beside_the_table(folder: Path) -> None:
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    content = json.loads((folder / "key.json").read_text())
    assert content["times_s"] == TIMES
    assert content["sizes"] == [1024, 1 << 20]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"algorithms": 3}', b'{"algorithms": [[5, "ring"]]}', b"\xff\xfe", b"{}"]
)
def test_a_file_that_makes_no_sense_is_as_good_as_none(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    (folder / "key.json").write_bytes(content)
    assert cache.read("key") is None
    assert "ignoring" in caplog.text
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    assert cache.read("key") == CHOICE


@pytest.mark.parametrize("where", [".", "..", "key.json"])
@pytest.mark.parametrize("how", ["group", "link"])
def test_what_others_could_have_written_is_as_good_as_none(
    folder: Path, where: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    spoilt = (folder / where).resolve()
    if how == "group":
        spoilt.chmod(0o770)
    else:
        spoilt.rename(spoilt.with_name("elsewhere"))
        spoilt.symlink_to(spoilt.with_name("elsewhere"))
    assert cache.read("key") is None
    assert "ignoring" in caplog.text
    assert str(spoilt) in caplog.text
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    assert (cache.read("key") == CHOICE) == (where == "key.json")  # a file is replaced, a folder is not


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache.write("key", CHOICE, (1024, 1 << 20), TIMES)
    assert cache.read("key") is None


def test_the_oldest_are_removed_and_nothing_else_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_FILES", 2)
    for number in range(4):
        cache.write(f"key{number}", CHOICE, (1024, 1 << 20), TIMES)
        os.utime(folder / f"key{number}.json", (number, number))
    cache.write("newest", CHOICE, (1024, 1 << 20), TIMES)
    assert {path.name for path in folder.iterdir()} == {"key3.json", "newest.json"}


def test_every_fact_makes_another_key() -> None:
    plans = {"ring": "d1", "tree": "d2"}
    keys = {
        cache.key_of("shm", PLACES, plans),
        cache.key_of("tcp", PLACES, plans),
        cache.key_of("shm", PLACES[:1], plans),
        cache.key_of("shm", [PLACES[0], ("other", "machine", 2)], plans),
        cache.key_of("shm", [PLACES[0], ("host", "other", 2)], plans),
        cache.key_of("shm", [PLACES[0], ("host", "machine", 4)], plans),
        cache.key_of("shm", PLACES, {"ring": "d1"}),
        cache.key_of("shm", PLACES, plans | {"tree": "d3"}),
        cache.key_of("shm", PLACES, plans, tries=True),
    }
    assert len(keys) == 9
    assert cache.key_of("shm", list(PLACES), dict(reversed(plans.items()))) in keys
