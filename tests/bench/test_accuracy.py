"""``syncline accuracy``: which codecs and strategies it trains, what it refuses, and what stands beside what."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from accuracies import CURVE, Trained, command, read

from syncline import registry
from syncline.strategy import words as presets
from syncline.strategy.strategy import Strategy
from syncline_bench import accuracy, compare, processes
from syncline_bench.accuracy import strategy_of
from syncline_bench.cases import comparison_of
from syncline_bench.contenders import contender_of
from syncline_bench.workloads import load

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")

FIELDS = {
    "codec", "feedback", "accuracy", "median_accuracy", "lowest", "highest", "bytes_sent_per_step", "of_dense_bytes",
    "points_below_dense", "workload", "workers", "seeds", "error", "strategy", "chosen", "scatter_points",
    "within_scatter",
}  # fmt: skip
REAL_IMAGES = Path(__file__).parents[3] / "shared" / "data" / "cifar10-part"
"""The first 761 images of each file of CIFAR-10, where they are at hand."""


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


@pytest.mark.every(2)
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
        (["--iterations", "5", "--epochs", "1"], "both set the length of training"),
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
    monkeypatch.setattr(presets, "find_spec", lambda _: None)  # presets whose library is not there are the same
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert trained.asked == []


def test_no_row_of_the_documentation_ends_at_chance() -> None:
    """Digits have ten classes; a codec whose default ends there has the wrong default."""
    text = (Path(__file__).parents[2] / "docs" / "results" / "accuracy.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `") and line.count("|") == 9]
    assert len(rows) > 30
    for row in rows:
        lowest, _, _ = row[4].partition(" - ")
        assert float(lowest) > 50, row[1]
