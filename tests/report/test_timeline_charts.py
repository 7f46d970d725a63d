"""The chart of an iteration: a line for each process, a key for what there is, bars where and when they belong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from test_page import read

from syncline.timeline.chrome import Bar, Iteration
from syncline_bench.report.comparison import Result
from syncline_bench.report.page import comparison_page
from syncline_bench.report.timeline_charts import _merged, timeline_charts

FIRST = (Bar(0.0, 0.4, "forward"), Bar(0.4, 0.9, "backward"), Bar(0.5, 1.0, "wait"), Bar(0.1, 0.2, "send"))
SECOND = (Bar(0.0, 1.0, "receive"), Bar(0.2, 0.4, "compute"))
ITERATION = Iteration("ring <b>", 3, 5, 1.0, (("rank 0 (vm)", FIRST), ("rank 1 (vm)", SECOND)), 0.00025)


def boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """The corners of all bars: left, top, right, bottom."""
    found = []
    for bars in ET.fromstring(svg).iter("g"):
        if "PolyCollection" not in bars.get("id", ""):
            continue
        down = sum(float(use.get("y", 0)) for use in bars.iter("use"))  # a single one is drawn by reference
        for path in bars.iter("path"):
            numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path.get("d", ""))]
            xs, ys = numbers[::2], [y + down for y in numbers[1::2]]
            found.append((min(xs), min(ys), max(xs), max(ys)))
    return found


def test_what_happened_is_drawn_and_explained() -> None:
    (chart,) = timeline_charts([ITERATION])
    assert chart.title == "Timeline: ring <b>"
    assert "Iteration 3 of 5" in chart.caption
    assert "clocks agree within 250 us" in chart.caption
    keys = [key.label for key in chart.keys]
    assert keys == ["forward", "backward", "waiting", "encoding and decoding", "sends under way", "receives under way"]
    assert "rank 1 (vm)" in chart.svg
    assert "#0072B2".lower() in chart.svg.lower()


def test_bars_lie_where_they_belong() -> None:
    """As wide as they are long, side by side or in each other in the order of time, the second process below."""
    (chart,) = timeline_charts([ITERATION])
    _, _, width, height = (float(number) for number in (ET.fromstring(chart.svg).get("viewBox") or "").split())
    forward, backward, wait, send, compute, receive = drawn = boxes(chart.svg)
    assert all(0 <= left < right <= width and 0 <= top < bottom <= height for left, top, right, bottom in drawn)
    second = receive[2] - receive[0]
    assert [(right - left) / second for left, _, right, _ in drawn] == pytest.approx([0.4, 0.5, 0.5, 0.1, 0.2, 1.0])
    assert forward[0] == receive[0]
    assert forward[2] == backward[0] < wait[0] < backward[2] < wait[2] == receive[2]
    assert forward[1::2] == pytest.approx(wait[1::2], abs=0.1)
    assert forward[3] < send[1] < send[3] < compute[1] < compute[3] < receive[1]


def test_bars_that_are_too_close_to_tell_are_one() -> None:
    bars = [Bar(number / 10_000, (number + 0.5) / 10_000, "send") for number in range(5000)]
    assert len(_merged(bars, frozenset({"send"}), 1 / 1500)) == 1
    assert _merged(bars[:1] + bars[-1:], frozenset({"send"}), 1 / 1500) == [(0.0, 0.00005), (0.4999, 0.49995)]


@pytest.mark.slow
def test_the_page_has_them_behind_its_other_charts(mixed: Result) -> None:
    before, after = read(comparison_page(mixed)), read(comparison_page(mixed, [ITERATION]))
    assert after.tags["figure"] == before.tags["figure"] + 1
    assert "Timeline: ring <b>" in "".join(after.text)
