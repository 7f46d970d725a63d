"""Where a comparison runs: a lab, played by a stand-in, is made once, used by every row, and always removed."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.errors import UsageError
from syncline.nouns import Rate, Spec
from syncline_bench import compare
from syncline_bench.cases import Case, Comparison
from syncline_bench.report.rows import Row
from syncline_bench.site import HERE, Site, site_of
from syncline_bench.workloads._trace import Trace, TracedLayer

TRACE = Trace("t", (TracedLayer("a", (Spec("weight", (1_000_000,)),), 0.001, 0.001),))


class FakeLab:
    """Notes what is asked of it; its hosts are this machine."""

    made: list[FakeLab]

    def __init__(self, hosts: int, rate: Rate, name: str | None = None) -> None:
        self.hosts, self.rate, self.name = hosts, rate, name
        self.open = False
        FakeLab.made.append(self)

    def __enter__(self) -> FakeLab:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def placement(self, rank: int, per_host: int = 1) -> Any:
        raise NotImplementedError

    def goodput(self) -> float:
        assert self.open
        return 11e6


@pytest.fixture
def labs(monkeypatch: pytest.MonkeyPatch) -> list[FakeLab]:
    module: Any = types.ModuleType("syncline_bench.lab")
    module.Lab = FakeLab
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    FakeLab.made = []
    return FakeLab.made


def test_without_a_rate_there_is_no_lab(labs: list[FakeLab]) -> None:
    with site_of(4, None, print) as site:
        assert site == HERE
    assert labs == []
    assert (HERE.lab, HERE.rate, HERE.name) == (None, None, None)


def test_a_lab_lives_as_long_as_the_comparison(labs: list[FakeLab]) -> None:
    said: list[str] = []
    with site_of(3, Rate(1e8), said.append) as site:
        (lab,) = labs
        assert (lab.hosts, lab.rate, lab.open) == (3, 1e8, True)
        assert (site.name, site.goodput_bytes_per_s) == ("100Mbit", 11e6)
        assert id(site.lab) == id(lab)
    assert not lab.open
    assert said == ["lab: 3 hosts, links of 100Mbit, goodput 88 Mbit/s"]


def test_one_host_has_no_link_to_measure(labs: list[FakeLab]) -> None:
    with site_of(1, Rate(1e8), print) as site:
        assert site.goodput_bytes_per_s is None
    assert len(labs) == 1


def test_rows_in_a_lab_get_the_bound_of_its_link(
    labs: list[FakeLab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Site] = []

    def measure(case: Case, *arguments: Any, **_: Any) -> Row:
        seen.append(arguments[-1])
        return Row(case.strategy, case.workers, iteration_s=1.0, replicas_equal=True)

    monkeypatch.setattr(compare, "measure", measure)
    cases = (Case("single", 1, 0, 1, 5), Case("ring", 2, 0, 2, 5), Case("ps(servers=1)", 2, 1, 2, 5, rate=8e6))
    comparison = Comparison("trace:x", cases, 0, None, 5, tmp_path / "r.json", None, Rate(1e8), TRACE)
    quiet = Console(file=io.StringIO(), force_terminal=False, width=80)
    assert compare.carry_out(comparison, 10.0, quiet, quiet) == 0
    assert [lab.hosts for lab in labs] == [3]
    assert [id(site.lab) for site in seen] == [id(lab) for lab in labs] * 3
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["lab"], data["goodput_bytes_per_s"]) == ("100Mbit", 11e6)
    payload = 1e8 / 8 * 1448 / 1514
    bounds = [row["bound_s"] for row in data["rows"]]
    assert bounds == pytest.approx([0.002, 4e6 / payload, 4e6 / (8e6 / 8 * 1448 / 1514)])
    assert [row["of_bound"] for row in data["rows"]] == pytest.approx(bounds)


def test_a_lab_that_cannot_be_made_leaves_no_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NoLab(FakeLab):
        def __enter__(self) -> FakeLab:
            raise UsageError("a lab needs root")

    module: Any = types.ModuleType("syncline_bench.lab")
    module.Lab = NoLab
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    FakeLab.made = []
    comparison = Comparison(
        "trace:x", (Case("single", 1, 0, 1, 5),), 0, None, 5, tmp_path / "r.json", None, Rate(1e8), TRACE
    )
    quiet = Console(file=io.StringIO(), force_terminal=False)
    with pytest.raises(UsageError, match="needs root"):
        compare.carry_out(comparison, 10.0, quiet, quiet)
    assert not (tmp_path / "r.json").exists()
