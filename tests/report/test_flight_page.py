"""The page of a flight record: everything is escaped, and bars stand where and as long as operations were."""

from __future__ import annotations

import pytest
from test_page import read
from test_timeline_charts import boxes

from syncline.timeline.flight import Fault, FlightOperation, FlightRecord, ProcessFlight, merge
from syncline_bench.report.flight import flight_chart
from syncline_bench.report.page import flight_page


def operation(number: int, begin_s: float, end_s: float = 0.0, label: str = "bucket <0>") -> FlightOperation:
    return FlightOperation(number, number, 8, 1, 3, begin_s, end_s, False, label)


def record() -> FlightRecord:
    """Rank 1 has not come to the third operation, and rank 0 has waited for it for 10 s; their clocks differ."""
    done = [operation(1, 1.0, 2.0), operation(2, 98.5, 99.5)]
    fault = Fault("PeerLost", "rank 1 <died>", 1, {1: "bucket <0>"}, ("train.py:3 (<module>)",))
    there = ProcessFlight(
        0, "rank 0", (*done, operation(3, 100.0)), 3, 1000.0, 110.0, fault=fault, processes=3, workers=3
    )
    shifted = tuple(one._replace(begin_s=one.begin_s + 500.0, end_s=one.end_s + 500.0) for one in done)
    here = ProcessFlight(1, "rank 1", shifted, 2, 500.0, 599.5, ended="was killed by SIGKILL", processes=3, workers=3)
    found = merge([there, here], ended={1: "was killed by SIGKILL"})
    assert found is not None
    return found


def test_a_page_says_who_waited_for_whom() -> None:
    page = read(flight_page(record()))
    text = " ".join(" ".join(page.text).split())
    assert "rank 1 was killed by SIGKILL and did not enter bucket <0>, step 3; rank 0 waited for it for 10.0 s" in text
    assert "PeerLost: rank 1 <died>" in text
    assert "train.py:3 (<module>)" in text
    assert "rank 2 left no record." in text
    assert not page.links


def test_bars_are_as_long_as_operations_around_the_last_one() -> None:
    """From 2 s before the operation in which rank 0 waited; what ended before is left out."""
    svg = flight_chart(record()).svg
    finished, waits, of_the_other = boxes(svg)
    second = (waits[2] - waits[0]) / 10.0
    assert [(right - left) / second for left, _, right, _ in (finished, of_the_other)] == pytest.approx(
        [1.0, 1.0], abs=0.01
    )
    assert finished[0] == pytest.approx(of_the_other[0])
    assert (waits[0] - finished[0]) / second == pytest.approx(1.5, abs=0.01)
    assert of_the_other[1] > waits[3]
