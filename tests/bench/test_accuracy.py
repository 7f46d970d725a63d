"""``syncline accuracy``: what is trained, what a table says of it, and what is left of one that was interrupted."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from syncline import registry
from syncline.bench import accuracy, compare, processes
from syncline.bench.accuracy import strategy_of
from syncline.bench.cases import Case, comparison_of
from syncline.bench.contenders import contender_of
from syncline.cli import cli
from syncline.errors import DataError
from syncline.report import accuracy_table
from syncline.report.accuracy_rows import AccuracyResult, AccuracyRun
from syncline.report.rows import Point, Row
from syncline.strategy.strategy import Strategy
from syncline.workloads import load

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")

FIELDS = {
    "codec", "feedback", "accuracy", "median_accuracy", "lowest", "highest", "bytes_sent_per_step", "of_dense_bytes",
    "points_below_dense", "workload", "workers", "seeds", "error", "strategy", "chosen", "scatter_points",
    "within_scatter",
}  # fmt: skip


REAL_IMAGES = Path(__file__).parents[3] / "shared" / "data" / "cifar10-part"
"""The first 761 images of each file of CIFAR-10, where they are at hand."""

CURVE = (Point(1, 0.1, loss=2.0), Point(2, 0.2, loss=1.0), Point(2, 0.2, accuracy=0.5, test_loss=1.5))


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["accuracy", *map(str, arguments)])


def read(path: Path) -> AccuracyResult:
    return AccuracyResult.from_json(path.read_text())


class Trained:
    """Stands in for the processes: an accuracy that falls with what is not sent, and a note of what was asked for."""

    def __init__(self, spoil: Callable[[Row, int], Row] = lambda row, _: row) -> None:
        self.asked: list[tuple[str, int]] = []
        self.cases: list[Case] = []
        self._spoil = spoil

    def __call__(self, case: Case, workload: str, seed: int, limit_s: float, progress: Any) -> Row:
        assert workload == "digits"
        assert limit_s > 0
        self.asked.append((case.strategy, seed))
        self.cases.append(case)
        progress.begin(case.strategy, case.workers, case.iterations)
        progress.advance(case.iterations, 0.5, 100.0)
        accuracy = 0.9 if "codec" in case.strategy else 0.98
        sent = 0.0 if case.workers == 1 else 200.0 if "codec" in case.strategy else 800.0
        row = Row(case.strategy, case.workers, accuracy + seed / 1000, 0.1, bytes_sent_per_step=sent)
        row = replace(row, replicas_equal=True, chosen=f"{case.strategy} sync=bsp", replica_sha256="d", curve=CURVE)
        row = self._spoil(row, len(self.asked))
        progress.end("done")
        return row


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    stand_in = Trained()
    monkeypatch.setattr(accuracy, "measure", stand_in)
    return stand_in


def result_of(*runs: AccuracyRun) -> AccuracyResult:
    origin = ("machine", 2, {"python": "3"}, "abc", True, "0", "now")
    work = {"workload": "digits", "workers": 4, "epochs": 12, "iterations": 276, "batch": 64}
    return AccuracyResult(*origin, **work, runs=runs)  # type: ignore[arg-type]


def run_of(codec: str, seed: int, accuracy: float | None, feedback: bool = False, **more: Any) -> AccuracyRun:
    return AccuracyRun(codec, feedback, seed, strategy_of((codec, feedback)), accuracy, **more)


@pytest.mark.slow
def test_real_processes_fill_a_table(tmp_path: Path) -> None:
    paths = {"--json": tmp_path / "r.json", "--markdown": tmp_path / "r.md"}
    files = [part for pair in paths.items() for part in pair]
    done = command("--workers", "2", "--seeds", "3", "--codecs", "feedback(int8)", "--epochs", "1", *files)
    assert done.exit_code == 0, done.output
    data = json.loads(paths["--json"].read_text())
    assert {"machine", "cores", "versions", "commit", "source_sha256", "started"} <= set(data)
    dense, int8 = data["rows"]
    assert set(dense) == set(int8) == FIELDS
    assert (dense["codec"], dense["feedback"], int8["codec"], int8["feedback"]) == ("none", False, "int8", True)
    for row in (dense, int8):
        assert row["error"] is None
        assert (row["workload"], row["workers"], row["seeds"]) == ("digits", 2, [3])
        assert row["accuracy"] == [row["median_accuracy"]] == [row["lowest"]] == [row["highest"]]
        assert 0.2 < row["median_accuracy"] <= 1  # ten classes, so it has learnt something
    assert int8["of_dense_bytes"] == pytest.approx(0.25, rel=0.02)
    assert abs(int8["points_below_dense"]) < 10
    assert "1/2 none seed 3" in done.output
    assert "2/2 int8 fb seed 3" in done.output
    assert "| `int8` | yes |" in paths["--markdown"].read_text()


def test_every_codec_is_trained_without_feedback_and_with_it_where_that_converges() -> None:
    ways = accuracy.ways_of(())
    assert ways[0] == accuracy.DENSE
    assert len(set(ways)) == len(ways)
    named = {name.partition("(")[0] for name, _ in ways}
    assert named == set(registry.names("codecs")) - {"feedback"}
    assert {("int8", False), ("int8", True), ("topk(ratio=0.01)", False), ("ternary", False)} <= set(ways)
    assert ("ternary", True) not in ways
    assert [fed for name, fed in ways if name == "adaptive"] == [True]


def test_strategies_say_what_is_fed_back_and_can_be_built() -> None:
    for name, feedback in accuracy.ways_of(()):
        text = strategy_of((name, feedback))
        assert contender_of(text, 4, one_host=True).text == text
        codec = Strategy.parse(text).codec
        assert codec.name == ("feedback" if feedback and not name.startswith("adaptive") else name.partition("(")[0])
    assert strategy_of(("int8", False)) == "direct codec=int8 feedback=off"
    assert strategy_of(("int8", True)) == "direct codec=feedback(int8)"
    assert strategy_of(("fp16", False)) == "direct codec=fp16"
    warmed = "feedback(onebit, warmup=9)"
    assert accuracy.ways_of([warmed])[1:] == ((warmed, True),)
    assert strategy_of((warmed, True)) == f"direct codec={warmed}"


def test_named_codecs_come_after_dense_and_once() -> None:
    assert accuracy.ways_of(["feedback(int8)", "int8", "none"]) == (accuracy.DENSE, ("int8", True), ("int8", False))
    assert accuracy.ways_of(["topk(ratio=0.9)"])[1:] == (("topk(ratio=0.9)", False), ("topk(ratio=0.9)", True))
    assert accuracy.ways_of(["adaptive(int4)"])[1:] == (("adaptive(int4)", True),)


def test_rows_are_medians_over_what_finished_beside_dense() -> None:
    dense = [run_of("none", seed, value, bytes_sent_per_step=1000.0) for seed, value in enumerate((0.9, 0.99, 0.98))]
    found = result_of(
        *dense,
        run_of("int8", 0, 0.97, True, bytes_sent_per_step=240.0),
        run_of("int8", 1, None, True, error="rank 1 died"),
        run_of("int8", 2, 0.99, True, bytes_sent_per_step=260.0),
        run_of("sign", 0, 0.99, bytes_sent_per_step=30.0),
        run_of("onebit", 0, 0.5, error="the replicas differ"),
    )
    none, int8, sign, onebit = found.rows
    assert (none.median_accuracy, none.lowest, none.highest) == (0.98, 0.9, 0.99)
    assert (none.of_dense_bytes, none.points_below_dense, none.error) == (1.0, 0.0, None)
    assert int8.accuracy == (0.97, None, 0.99)
    assert int8.seeds == (0, 1, 2)
    assert int8.median_accuracy == pytest.approx(0.98)
    assert int8.of_dense_bytes == pytest.approx(0.25)
    assert int8.error == "seed 1: rank 1 died"
    assert sign.points_below_dense == pytest.approx(-1.0)
    assert [row.scatter_points for row in (none, int8, sign)] == [pytest.approx(9), pytest.approx(2), None]
    assert [row.within_scatter for row in (none, int8, sign, onebit)] == [None, True, True, None]
    assert onebit.accuracy == (None,)
    assert onebit.median_accuracy is onebit.points_below_dense is onebit.of_dense_bytes is None
    alone = result_of(run_of("int8", 0, 0.9, bytes_sent_per_step=1.0)).rows[0]
    assert alone.points_below_dense is alone.of_dense_bytes is None


def test_the_file_can_be_read_back() -> None:
    found = result_of(run_of("none", 0, 0.9, curve=CURVE), run_of("int8", 0, None, error="no"))
    assert AccuracyResult.from_json(found.to_json()) == found
    for text in ("", "[]", "{}", '{"runs": [{"codec": "int8"}]}'):
        with pytest.raises(DataError, match="not a result file of syncline accuracy"):
            AccuracyResult.from_json(text)


@pytest.mark.parametrize("width", [80, 100])
def test_tables_of_strategies_fit(width: int) -> None:
    names = ["single", *map(strategy_of, accuracy.ways_of(()))]
    runs = [AccuracyRun(None, None, seed, name, 0.98765, 0.1, 1.2e6) for name in names for seed in (0, 1)]
    found = replace(result_of(*runs), epochs=None, reference="single")
    out = io.StringIO()
    Console(file=out, width=width).print(accuracy_table.render(found, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("98.77 - 98.77" in line and line.rstrip().endswith("1.14 MiB  100 %") for line in lines) == len(names)
    assert "…" not in out.getvalue()
    text = accuracy_table.markdown(found)
    assert all(f"| `{name}` |" in text for name in names)
    assert "| strategy | accuracy % | lowest to highest | points below single |" in text
    assert "; 276 iterations of 64 images" in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_have_every_row_and_fit(width: int) -> None:
    runs = [
        run_of(name, seed, 0.98765, feedback, bytes_sent_per_step=1.2e6)
        for name, feedback in accuracy.ways_of(())
        for seed in (0, 1)
    ]
    failed = run_of("int8(block=64)", 1, None, True, error="rank 1 died\nin a second line")
    found = replace(result_of(*runs, failed), workload="cifar10:/home/somebody/data")
    out = io.StringIO()
    Console(file=out, width=width).print(accuracy_table.render(found, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert (
        sum("98.77 - 98.77" in line and line.rstrip().endswith("1.14 MiB  100 %") for line in lines) == len(runs) // 2
    )
    assert any("…" in line for line in lines) is False
    assert "int8(block=64) with feedback, seed 1: rank 1 died" in out.getvalue()
    page = accuracy_table.markdown(found)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(found.rows)
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {9}
    assert "| `topk(ratio=0.01)` | yes | 98.77 | 98.77 - 98.77 | 0.00 | yes | 1.14 MiB | 100 % |" in rows
    assert "Failed: `int8(block=64)` with feedback: seed 1: rank 1 died." in page
    assert page.startswith("cifar10, 4 workers, seeds 0, 1; 12 epochs, 276 iterations of 64 images.")
    assert "somebody" not in page
    assert "no rows" in str(accuracy_table.render(result_of(), 80))


@pytest.mark.parametrize("width", [60, 40])
def test_a_narrow_terminal_loses_columns_and_never_the_name(width: int) -> None:
    ways = (("none", False), ("int8", True), ("topk(ratio=0.01)", True))
    runs = [run_of(name, seed, 0.98765, fed, bytes_sent_per_step=1.2e6) for name, fed in ways for seed in (0, 1)]
    out = io.StringIO()
    Console(file=out, width=width).print(accuracy_table.render(result_of(*runs), width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    head = next(line.split() for line in lines if "below" in line)
    assert head == ["codec", "fb", "acc", "%", "below", "bytes", *(["share"] if width == 60 else [])]
    assert any(line.split()[:4] == ["int8", "yes", "98.77", "0.00"] for line in lines)
    assert "No room for range, within" in " ".join(out.getvalue().split())


def test_dense_comes_first_and_every_training_is_kept(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = command("--codecs", "int8", "--seeds", "4", "1", "--json", path)
    assert done.exit_code == 0, done.output
    texts = ("direct", "direct codec=int8 feedback=off", "direct codec=feedback(int8)")
    assert trained.asked == [(text, seed) for text in texts for seed in (4, 1)]
    assert [row.seeds for row in read(path).rows] == [(4, 1)] * 3
    assert read(path).rows[1].of_dense_bytes == 0.25


def test_strategies_stand_beside_the_single_worker_or_else_the_first(trained: Trained, tmp_path: Path) -> None:
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    texts = ("ring", "single", "ps(servers=1)", "direct codec=int8")
    done = command("--strategies", *texts, "--seeds", "0", "1", "2", "--json", path, "--report", page)
    assert done.exit_code == 0, done.output
    names = ("single", "ring", "ps(servers=1)", "direct codec=feedback(int8)")
    assert trained.asked == [(name, seed) for name in names for seed in (0, 1, 2)]
    found = read(path)
    assert {(run.codec, run.feedback, run.replica_sha256, run.curve) for run in found.runs} == {
        (None, None, "d", CURVE)
    }
    assert [(row.strategy, row.within_scatter, row.of_dense_bytes) for row in found.rows] == [
        ("single", None, 0),
        ("ring", True, 1),
        ("ps(servers=1)", True, 1),
        ("direct codec=feedback(int8)", False, 0.25),
    ]
    assert found.rows[1].chosen == "ring sync=bsp"
    assert found.rows[1].scatter_points == pytest.approx(0.2)
    assert "points below single" in " ".join(done.output.split())
    assert all(name in page.read_text() for name in names)
    assert page.read_text().count("<figure>") == 2
    assert command("--strategies", "ring", "direct", "--seeds", "0", "--json", path).exit_code == 0
    assert read(path).reference == "ring"
    assert [(row.within_scatter, row.scatter_points) for row in read(path).rows] == [(None, None)] * 2


def test_a_training_is_a_row_of_a_comparison(trained: Trained) -> None:
    """The same case from the same seed; how it is run is ``measure`` for both."""
    texts = ("single", "ps(servers=2)", "ddp")
    for length in ({"iterations": 7}, {"epochs": 2}, {}):
        trained.cases.clear()
        options = [part for name, value in length.items() for part in (f"--{name}", str(value))]
        assert command("--workers", "3", "--strategies", *texts, "--seeds", "5", *options).exit_code == 0
        comparison = comparison_of("digits", 3, texts, *map(length.get, ("epochs", "iterations")), None, 5, None, None)
        assert tuple(trained.cases) == comparison.cases
    assert compare.measure is processes.measure


@pytest.mark.skipif(not REAL_IMAGES.is_dir(), reason="no CIFAR-10 images at hand")
def test_real_images_are_trained_on_under_every_strategy_alike() -> None:
    texts = ("single", "ring", "ps(servers=1)", "direct codec=powersgd(rank=2)")
    request = accuracy.request_of(f"cifar10:{REAL_IMAGES}", 4, (0, 1), strategies=texts, iterations=4000)
    assert len(request.trainings) == len(texts) * 2
    assert {(training.case.iterations, training.case.batch) for training in request.trainings} == {(4000, 100)}
    assert request.trainings[0].case.workers == 1
    assert request.trainings[-1].case.strategy == "direct codec=feedback(powersgd(rank=2))"
    images = load(request.comparison.workload)
    assert (len(images.train), images.test and len(images.test)) == (3805, 761)
    assert set(images.train.labels) == set(range(10))


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
    assert "points below single" in accuracy_table.markdown(alone)


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workload", "replay:googlenet"], "no test set"),
        (["--workload", "digitz"], "digits"),
        (["--workers", "1"], "x>=2"),
        (["--codecs", "int9"], "did you mean 'int8'"),
        (["--codecs", "feedback(ternary)"], "diverges"),
        (["--seeds", "1", "1"], "listed twice"),
        (["--seeds", "one"], "--seeds"),
        (["--epochs", "0"], "x>=1"),
        (["--json", "same.json", "--markdown", "same.json"], "choose two"),
        (["--report", "same", "--markdown", "same"], "--markdown and --report both name the file"),
        (["--iterations", "0"], "x>=1"),
        (["--iterations", "5", "--epochs", "1"], "exclude each other"),
        (["--codecs", "int8", "--strategies", "ring"], "direct codec=int8"),
        (["--strategies", "rong"], "did you mean 'ring'"),
        (["--strategies", "ring", "ring"], "listed twice"),
        (["--strategies", "mxnet", "tensorflow"], "two of the presets stand for ps(servers=1)"),
        (["--strategies", "ps(servers=0)"], "servers"),
        (["--report", "nowhere/page.html"], "there is no folder"),
        (["--json", "/proc/nowhere/rows.json"], "choose another path"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(
    arguments: list[str], says: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert trained.asked == []


def test_only_a_file_of_the_same_work_is_resumed(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert command("--codecs", "none", "--seeds", "0", "--json", path).exit_code == 0
    kept = path.read_text()
    for arguments in (["--epochs", "1"], ["--workers", "3"]):
        done = command("--codecs", "none", "--seeds", "0", "--resume", path, *arguments)
        assert done.exit_code == 2
        assert "cannot stand beside new ones" in done.output
    assert path.read_text() == kept
    path.write_text("{}")
    assert "choose another file" in command("--resume", path).output
    assert len(trained.asked) == 1


def test_no_row_of_the_documentation_ends_at_chance() -> None:
    """Digits have ten classes; a codec whose default ends there has the wrong default."""
    text = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `") and line.count("|") == 9]
    assert len(rows) > 30
    for row in rows:
        lowest, _, _ = row[4].partition(" - ")
        assert float(lowest) > 50, row[1]
