"""What compare's options mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import Recorder, call


def test_a_list_takes_all_values_up_to_the_next_option(compared: Recorder) -> None:
    result = call(
        "compare", "--strategies", "ring", "ps(servers=1) schedule=fifo", "tree", "--workers", "3", "--json", "r.json"
    )
    assert result.exit_code == 0, result.output
    assert compared.kwargs["workers"] == (3,)
    assert compared.kwargs["strategies"] == ("ring", "ps(servers=1) schedule=fifo", "tree")
    assert compared.kwargs["json_path"] == Path("r.json")
    assert compared.kwargs["report_path"] is None
    assert compared.kwargs["framework"] == ("torch",)


def test_compare_passes_everything_on(compared: Recorder) -> None:
    compared.result = 130
    line = "compare --workload cifar10:/data --epochs 3 --batch 64 --seed 5 --report p.html --timeout 9.5 --lab 1gbit"
    line += " --target 0.97 --evaluate-every 4 --framework numpy jax --launcher local"
    assert call(*line.split(), "--trace", "t.json").exit_code == 130
    assert compared.kwargs == {
        "workload": "cifar10:/data",
        "workers": (4,),
        "strategies": ("ring", "ps(servers=1)"),
        "epochs": 3,
        "iterations": None,
        "batch": 64,
        "seed": 5,
        "json_path": None,
        "report_path": Path("p.html"),
        "timeline_path": Path("t.json"),
        "timeout": 9.5,
        "lab": "1gbit",
        "target": 0.97,
        "evaluate_every": 4,
        "framework": ("numpy", "jax"),
        "launcher": "local",
    }


def test_workers_are_a_list(compared: Recorder) -> None:
    assert call("compare", "--workers", "1", "2", "4", "--strategies", "mxnet").exit_code == 0
    assert (compared.kwargs["workers"], compared.kwargs["strategies"]) == ((1, 2, 4), ("mxnet",))
    assert call("compare", "--workers", "2", "0").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        "compare --iterations 0",
        "compare --epochs -1",
        "compare --batch 0",
        "compare --evaluate-every 0",
        "compare --seed -1",
        "compare --timeout 0",
        "compare --workers 0",
        "tune --workers 1",
        "tune --seed -1",
    ],
)
def test_numbers_out_of_range_are_refused(words: str, compared: Recorder) -> None:
    done = call(*words.split())
    assert done.exit_code == 2
    assert "is not in the range" in done.output
    assert compared.kwargs == {}
