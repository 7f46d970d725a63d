"""Where results go: files in one piece, and what nothing may take the place of."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from syncline.errors import UsageError
from syncline_bench.report.files import STANDARD_OUTPUT, checked, keep_text, replace_text


def test_a_file_that_cannot_be_written_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").write_text("kept")
    with pytest.raises(UsageError, match="cannot write"):
        replace_text(target, "text")
    with pytest.raises(UsageError, match="choose another path"):
        replace_text(tmp_path / "missing" / "file", "text")
    assert (target / "inside").read_text() == "kept"
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_standard_output_gets_what_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked("-") == STANDARD_OUTPUT
    keep_text(checked("-"), "half")
    replace_text(STANDARD_OUTPUT, "whole")
    assert capsys.readouterr().out == "whole"
    assert checked(None) is None
    keep_text(None, "nowhere")


def test_pipes_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    device = checked("/dev/null")
    assert device is not None
    keep_text(device, "text")
    replace_text(device, "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = checked(pipe)
        assert found is not None
        keep_text(found, "half")
        replace_text(found, "whole")
        assert os.read(reading, 100) == b"whole"
        assert [each.name for each in tmp_path.iterdir()] == ["pipe"]
    finally:
        os.close(reading)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    found = checked(tmp_path / "link")
    assert found == tmp_path / "kept"
    replace_text(found, "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "kept").read_text() == "new"
