"""The command line of predict for workloads: what it takes, its rows, and refusals with status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import call

from syncline_bench.machine import provenance


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    path = tmp_path / "layers.csv"
    path.write_text("name,elements,forward_s,backward_s\none,300000,0.01,0.01\ntwo,300000,0.01,0.01\n")
    return ["predict", "--workload", f"trace:{path}"]


def test_rows_have_what_programs_read_and_people_see_a_table(asked: list[str], tmp_path: Path) -> None:
    where = tmp_path / "rows.json"
    line = [*asked, "--network", "10gbe", "--workers", "2,4", "8", "--strategies", "ring schedule=fifo", "ddp"]
    result = call(*line, "--price", "2", "--epoch-images", "5000", "--json", str(where))
    assert result.exit_code == 0, result.output
    content = json.loads(where.read_text())
    wanted = (
        "strategy workers iteration_s low_s high_s images_per_s scaling_efficiency comm_s exposed_comm_s bottleneck"
    )
    assert set(wanted.split()) <= content["rows"][0].keys()
    assert [(row["requested"], row["workers"]) for row in content["rows"]] == [
        (strategy, workers) for workers in (2, 4, 8) for strategy in ("ring schedule=fifo", "ddp")
    ]
    assert {"name", "low", "high", "measured", "source"} <= content["constants"][0].keys()
    assert {key: content[key] for key in provenance() if key != "started"} == {
        key: value for key, value in provenance().items() if key != "started"
    }
    for said in ("bottleneck", "no measurements of this network", "Fastest on 8 workers", "assumed to be"):
        assert said in " ".join(result.output.split())


def test_a_network_may_be_written_out_and_rows_go_to_standard_output(asked: list[str]) -> None:
    result = call(*asked, "--network", "alpha=45us,beta=1.2ns,gamma=2.5ns", "10gbe", "--workers", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--network", "10gb", "--workers", "2"), "did you mean '10gbe'"),
        (("--network", "10gbe", "--workers", "0"), "1 or more, got 0"),
        (("--network", "10gbe"), "--workers is missing"),
        (("--network", "10gbe", "--workers", "2", "--strategies", "rign"), "did you mean 'ring'"),
        (("--network", "10gbe", "--workers", "2", "--bytes", "1MB"), "belongs to --collective"),
        (("--network", "10gbe", "--workers", "2", "--collective", "ring"), "give either"),
        (("--workers", "2"), "--network"),
    ],
)
def test_refusals(asked: list[str], arguments: tuple[str, ...], says: str) -> None:
    result = call(*asked, *arguments)
    assert result.exit_code == 2
    assert says in result.output
