"""The command: its lines on narrow terminals, its file, and results of other commands as its input."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planted import Planted, slower

from syncline.timeline.chrome import RecordedRun, write
from syncline_bench.cli import cli
from syncline_bench.report import comparison
from syncline_bench.report.bench import BenchResult, Measured
from syncline_bench.report.explanation import CAUSES, Explanation
from syncline_bench.report.files import ResultFile
from syncline_bench.report.tuning import Tried, Tuned

SLOW = Planted(slow=slower(2, "backward", 0.2))


def call(*arguments: str | Path, columns: int = 60) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["explain", *map(str, arguments)])


def traced(path: Path, *runs: RecordedRun) -> Path:
    write(path, runs)
    return path


def test_the_lines_say_the_cause_then_the_remedy_then_what_changes_would_bring(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.json.gz", SLOW.run())
    result = call(path, columns=1000)
    assert result.exit_code == 0, result.output
    first, cause, remedy, critical, change, *_ = lines = result.output.splitlines()
    assert 3 <= len(lines) <= 10
    assert "an iteration takes" in first
    assert "4 workers" in first
    assert "Cause: slow_rank" in cause
    assert "rank 2" in cause
    assert "% of it" in cause
    assert remedy.startswith("Remedy: ")
    assert critical.startswith("Critical path: backward on rank 2 ")
    assert change.startswith("rank 2 as fast as the median: ")
    assert "predicted (" in change
    assert "% less" in change
    narrow = call(path).output
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == result.output.split()


def test_the_file_has_the_causes_for_programs(tmp_path: Path) -> None:
    path, out = traced(tmp_path / "t.json", SLOW.run()), tmp_path / "e.json"
    assert call(path, "--json", out).exit_code == 0
    (cause,) = json.loads(out.read_text())["causes"]
    assert (cause["cause"], cause["rank"], cause["link"]) == ("slow_rank", 2, None)
    assert cause["seconds"] == pytest.approx(0.2, rel=0.01)
    found = Explanation.from_json(out.read_text())
    assert found.to_json() == out.read_text()
    assert (found.file, found.kind, found.workers, found.healthy) == ("t.json", "timeline", 4, False)
    assert found.model_s == pytest.approx(found.iteration_s, rel=0.25)
    gain = next(change for change in found.changes if change.change == "rank 2 as fast as the median")
    assert gain.low_s is not None
    assert gain.high_s is not None
    assert gain.low_s <= gain.iteration_s <= gain.high_s
    assert gain.iteration_s == pytest.approx((found.iteration_s or 0.0) - 0.2, rel=0.1)
    alone = call(path, "--json", "-")
    assert json.loads(alone.stdout)["causes"]


def test_the_page_is_written_beside_the_file(tmp_path: Path) -> None:
    path, page = traced(tmp_path / "t.json", SLOW.run()), tmp_path / "why.html"
    result = call(path, "--report", page, "--json", tmp_path / "e.json")
    assert result.exit_code == 0, result.output
    assert Explanation.from_json((tmp_path / "e.json").read_text()).causes[0].said in page.read_text()
    assert call(path, "--report", page, "--json", page).exit_code == 2


@pytest.mark.parametrize(
    ("planted", "dominates"),
    [
        (replace(SLOW, buckets=(400_000,)), True),
        (Planted(workers=2, buckets=(8_000_000,), rate=6e8, late=True), True),  # 13 ms of 106 ms
        (Planted(rate=5e7), False),
        (Planted(slow=slower(None, "loading", 0.3)), False),
    ],
)
def test_the_first_sentence_says_where_communication_can_gain_little(
    tmp_path: Path, planted: Planted, dominates: bool
) -> None:
    path = traced(tmp_path / "t.json", planted.run())
    assert call(path, "--json", tmp_path / "e.json", columns=1000).exit_code == 0
    found = Explanation.from_json((tmp_path / "e.json").read_text())
    said = re.search(r"Computation dominates: communication can gain at most (\d+) % here\.", found.lines()[0])
    assert (said is not None) is dominates, found.lines()
    if said is not None:
        least = [one.seconds for one in found.causes if one.cause in ("network", "no_overlap", "fixed_cost")]
        assert 100 * max(least, default=0.0) / (found.iteration_s or 0.0) <= int(said[1]) <= 25


@pytest.mark.parametrize(
    ("workers", "own_s", "busy_s", "said"),
    [
        (2, 3.0, 19.6, "or started by its ranks, took 1.4 of the 2 cores of vm"),
        (4, 4.9, 19.7, "4 processes of the run share the 2 cores of vm"),
        (2, 9.7, 19.6, "The run itself kept the 2 cores of vm busy"),
        (2, 3.0, 12.0, ""),
    ],
)
def test_cores_that_are_all_busy_are_named(
    tmp_path: Path, workers: int, own_s: float, busy_s: float, said: str
) -> None:
    """In the slow rank's run, which keeps its cause first."""
    run = replace(SLOW, workers=workers, slow=slower(1, "backward", 0.2), host=lambda _: "vm").run()
    cores = {"usable": [0, 1], "wall_s": 10.0, "own_s": own_s, "busy_s": busy_s}
    path = traced(tmp_path / "t.json", with_cores(run, cores))
    assert call(path, "--json", tmp_path / "e.json").exit_code == 0
    found = Explanation.from_json((tmp_path / "e.json").read_text())
    assert found.causes[0].cause == "slow_rank"
    assert said in " ".join(found.remarks)
    assert ("core" in " ".join(found.remarks)) is bool(said)


