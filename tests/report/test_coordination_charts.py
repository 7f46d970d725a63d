"""How workers were coordinated, on the page: histograms and waits, and nothing where there is nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline_bench.report import charts
from syncline_bench.report.charts import SINGLE, bins, shares
from syncline_bench.report.comparison import Result
from syncline_bench.report.page import comparison_page

histograms = st.dictionaries(st.integers(0, 10**6), st.integers(1, 10**6), min_size=1, max_size=8)


@given(st.lists(histograms, min_size=1, max_size=4))
def test_every_step_is_in_one_bin(found: list[dict[int, int]]) -> None:
    parts = bins(found)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[0].start == 0
    assert len(parts) <= 30
    for counts in found:
        assert all(any(number in part for part in parts) for number in counts)
        assert sum(shares(counts, parts)) == pytest.approx(1)


def test_small_staleness_has_a_bin_for_each() -> None:
    """Beside a mode without a bound too."""
    assert bins([{0: 1, 3: 5}]) == [range(1), range(1, 2), range(2, 3), range(3, 4)]
    assert len(bins([{SINGLE: 1}])) == SINGLE + 1
    mixed = bins([{0: 1, 3: 5}, {SINGLE + 1: 1}])
    assert mixed[:4] == bins([{3: 1}])
    assert mixed[5:] == [range(5, 9), range(9, 17)]
    assert shares({0: 1, 8: 1, 16: 2}, mixed) == [0.25, 0, 0, 0, 0, 0.25, 0.5]


@pytest.fixture
def stale(mixed: Result) -> Result:
    single, ring, server, *rest = mixed.rows
    waits = ((0.0, 1.5, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.25, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
    first = dataclasses.replace(
        ring, staleness={0: 30, 1: 9, 3: 2}, version_lag={0: 4, 250: 1}, waits=waits, wait_s_per_step=0.0125
    )
    second = dataclasses.replace(
        server, staleness={0: 1}, slowest_rank=2, compute_by_rank_s=(1.0, 1.0, 3.0, 1.0), time_to_accuracy_s=2.25
    )
    return dataclasses.replace(mixed, rows=(single, first, second, *rest), target=0.97)


def test_there_is_a_chart_for_what_was_counted(mixed: Result, stale: Result) -> None:
    found = charts.comparison_charts(stale)
    before, after = ([chart.title for chart in some] for some in (charts.comparison_charts(mixed), found))
    added = [title for title in after if title not in before]
    assert added == ["Staleness", "Version lag", "Who waited for whom: ring"]
    assert [title for title in after if title not in added] == before
    drawn = {chart.title: chart for chart in found}
    assert [key.label for key in drawn["Staleness"].keys] == ["ring", "ps(servers=1)"]
    assert [key.label for key in drawn["Version lag"].keys] == ["ring"]
    assert ">129\N{EN DASH}256<" in drawn["Version lag"].svg
    waits = drawn["Who waited for whom: ring"].svg
    assert ">1.50<" in waits
    assert ">250<" in waits  # milliseconds


@pytest.fixture(scope="module")
def without(mixed: Result) -> str:
    """The page of a comparison in which nothing of it was counted."""
    return comparison_page(mixed)


@pytest.mark.slow
def test_the_page_has_columns_for_it_and_names_the_slowest(without: str, stale: Result) -> None:
    text = comparison_page(stale)
    for head in ("staleness", "waited", "to acc"):
        assert f'<th scope="col">{head}' in text
        assert f'<th scope="col">{head}' not in without
    assert "<td>0.37 (3)</td>" in text
    assert "<td>12.5</td>" in text
    assert "<td>2.25</td>" in text
    assert "Rank 2 computes 3.0 times as long as the median worker." in text
    heads = text.count('<th scope="col">') - 1
    assert f'colspan="{heads}"' in text


def test_a_comparison_without_any_of_it_looks_as_before(mixed: Result, without: str) -> None:
    waited = dataclasses.replace(mixed.rows[1], staleness={0: 9}, waits=((0.0, 0.0), (0.0, 0.0)), wait_s_per_step=0.0)
    rows = (mixed.rows[0], waited, *mixed.rows[2:])
    assert comparison_page(dataclasses.replace(mixed, rows=rows)) == without
