"""The command line of predict: what it takes, its rows, and refusals with status 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calling import call

from syncline_bench.machine import provenance

ASKED = ("predict", "--collective", "ring,tree", "--bytes", "1MB,60.97MB", "--workers", "2,8")


def test_rows_go_to_a_file(tmp_path: Path) -> None:
    result = call(*ASKED, "--network", "10gbe", "--json", str(tmp_path / "rows.json"))
    assert result.exit_code == 0, result.output
    assert "Network 10gbe" in result.output
    content = json.loads((tmp_path / "rows.json").read_text())
    assert provenance().keys() <= content.keys()
    assert content["source_sha256"] == provenance()["source_sha256"]
    rows = content["rows"]
    assert len(rows) == 8
    assert {"algorithm", "bytes", "workers", "comm_s", "low_s", "high_s"} <= rows[0].keys()
    assert [rows[-1][key] for key in ("algorithm", "bytes", "workers")] == ["tree", 60_970_000, 8]


def test_a_network_may_be_written_out_and_rows_go_to_standard_output() -> None:
    result = call(*ASKED, "--network", "alpha=45us,beta=1.2ns,gamma=2.5ns", "--per-node", "4", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["per_node"] for row in rows} == {2, 4}
    # Two workers of one host: the tree's messages go one by one through its port.
    expected = 2 * (45e-6 + 1.2e-3) + 2.5e-3
    assert rows[1]["comm_s"] == pytest.approx(expected)


def test_a_network_may_be_given_in_loggps_constants() -> None:
    result = call(*ASKED, "--network", "L=5us,o=2us,g=3us,G=1ns", "--json", "-")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    alone = 2e-6 + (1e6 - 1) * 1e-9 + 5e-6 + 2e-6  # o + (n-1) G + L + o
    assert (rows[1]["algorithm"], rows[1]["workers"]) == ("tree", 2)
    assert rows[1]["comm_s"] == pytest.approx(2 * alone)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--network", "10gb"), "did you mean '10gbe'"),
        (("--network", "alpha=-45us,beta=1ns"), "alpha cannot be negative"),
        (("--network", "10gbe", "--workers", "0"), "--workers has to be 1 or more"),
        (("--network", "10gbe", "--per-node", "0"), "per-node"),
        (("--network", "10gbe", "--json", "/nowhere/rows.json"), "there is no folder"),
        ((), "--network"),
    ],
)
def test_refusals(arguments: tuple[str, ...], says: str) -> None:
    result = call(*ASKED, *arguments)
    assert result.exit_code == 2
    assert says in result.output