@pytest.mark.parametrize("cores", [5, {"usable": [0]}, {"usable": [], "wall_s": 1, "own_s": 1, "busy_s": 1}])
def test_an_impossible_use_of_cores_is_refused_in_one_line(tmp_path: Path, cores: object) -> None:
    result = call(traced(tmp_path / "t.json", with_cores(SLOW.run(), cores)), columns=1000)
    assert result.exit_code == 2
    assert "impossible use of cores" in result.output
    assert result.output.count("\n") == 1


def with_cores(run: RecordedRun, cores: object) -> RecordedRun:
    return replace(run, processes=[replace(one, notes={**one.notes, "cores": cores}) for one in run.processes])


def test_a_prediction_that_is_off_says_by_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline_bench.explain.changes.MOST_ERROR", 0.0)
    found = call(traced(tmp_path / "t.json", SLOW.run()), columns=1000).output
    assert re.search(r"The prediction is \d+ % off here \(.* ms, measured .* ms\), so it predicts no change\.", found)


def test_a_healthy_run_says_so(tmp_path: Path) -> None:
    result = call(traced(tmp_path / "t.json", Planted().run()), "--json", tmp_path / "e.json")
    assert "Healthy" in result.output
    assert "Cause" not in result.output
    found = Explanation.from_json((tmp_path / "e.json").read_text())
    assert (found.healthy, found.causes, found.changes) == (True, (), ())


def test_the_slowest_run_of_several_is_explained_unless_another_is_chosen(tmp_path: Path) -> None:
    runs = [replace(SLOW.run(), title="tree"), replace(Planted().run(), title="ring \x1b[31m<b>")]
    path = traced(tmp_path / "t.json", *runs)
    assert "tree: an iteration takes" in call(path).output
    other = call(path, "--only", "ring").output
    assert "Healthy" in other
    assert "\x1b" not in other
    missing = call(path, "--only", "\x1b[31mpurple")
    assert missing.exit_code == 2
    assert "no run whose name contains" in missing.output
    assert "\x1b" not in missing.output


def test_a_run_whose_strategy_is_unknown_has_causes_and_no_predictions(tmp_path: Path) -> None:
    result = call(traced(tmp_path / "t.json", replace(SLOW, strategy="hostile \x1b[2J(").run()))
    assert result.exit_code == 0
    assert "slow_rank" in result.output
    assert "No change is predicted" in result.output
    assert "\x1b" not in result.output


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("planted", "change"),
    [
        (Planted(slow=slower(None, "loading", 0.1)), "batches loaded ahead"),
        (Planted(slow=slower(1, "loading", 0.1)), "rank 1 loading as fast as the median"),
        (Planted(rates={(0, 1): 2e7}), "links as fast as the others"),
        (Planted(late=True, buckets=(8_000_000,), rate=2.5e8), "schedule="),
        (Planted(buckets=(16_384,) * 80, fixed=0.002, strategy="ring schedule=fixed(bucket=16KiB)"), "schedule="),
        (Planted(servers=1, rate=2e8, strategy="ps(servers=1)"), "architecture="),
    ],
)
def test_each_cause_has_a_change_that_would_help(tmp_path: Path, planted: Planted, change: str) -> None:
    assert call(traced(tmp_path / "t.json", planted.run()), "--json", tmp_path / "e.json").exit_code == 0
    found = Explanation.from_json((tmp_path / "e.json").read_text())
    assert [one for one in found.changes if one.change.startswith(change)], found


# Results of other commands


