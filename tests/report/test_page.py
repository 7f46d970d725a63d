"""The page as a whole: well-formed, self-contained, escaped, with every row and chart."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from syncline_bench.report import charts, figures
from syncline_bench.report.comparison import STAGES, Point, Result, Row
from syncline_bench.report.page import comparison_page

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """Collects what the tests ask about, and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "xlink:href"):
                (self.references if (value or "").startswith("#") else self.links).append((value or "").lstrip("#"))
            self.references += re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def text(mixed: Result) -> str:
    return comparison_page(mixed)


@pytest.fixture
def reader(text: str) -> Reader:
    return read(text)


@pytest.fixture(scope="module")
def drawn(mixed: Result) -> tuple[figures.Chart, ...]:
    return charts.comparison_charts(mixed)


def test_the_page_is_self_contained(reader: Reader, text: str) -> None:
    assert reader.links == []
    assert reader.tags["script"] == reader.tags["img"] == reader.tags["image"] == reader.tags["link"] == 0
    assert "default-src 'none'" in text
    assert "@import" not in text
    # The only addresses allowed are none at all: matplotlib's namespaces and metadata are taken out.
    assert "http://" not in text
    assert "https://" not in text


def test_ids_are_unique_and_references_meet_one(reader: Reader) -> None:
    assert max(Counter(reader.ids).values()) == 1
    assert set(reader.references) <= set(reader.ids)
    assert reader.references


def test_every_row_is_on_the_page_as_text(reader: Reader, mixed: Result) -> None:
    text = "".join(reader.text)
    for row in mixed.rows:
        assert row.strategy in text
    assert "PeerLost: rank 3 <b>died</b>" in text


def test_charts_are_titled_and_explained(drawn: tuple[figures.Chart, ...]) -> None:
    titles = [chart.title for chart in drawn]
    assert titles[:5] == [
        "Training loss",
        "Test accuracy",
        "Test accuracy over time",
        "Time per iteration",
        "Bytes on the wire",
    ]
    # Who talked to whom: one chart for every row of more than one process.
    assert len(titles) == 5 + 3
    for chart in drawn:
        assert chart.caption.endswith(".")
        assert "<title>" in chart.svg


@pytest.mark.slow
def test_two_pages_of_one_result_are_equal(mixed: Result, text: str) -> None:
    assert comparison_page(mixed) == text


def test_server_processes_are_named_in_the_traffic(drawn: tuple[figures.Chart, ...]) -> None:
    ring, server = (chart for chart in drawn if "whom: ring" in chart.title or "ps(" in chart.title)
    assert ">S0<" not in ring.svg
    assert ">S0<" in server.svg


def test_a_strategy_has_one_colour_and_neighbours_differ(mixed: Result, drawn: tuple[figures.Chart, ...]) -> None:
    styles = figures.strategy_styles([row.strategy for row in mixed.rows])
    assert len({(style.color, style.dash) for style in styles}) == len(styles)
    legends = [{key.label: key.color for key in chart.keys} for chart in drawn if chart.line_keys]
    assert len(legends) == 3
    assert all(legend == legends[0] for legend in legends)


def test_the_bars_know_every_stage() -> None:
    assert tuple(charts.STAGES) == STAGES


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "rows",
    [
        (),
        (Row("single", 1, error="no"),),
        (Row("single", 1, iteration_s=0.0, bytes_sent_per_step=0.0, traffic=((0.0,),)),),
        (Row("ring", 2, iteration_s=0.1, bytes_sent_per_step=0.0, traffic=((0.0, 0.0), (0.0, 0.0))),),
        (Row("ring", 64, traffic=tuple(tuple(float(i + j) for i in range(64)) for j in range(64))),),
        tuple(Row(f"strategy{index}", 2, iteration_s=0.1, replicas_equal=False) for index in range(20)),
    ],
)
def test_results_with_little_or_much_in_them_make_a_page(rows: tuple[Row, ...]) -> None:
    reader = read(comparison_page(Result("m", 1, {}, None, workload="digits", rows=rows)))
    assert reader.links == []


def test_what_really_ran_is_said_where_it_differs(mixed: Result, reader: Reader) -> None:
    assert "ran as ring transport=shm" in "".join(reader.text)
    same = dataclasses.replace(mixed, rows=tuple(dataclasses.replace(row, chosen=row.strategy) for row in mixed.rows))
    assert "ran as" not in "".join(read(comparison_page(same)).text)


def test_axes_over_many_powers_of_ten_have_plain_labels() -> None:
    row = Row("single", 1, curve=tuple(Point(step, float(step), loss=10.0**-step) for step in range(6)))
    (chart,) = charts.comparison_charts(Result("m", 1, {}, None, workload="digits", rows=(row,)))
    assert ">0.001<" in chart.svg
    assert "mathdefault" not in chart.svg


def test_replayed_rows_have_their_bound_and_no_curves_of_learning(mixed: Result) -> None:
    rows = tuple(dataclasses.replace(row, bound_s=0.008, of_bound=0.8125) for row in mixed.rows[:2])
    replayed = dataclasses.replace(mixed, rows=rows, lab="1Gbit")
    shown = "".join(read(comparison_page(replayed)).text)
    assert "81.25" in shown
    assert "of bound" in shown
    assert "links of 1Gbit" in shown
    assert not any(chart.line_keys for chart in charts.comparison_charts(replayed))


def test_figures_at_the_end_of_bars_stand_inside_the_chart() -> None:
    # The median iteration is far longer than the medians of its stages together.
    row = Row("ring", 2, iteration_s=1.0, forward_s=0.1)
    (chart,) = charts.comparison_charts(Result("m", 1, {}, None, workload="digits", rows=(row,)))
    assert ">1.00 s<" in chart.svg
    assert [key.label for key in chart.keys] == ["forward", "rest"]


@pytest.fixture(scope="module")
def few(mixed: Result) -> Result:
    """A baseline and two strategies: every chart has something to show though one of them is broken."""
    return dataclasses.replace(mixed, rows=mixed.rows[:3])


@pytest.fixture(scope="module")
def drawings(few: Result) -> int:
    """How many its page has."""
    return read(comparison_page(few)).tags["svg"]


BAD = [
    float("inf"),
    1e308,
    *(pytest.param(number, marks=pytest.mark.slow) for number in (-float("inf"), float("nan"), 5e-324)),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_number_that_has_gone_wrong_keeps_nobody_from_reading_the_page(
    few: Result, drawings: int, bad: float
) -> None:
    """In any field of one row, and in all at once: a training that diverges measures such numbers."""
    first, row, last = few.rows
    numbers = [item.name for item in dataclasses.fields(row) if isinstance(getattr(row, item.name), float)]
    point = dataclasses.replace(row.curve[-1], seconds=bad, loss=bad, accuracy=bad, test_loss=bad)
    curve = (*row.curve, dataclasses.replace(point, seconds=1.0), point)
    broken = dataclasses.replace(row, **dict.fromkeys(numbers, bad), curve=curve, traffic=((bad, 1.0),) * 2)
    assert read(comparison_page(dataclasses.replace(few, rows=(first, broken, last)))).tags["svg"] == drawings
