"""Bad input is refused before anything starts, with the remedy in the text."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from syncline.errors import StrategyError, SynclineError, UsageError
from syncline.strategy import words as presets
from syncline.strategy.words import PRESETS
from syncline_bench.cases import Comparison, comparison_of

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits are a file of scikit-learn")


def comparison(**changes: Any) -> Comparison:
    values: dict[str, Any] = {
        "workload": "digits",
        "workers": 4,
        "strategies": ["ring", "ps(servers=2)"],
        "epochs": None,
        "iterations": None,
        "batch": None,
        "seed": 0,
        "json_path": None,
        "report_path": None,
        "lab": None,
    }
    return comparison_of(**{**values, **changes})


def test_the_single_worker_comes_first_and_the_order_is_kept() -> None:
    cases = comparison().cases
    assert [case.strategy for case in cases] == ["single", "ring", "ps(servers=2)"]
    assert [(case.workers, case.servers) for case in cases] == [(1, 0), (4, 0), (4, 2)]


def test_single_may_be_listed_and_is_run_once() -> None:
    assert [case.strategy for case in comparison(strategies=["ring", "single"]).cases] == ["single", "ring"]
    assert [case.strategy for case in comparison(strategies=[]).cases] == ["single"]


def test_every_row_does_the_same_work() -> None:
    cases = comparison(epochs=2).cases
    assert len({(case.batch, case.iterations) for case in cases}) == 1
    assert {case.iterations for case in comparison(iterations=7).cases} == {7}
    assert {case.batch for case in comparison(batch=32).cases} == {32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": (2, 4, 2)}, "--workers takes different numbers, got 2, 4, 2"),
        ({"workers": ()}, "got none"),
        ({"workers": (1, 2), "strategies": ["ps(servers=2, on=workers)"]}, "servers"),
        ({"epochs": 1, "iterations": 1}, "give one of them"),
        ({"timeline_path": "trace.gz"}, "a timeline is a file such as trace.json.gz"),
        ({"timeline_path": "/nowhere/t.json"}, "there is no folder /nowhere"),
        ({"timeline_path": "t.json", "json_path": "t.json"}, "both name the file"),
        ({"batch": 3}, "no sample for each of 4 workers"),
        ({"workload": "digitz"}, "digits"),
        ({"strategies": ["ring", "ring codec=none"]}, "listed twice"),
        ({"strategies": ["ddp", "ddp(bucket=25MiB)"]}, "ddp is listed twice"),
        ({"strategies": ["ddp(codec=int8, hook=fp16)"]}, "ddp has one hook: choose hook=fp16, PyTorch's, or"),
        ({"strategies": ["ddp(codec=int9)"]}, "did you mean 'int8'"),
        ({"strategies": ["ddp(rate=1gbit)"]}, r"Gloo's links have no rate: use ddp\(group=syncline, rate=...\)"),
        ({"strategies": ["ddp(group=glou)"]}, "did you mean 'gloo'"),
        ({"workload": "replay:googlenet", "batch": 32}, "leave --batch out"),
        ({"target": 0.0}, "--target has to be an accuracy above 0 and up to 1, such as 0.97, got 0"),
        ({"target": 1.01}, "got 1.01"),
        ({"target": 97.0}, "got 97"),
        ({"target": float("nan")}, "--target has to be an accuracy"),
        ({"workload": "replay:googlenet", "target": 0.5}, "--target: .* has no test set: use digits"),
        ({"workload": "replay:googlenet", "evaluate_every": 5}, "--evaluate-every: .* has no test set"),
        ({"workload": "digits(slow_rank=4, slowdown=3)"}, "slow_rank=4 is not one of 4 workers"),
        ({"workload": "digits(slow_rank=3, slowdown=3)", "workers": (2, 4)}, "slow_rank=3 is not one of 2 workers"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        comparison(**changes)


def test_peers_stand_beside_strategies(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    path.write_text("name,elements,forward_s,backward_s\na,8,0.1,0.1\n")
    found = comparison(strategies=["ring", "ddp(hook=fp16, bucket=5MiB)", "ps(servers=2)"], workload=f"trace:{path}")
    assert [case.strategy for case in found.cases] == ["single", "ring", "ddp(bucket=5MiB, hook=fp16)", "ps(servers=2)"]
    assert [case.batch for case in found.cases] == [1, 4, 4, 4]
    assert found.processes == 6
    assert found.trace is not None
    assert found.trace.total_s == pytest.approx(0.2)
    assert comparison().trace is None


def test_the_workload_is_named_in_its_canonical_form() -> None:
    found = comparison(workload=" digits( prefetch=2, loading=0.005 ) ")
    assert found.workload == "digits(loading=5ms, prefetch=2)"
    assert found.pipeline.prefetch == 2
    with pytest.raises(UsageError, match="cannot be negative"):
        comparison(workload="digits(loading=-5ms)")


def test_every_strategy_has_a_row_for_each_number_of_workers() -> None:
    cases = comparison(workers=(4, 1, 2)).cases
    assert [(case.strategy, case.workers, case.servers) for case in cases] == [
        ("single", 1, 0),
        *(
            (strategy, count, servers)
            for count in (1, 2, 4)
            for strategy, servers in (("ring", 0), ("ps(servers=2)", 2))
        ),
    ]
    assert comparison(workers=[2]).cases == comparison(workers=2).cases
    assert comparison(workers=(1, 2, 4)).processes == 6


def test_presets_may_stand_for_the_same_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "find_spec", lambda _: None)  # no message library, so TCP in the place of both
    _, *cases = comparison(strategies=["caffe-mpi", "mxnet", "tensorflow"]).cases
    assert [case.strategy for case in cases] == [
        "ring schedule=wait_free",
        *["ps(servers=1) schedule=wait_free transport=tcp"] * 2,
    ]
    assert [case.preset for case in cases] == [PRESETS[name] for name in ("caffe-mpi", "mxnet", "tensorflow")]
    with pytest.raises(UsageError, match="mxnet is listed twice"):
        comparison(strategies=["mxnet", " mxnet "])


def test_a_lab_has_a_rate_and_no_shared_memory() -> None:
    assert comparison(lab="1gbit").lab == 1e9
    assert comparison().lab is None
    for text, words in (("fast", "--lab must be a number with a unit"), ("0bit", "a rate above 0")):
        with pytest.raises(UsageError, match=words):
            comparison(lab=text)
    with pytest.raises(StrategyError, match="use transport=auto or tcp"):
        comparison(lab="1gbit", strategies=["ring transport=shm"])


@pytest.mark.parametrize("text", ["rnig", "ring codec", "ps(servers=0)", "ps(server=1)"])
def test_wrong_strategies_are_refused(text: str) -> None:
    with pytest.raises(SynclineError):
        comparison(strategies=["ring", text])


def test_an_unknown_strategy_names_the_nearest_one() -> None:
    with pytest.raises(StrategyError, match="ring"):
        comparison(strategies=["rng"])


def test_nothing_is_left_where_results_will_go(tmp_path: Path) -> None:
    found = comparison(json_path=tmp_path / "r.json", report_path=str(tmp_path / "r.html"))
    assert (found.json_path, found.report_path) == (tmp_path / "r.json", tmp_path / "r.html")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"there is no folder .*missing for r\.html: make it"):
        comparison(report_path=tmp_path / "missing" / "r.html")
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "r.json", "there is no folder"),
        (Path("/proc/r.html"), "cannot write /proc/r.html"),  # where root, too, has the permission but cannot
        (tmp_path / ("long" * 70), "File name too long"),
    ):
        with pytest.raises(UsageError, match=words):
            comparison(json_path=path)
        with pytest.raises(UsageError, match=words):
            comparison(report_path=path)
    with pytest.raises(UsageError, match=r"both name the file .*one: choose two"):
        comparison(json_path=tmp_path / "one", report_path=tmp_path / "." / "one")
    with pytest.raises(UsageError, match="both name standard output"):
        comparison(json_path="-", report_path="-")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        comparison(json_path=tmp_path / "r.json")


def test_a_target_is_looked_for_several_times_in_an_epoch() -> None:
    assert {(case.evaluate_every, case.target) for case in comparison().cases} == {(0, None)}
    assert {(case.evaluate_every, case.target) for case in comparison(target=0.97).cases} == {(2, 0.97)}  # of 23 steps
    assert {case.evaluate_every for case in comparison(target=0.97, evaluate_every=5).cases} == {5}
    assert {case.evaluate_every for case in comparison(batch=1000, target=0.97).cases} == {1}


def test_cases_remember_the_text_that_was_given() -> None:
    cases = comparison(strategies=[" ring  codec=none", "ddp( )", "mxnet"]).cases
    assert [case.requested for case in cases] == ["single", "ring  codec=none", "ddp( )", "mxnet"]


def test_the_slow_worker_need_not_be_there_where_one_trains_alone() -> None:
    found = comparison(workload="digits(slow_rank=3, slowdown=3)")
    assert found.speed.slow_rank == 3
    assert len(comparison(workload="digits(slow_rank=3, slowdown=3)", strategies=["single"], workers=1).cases) == 1