ROW = comparison.Row(
    "ring", 4, iteration_s=0.1, loading_s=0.001, forward_s=0.02, backward_s=0.04, update_s=0.002, compute_s=0.063,
    exposed_comm_s=0.002, compute_by_rank_s=(0.06, 0.06, 0.06, 0.06), iterations=20, warmup=2,
)  # fmt: skip


def saved(path: Path, result: ResultFile) -> Path:
    result.save(path)
    return path


@pytest.mark.parametrize(
    ("row", "cause", "rank"),
    [
        (ROW, "", None),
        (replace(ROW, slowest_rank=3, compute_by_rank_s=(0.06, 0.06, 0.06, 0.1), exposed_comm_s=0.04), "slow_rank", 3),
        (replace(ROW, loading_s=0.05), "slow_loading", None),
        (replace(ROW, exposed_comm_s=0.05), "network", None),
        (replace(ROW, exposed_comm_s=0.05, servers=1), "shared_server", 4),
        (replace(ROW, exposed_comm_s=None), "network", None),
    ],
)
def test_rows_of_compare_are_explained_by_their_stages(
    tmp_path: Path, row: comparison.Row, cause: str, rank: int | None
) -> None:
    single = replace(ROW, strategy="single", workers=1, iteration_s=0.063)
    other = replace(ROW, strategy="tree", iteration_s=0.08, exposed_comm_s=0.0)
    path = saved(tmp_path / "c.json", comparison.Result(workload="digits", rows=(single, row, other)))
    assert call(path, "--json", tmp_path / "e.json").exit_code == 0
    found = Explanation.from_json((tmp_path / "e.json").read_text())
    assert (found.name, found.kind, found.healthy) == ("ring", "compare", not cause)
    assert [(one.cause, one.rank) for one in found.causes][:1] == ([(cause, rank)] if cause else [])
    assert [(one.change, one.measured) for one in found.changes] == [("tree", True)]
    assert "tree: an iteration" in call(path, "--only", "tree").output


def test_a_result_of_tune_names_the_strategy_that_was_faster(tmp_path: Path) -> None:
    tried = (
        Tried("tree", measured_s=0.05, times_s=(0.05,)),
        Tried("direct", measured_s=0.3),
        Tried("ps", why="failed"),
    )
    made = Tuned(best="tree", iteration_s=0.05, default="auto", default_iteration_s=0.1, tried=tried, workers=4)
    found = call(saved(tmp_path / "t.json", made), columns=1000).output
    assert "auto: an iteration takes 100 ms" in found
    assert "Cause: strategy, 50.0 ms (50 % of it): tree takes 50.0 ms" in found
    assert "Healthy" in call(tmp_path / "t.json", "--only", "tree").output


def test_a_result_of_bench_is_explained_beside_its_contenders(tmp_path: Path) -> None:
    rows = [
        Measured(transport, "ring", 4, nbytes, median_s=seconds, correct=True, repetitions=9)
        for transport, nbytes, seconds in (
            *(("tcp", 1000, 0.01), ("tcp", 1_000_000, 0.011), ("tcp", 100_000_000, 0.5)),
            *(("shm", 1000, 0.001), ("shm", 1_000_000, 0.002), ("shm", 100_000_000, 0.1)),
        )
    ]
    path = saved(tmp_path / "b.json", BenchResult(rows=tuple(rows)))
    small = call(path, "--only", "of 1 MB", columns=1000).output
    assert "tcp:ring allreduce of 1 MB on 4 ranks" in small
    assert "Cause: fixed_cost" in small
    assert "shm:ring: 2.00 ms measured, 82 % less" in small
    assert "Cause: network" in call(path, "--only", "of 100 MB").output


@pytest.mark.parametrize(
    "content", ['{"tried": 5}', '{"tried": [], "machine": ""}', '{"workload": 1, "rows": [{"strategy": []}]}']
)
def test_damaged_results_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    result = call(path, columns=1000)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert str(path) in result.output


def test_hostile_names_in_a_result_are_shown_without_control_characters(tmp_path: Path) -> None:
    row = replace(ROW, strategy="\x1b]0;evil\x07[red]<script>", exposed_comm_s=0.05)
    path = saved(
        tmp_path / "c.json", comparison.Result(workload="digits", rows=(row, replace(ROW, strategy="\x1b[2J")))
    )
    found = call(path).output
    assert "\x1b" not in found
    assert "\x07" not in found
    assert "[red]<script>" in found.replace("\n", "")


def test_the_page_of_the_documentation_lists_all_words() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "explain.md").read_text()
    assert [word for word in CAUSES if f"`{word}`" not in page] == []
