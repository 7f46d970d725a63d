"""What is kept of ``syncline accuracy`` that was interrupted, failed or could not write, and what is added to it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accuracies import Trained, command, read

from syncline_bench import accuracy
from syncline_bench.accuracy import strategy_of
from syncline_bench.report.accuracy import markdown
from syncline_bench.report.comparison import Row

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")


def test_seeds_and_strategies_are_added_to_a_file(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert command("--codecs", "feedback(int8)", "--seeds", "0", "--json", path).exit_code == 0
    assert read(path).of_codecs
    more = ("--strategies", "single", "direct", "direct codec=int8", "--resume", path)
    assert command(*more, "--seeds", "0").exit_code == 0
    assert command(*more, "--seeds", "1", "0").exit_code == 0
    texts = ("single", "direct", "direct codec=feedback(int8)")
    assert trained.asked == [(texts[1], 0), (texts[2], 0), (texts[0], 0), *((text, 1) for text in texts)]
    found = read(path)
    assert not found.of_codecs
    assert found.reference == "single"
    assert [(row.strategy, row.seeds) for row in found.rows] == [(text, (1, 0)) for text in texts]


def test_an_older_file_is_read_and_resumed(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    asked = ("--codecs", "feedback(int8)", "--seeds", "0")
    assert command(*asked, "--json", path).exit_code == 0
    data = json.loads(path.read_text())
    for name in ("rows", "reference"):
        del data[name]
    for run in data["runs"]:
        del run["curve"], run["replica_sha256"]
    path.write_text(json.dumps(data))
    page = tmp_path / "r.html"
    assert command(*asked[:-1], "0", "1", "--resume", path, "--report", page).exit_code == 0
    assert [seed for _, seed in trained.asked] == [0, 0, 1, 1]
    assert [bool(run.curve) for run in read(path).runs] == [False, True] * 2
    assert [row.within_scatter for row in read(path).rows] == [None, False]
    assert page.read_text().count("<figure>") == 2


def test_an_interrupt_keeps_what_is_there_and_resume_adds_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(row: Row, count: int) -> Row:
        if count == 4:
            raise KeyboardInterrupt
        return row

    path, page = tmp_path / "r.json", tmp_path / "r.md"
    cut = Trained(interrupt)
    monkeypatch.setattr(accuracy, "measure", cut)
    asked = ("--codecs", "int8", "--seeds", "0,1", "--markdown", page)
    done = command(*asked, "--json", path)
    assert done.exit_code == 130, done.output
    assert "interrupted" in done.output
    assert len(read(path).runs) == 3
    assert "| `int8` | no |" in page.read_text()
    rest = Trained()
    monkeypatch.setattr(accuracy, "measure", rest)
    done = command(*asked, "--resume", path)
    assert done.exit_code == 0, done.output
    assert "3 trainings" in done.output
    assert rest.asked == [cut.asked[3], *((strategy_of(("int8", True)), seed) for seed in (0, 1))]
    assert [(run.feedback, run.seed) for run in read(path).runs[2:]] == [(False, 0), (False, 1), (True, 0), (True, 1)]
    again, other = Trained(), tmp_path / "other.json"
    monkeypatch.setattr(accuracy, "measure", again)
    done = command("--codecs", "none", "--seeds", "2", "--resume", path, "--json", other)
    assert done.exit_code == 0, done.output
    assert again.asked == [("direct", 2)]
    assert read(other).rows[0].seeds == (2, 0, 1)
    assert len(read(path).runs) == 6


def interrupted(*_: object) -> Row:
    raise KeyboardInterrupt


def test_rows_stand_beside_the_old_reference_until_the_new_one_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    monkeypatch.setattr(accuracy, "measure", Trained())
    assert command("--codecs", "int8", "--seeds", "0,1", "--json", path).exit_code == 0
    before = path.read_text()
    assert [row.within_scatter for row in read(path).rows] == [None, False, False]
    more = ("--strategies", "single", "ring", "--seeds", "0,1", "--resume", path)
    monkeypatch.setattr(accuracy, "measure", Trained(interrupted))
    done = command(*more)
    assert done.exit_code == 130, done.output
    assert path.read_text() == before
    assert "points below dense" in " ".join(done.output.split())
    monkeypatch.setattr(accuracy, "measure", Trained(lambda row, _: replace(row, error="rank 1 died")))
    assert command(*more).exit_code == 1
    assert read(path).reference == "direct"
    monkeypatch.setattr(accuracy, "measure", Trained(lambda row, n: row if n == 1 else interrupted(row, n)))
    done = command(*more)
    assert done.exit_code == 130
    assert read(path).reference == "single"
    assert "points below single" in " ".join(done.output.split())
    alone = replace(read(path), runs=tuple(run for run in read(path).runs if run.codec is not None))
    assert "points below single" in markdown(alone)


def test_nothing_is_said_to_be_kept_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    for spoil, files in (
        (interrupted, ("--json", path)),
        (lambda row, n: row if n == 1 else interrupted(row, n), ()),
    ):
        monkeypatch.setattr(accuracy, "measure", Trained(spoil))
        done = command("--codecs", "none", "--seeds", "0,1", *files)
        assert done.exit_code == 130, done.output
        assert "interrupted, and no training is kept" in done.output
    assert not path.exists()


def test_a_file_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path, page = tmp_path / "away", tmp_path / "r.json", tmp_path / "r.html"
    folder.mkdir()

    def remove(row: Row, _: int) -> Row:
        folder.rmdir()
        return row

    monkeypatch.setattr(accuracy, "measure", Trained(remove))
    files = ("--json", path, "--markdown", folder / "r.md", "--report", page)
    done = command("--codecs", "none", "--seeds", "0", *files)
    assert done.exit_code == 2, done.output
    assert "cannot write" in done.output
    assert "r.md" in "".join(done.output.split())
    assert "<figure>" in page.read_text()


@pytest.mark.parametrize(
    ("fault", "says"),
    [({"error": "rank 1 died"}, "rank 1 died"), ({"replicas_equal": False}, "replicas differ")],
)
def test_a_training_that_failed_is_listed_and_run_again(
    fault: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    monkeypatch.setattr(accuracy, "measure", Trained(lambda row, count: replace(row, **fault) if count == 2 else row))
    done = command("--codecs", "ternary", "--seeds", "0", "--json", path)
    assert done.exit_code == 1
    assert says in done.output
    assert [row.error is None for row in read(path).rows] == [True, False]
    again = Trained()
    monkeypatch.setattr(accuracy, "measure", again)
    assert command("--codecs", "ternary", "--seeds", "0", "--resume", path).exit_code == 0
    assert again.asked == [("direct codec=ternary", 0)]
    assert [row.error for row in read(path).rows] == [None, None]


def test_only_a_file_of_the_same_work_is_resumed(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert command("--codecs", "none", "--seeds", "0", "--json", path).exit_code == 0
    kept = path.read_text()
    for arguments in (["--epochs", "1"], ["--workers", "3"]):
        done = command("--codecs", "none", "--seeds", "0", "--resume", path, *arguments)
        assert done.exit_code == 2
        assert "cannot be compared with new ones" in done.output
    assert path.read_text() == kept
    path.write_text("{}")
    assert "choose another file" in command("--resume", path).output
    assert len(trained.asked) == 1
