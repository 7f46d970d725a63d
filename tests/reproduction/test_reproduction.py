"""The page of published figures: what is on it, how figures are judged, and that the one in docs is what comes out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.errors import DataError, UsageError
from syncline_bench.cli import cli
from syncline_bench.predict.networks import load_network
from syncline_bench.reproduction.blocks import FIT, FOLLOWS, UNEXPLAINED, Compared, held_of, markdown
from syncline_bench.reproduction.clusters import (
    against_servers,
    against_the_library,
    curves,
    fitted_per_layer_s,
    tianhe,
)
from syncline_bench.reproduction.measured import (
    allreduce_costs,
    bcaffe,
    concurrent,
    fair_sharing,
    googlenet_cases,
    sharing_errors,
)
from syncline_bench.reproduction.page import page
from syncline_bench.reproduction.systems import stages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "reproduction.md"
DATA = Path(os.environ.get("SYNCLINE_PUBLISHED", ROOT.parent / "shared" / "data"))

published = pytest.mark.skipif(
    not (DATA / "bcaffe_measured_throughput.csv").is_file(),
    reason="needs the published tables; SYNCLINE_PUBLISHED names their folder",
)


def test_a_figure_is_judged_by_numbers() -> None:
    assert Compared("", 10.0, 11.0).verdict == FOLLOWS
    assert Compared("", 10.0, 7.6).verdict == UNEXPLAINED
    assert Compared("", 10.0, 11.0, fit=True).verdict == FIT
    assert Compared("", 2.0, 3.0).verdict == UNEXPLAINED
    assert Compared("", 2.0, 3.0, most=True).verdict == FOLLOWS
    assert Compared("", 2.0, 4.0, most=True).verdict == UNEXPLAINED
    assert Compared("", (2.3, 4.1), 4.0).deviation == 0
    assert Compared("", (2.0, 4.0), 5.0).deviation == pytest.approx(0.25)


def test_taihulight_is_as_the_formulas_have_it_and_the_page_in_docs_says_so() -> None:
    library, servers = against_the_library(), against_servers()
    ratios = [held.ours for held in held_of([library]) if isinstance(held, Compared)]
    assert ratios[:3] == pytest.approx([4.04, 2.23, 3.52], abs=0.01)
    assert ratios[3:] == pytest.approx(ratios[:3])
    alexnet = [held for held in held_of([servers]) if held.what.startswith("AlexNet")]
    assert [held.verdict for held in alexnet] == [UNEXPLAINED, UNEXPLAINED, FIT]
    assert fitted_per_layer_s() == pytest.approx(2.59e-3, rel=0.01)
    written = PAGE.read_text()
    for chapter in (library, servers, curves()):
        assert markdown([chapter]) in written, chapter.title


@pytest.mark.slow
def test_tianhe_and_the_stages_need_no_tables_and_are_as_the_page_in_docs_says() -> None:
    pytest.importorskip("torch")  # which layers are derived with
    written, system = PAGE.read_text(), tianhe()
    for chapter in (system, stages()):
        assert markdown([chapter]) in written, chapter.title
    assert UNEXPLAINED not in {held.verdict for held in held_of([system])}


@published
@pytest.mark.slow
def test_the_page_in_docs_is_what_comes_out() -> None:
    assert page(DATA) == PAGE.read_text()


@published
def test_the_cases_of_googlenet_come_out_within_the_limits_and_in_order() -> None:
    cases = googlenet_cases(DATA)
    assert cases.error("given constants") <= 0.06
    assert cases.error("OSU curve") <= 0.08
    assert all(map(cases.in_order, cases.ways))


@published
def test_exchanges_share_a_link_fairly() -> None:
    errors = sharing_errors(concurrent(DATA)[40 << 20])
    assert len(errors) == 15
    assert sum(map(abs, errors)) / len(errors) <= 0.06


@published
def test_measured_allreduces_lie_on_straight_lines_and_go_on_at_the_rate_of_the_largest() -> None:
    cost = allreduce_costs(DATA)[2]
    assert cost(4) == pytest.approx(31.92e-6)
    assert cost(6) == pytest.approx((31.92e-6 + 32.2e-6) / 2)
    assert cost(1 << 21) == pytest.approx(2 * cost(1 << 20))


def test_without_the_published_tables_it_says_which_are_missing_and_where_they_are(tmp_path: Path) -> None:
    for chapter in (bcaffe(None), bcaffe(tmp_path), fair_sharing(None)):
        text = markdown([chapter])
        assert "Not computed" in text
        assert "github.com/" in text
        assert not chapter.limits
    with pytest.raises(UsageError, match=r"no folder .*nowhere"):
        page(tmp_path / "nowhere")


def test_a_table_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "dlscheduling_results_avg.csv").write_text("job_num,msg_size,avg_latency\n1,x,2\n")
    with pytest.raises(DataError, match=r"dlscheduling_results_avg\.csv, line 2"):
        concurrent(tmp_path)


def test_the_page_in_docs_names_the_constants_of_networks() -> None:
    text = PAGE.read_text()
    for name in ("taihulight", "10gbe_k80", "1gbe", "25gbe", "ib100", "pcie"):
        for key in load_network(name).constants:
            assert f"| `{name}` | {key} |" in text


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["reproduce", "--data", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output
