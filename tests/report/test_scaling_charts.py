"""Curves over the number of workers: where they are drawn, of what, and that rows stay apart elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline_bench.report import charts, comparison, figures
from syncline_bench.report.comparison import Result, Row
from syncline_bench.report.page import comparison_page

COUNTS = (1, 2, 4)


@pytest.fixture(scope="module")
def several(mixed: Result) -> Result:
    """Two strategies, one of them asked for as a preset, and a peer that counts no waiting, on 1, 2 and 4 workers."""
    single, ring, served = mixed.rows[:3]
    preset = replace(served, preset="mxnet", note="tcp in the place of ZeroMQ")
    peer = replace(ring, strategy="ddp", exposed_comm_s=None, bytes_sent_per_step=None, traffic=())
    rows = [replace(row, workers=count) for count in COUNTS for row in (ring, preset, peer)]
    return replace(mixed, rows=(single, *rows))


@pytest.fixture(scope="module")
def shown(several: Result) -> str:
    """Its page."""
    return comparison_page(several)


def titled(result: Result) -> dict[str, figures.Chart]:
    return {chart.title: chart for chart in charts.comparison_charts(result)}


def test_time_and_efficiency_are_drawn_against_the_workers(several: Result) -> None:
    drawn = titled(several)
    times, shares = drawn["Communication time against workers"], drawn["Scaling efficiency against workers"]
    assert [key.label for key in times.keys] == ["ring", "mxnet: ps(servers=1)"]
    assert [key.label for key in shares.keys] == ["ring", "mxnet: ps(servers=1)", "ddp"]
    assert all(f">{count}<" in times.svg for count in COUNTS)
    assert ">100 %<" in shares.svg


def test_one_number_of_workers_draws_no_such_chart(several: Result) -> None:
    four = replace(several, rows=(several.rows[0], *(row for row in several.rows if row.workers == 4)))
    assert four.counts == (4,)
    assert not any("against workers" in title for title in titled(four))


def test_rows_of_one_strategy_share_its_colour_and_are_told_apart(several: Result, shown: str) -> None:
    styles = figures.strategy_styles([row.name for row in several.rows])
    assert len(set(styles)) == 4
    assert styles[1] == styles[4] == styles[7]
    labels = [several.label(row) for row in several.rows]
    assert len(set(labels)) == len(labels)
    assert labels[:3] == ["single", "ring, 1 worker", "mxnet: ps(servers=1), 1 worker"]
    assert labels[-1] == "ddp, 4 workers"
    assert "Who talked to whom: ring, 4 workers" in shown
    assert "Communication time against workers" in shown


@pytest.mark.slow
def test_numbers_that_are_missing_leave_a_gap(several: Result) -> None:
    failed = replace(several.rows[4], exposed_comm_s=None, scaling_efficiency=None, error="rank 1 died")
    rows = (*several.rows[:4], failed, *several.rows[5:])
    assert "Communication time against workers" in titled(replace(several, rows=rows))
    nothing = tuple(Row("ring", count, error="no") for count in COUNTS)
    assert titled(replace(several, rows=nothing)) == {}


def test_what_is_not_as_in_the_original_is_said_once(several: Result, shown: str) -> None:
    assert comparison.remarks(several).count("mxnet: tcp in the place of ZeroMQ.") == 1
    assert "tcp in the place of ZeroMQ" in shown
