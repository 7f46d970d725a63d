"""The page of an explanation: causes with remedies, changes and bars; whatever a file says is escaped."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from test_page import read

from syncline_bench.report.charts import explanation_charts
from syncline_bench.report.explanation import Cause, Change, Explanation, Leg
from syncline_bench.report.page import explanation_page

NASTY = "tree <script>alert('$x^2$')</script> & \"quoted\" _under %s {brace}"
SLOW = Explanation(
    file="trace.json.gz", kind="timeline", name="ring", iteration_s=0.2, iterations=8, workers=4,
    stages_s={"forward": 0.02, "backward": 0.06, "wait": 0.1},
    causes=(Cause("slow_rank", 0.1, 1, None, "rank 1 is slow", "look at rank 1"), Cause("codec", 0.05)),
    changes=(Change("rank 1 as fast as the median", 0.1, 0.09, 0.12), Change("tree", 0.15, measured=True)),
    path=(Leg("backward", 0.15, 1), Leg("message", 0.05, link=(0, 1))), model_s=0.21, remarks=("A remark.",),
)  # fmt: skip


def test_a_page_says_the_causes_the_remedies_and_what_changes_would_bring() -> None:
    page = read(explanation_page(SLOW))
    text = " ".join(" ".join(page.text).split())
    for said in (
        "ring: an iteration takes 200 ms, median of 8, 4 workers.", "slow_rank", "rank 1 is slow.",
        "Remedy: look at rank 1.", "50 %", "rank 1 as fast as the median", "predicted (90.0 ms to 120 ms)", "measured",
        "A remark.", "backward on rank 1", "messages 0 to 1",
    ):  # fmt: skip
        assert said in text
    assert page.tags["figure"] == 3
    assert not page.links
    assert set(page.references) <= set(page.ids)


def widths(svg: str) -> list[float]:
    """The lengths of all bars, which have an edge in the colour of the page."""
    drawn = [
        path.get("d", "")
        for path in ET.fromstring(svg).iter("path")
        if path.get("clip-path") and "paper" in path.get("style", "")
    ]
    xs = [[float(number) for number in re.findall(r"-?\d+\.?\d*", line)[::2]] for line in drawn]
    return [max(line) - min(line) for line in xs]


def test_bars_are_as_long_as_they_say() -> None:
    costs, after, path = (widths(chart.svg) for chart in explanation_charts(SLOW))
    assert costs[0] / costs[1] == pytest.approx(2.0, abs=0.01)
    assert path[0] / path[1] == pytest.approx(3.0, abs=0.01)
    *stages, changed, other = after
    assert [one / sum(stages) for one in stages] == pytest.approx([0.1, 0.3, 0.5, 0.1], abs=0.01)
    assert [changed / sum(stages), other / sum(stages)] == pytest.approx([0.5, 0.75], abs=0.01)


@pytest.mark.parametrize(
    "found",
    [
        Explanation(healthy=True, name="ring", iteration_s=0.1, stages_s={"forward": 0.1}),
        Explanation(kind="flight record", causes=(Cause("failure", 0.0, said="rank 1 died"),)),
        Explanation(iteration_s=float("inf"), causes=(Cause("codec", float("nan")),), stages_s={"wait": 1e300}),
    ],
)
def test_what_a_file_does_not_say_is_left_out(found: Explanation) -> None:
    page = read(explanation_page(found))
    assert page.tags["table"] == len(found.causes)


def test_whatever_a_file_says_is_escaped() -> None:
    hostile = Explanation(
        file=NASTY, kind=NASTY, name=NASTY, iteration_s=0.2, causes=(Cause(NASTY, 0.1, said=NASTY, remedy=NASTY),),
        changes=(Change(NASTY, 0.1),), path=(Leg(NASTY, 0.1, thread=NASTY),), stages_s={NASTY: 0.1}, remarks=(NASTY,),
        machine=NASTY,
    )  # fmt: skip
    text = explanation_page(hostile)
    assert "<script" not in text
    assert NASTY in " ".join(read(text).text)
