"""The bound of a replayed iteration, by hand and as laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.nouns import Seconds, Spec
from syncline_bench.bound import bound_s, bounded, link_bytes_per_s
from syncline_bench.report.rows import Row
from syncline_bench.workloads import Pipeline, Speed
from syncline_bench.workloads._trace import Trace, TracedLayer


def trace_of(elements: int, seconds: float) -> Trace:
    return Trace("t", (TracedLayer("a", (Spec("weight", (elements,)),), seconds, 0.0),))


def test_compute_or_wire_whichever_takes_longer() -> None:
    trace = trace_of(13_378_280, 0.458)
    goodput = 957e6 / 8
    assert bound_s(trace, 4, goodput) == pytest.approx(0.671, abs=0.001)
    assert bound_s(trace, 4, 10 * goodput) == bound_s(trace, 4, None) == bound_s(trace, 1, goodput) == 0.458


def test_loading_and_copies_are_part_of_compute() -> None:
    trace, goodput = trace_of(13_378_280, 0.4), 957e6 / 8
    wire_s = bound_s(trace, 4, goodput)
    slow = Pipeline(loading=Seconds(0.5), h2d=Seconds(0.1))
    assert bound_s(trace, 4, None, slow) == pytest.approx(1.0)
    assert bound_s(trace, 4, None, replace(slow, prefetch=2)) == pytest.approx(0.5)
    assert bound_s(trace, 4, goodput, replace(slow, prefetch=2)) == pytest.approx(wire_s)
    assert bounded(Row("ring", 2, iteration_s=2.0), trace, None, slow).of_bound == pytest.approx(0.5)


def test_a_step_that_takes_longer_than_the_trace_is_part_of_compute() -> None:
    trace = trace_of(13_378_280, 0.4)
    slow = Speed(step=Seconds(0.7), slow_rank=1, slowdown=3.0, jitter=1.0)
    assert bound_s(trace, 4, None, Pipeline(loading=Seconds(0.1)), slow) == pytest.approx(0.8)
    assert bounded(Row("ring", 2, iteration_s=2.8), trace, None, speed=slow).of_bound == pytest.approx(0.25)


def test_a_link_gives_its_goodput_or_the_payload_of_its_rate() -> None:
    payload = 1e9 / 8 * 1448 / 1514
    assert link_bytes_per_s(None, None, None) is None
    assert link_bytes_per_s(100e6, 1e9, None) == payload
    assert link_bytes_per_s(121e6, 1e9, None) == 121e6
    assert link_bytes_per_s(None, None, 1e9) == payload
    # A strategy that keeps to less than the lab's rate is bound by that.
    assert link_bytes_per_s(119e6, 1e9, 1e8) == pytest.approx(payload / 10)
    assert link_bytes_per_s(119e6, 1e9, 1e10) == payload


@given(st.integers(1, 10**9), st.integers(1, 64), st.floats(1e-6, 1e3), st.floats(1e3, 1e12))
def test_more_workers_and_slower_links_never_lower_the_bound(n: int, workers: int, seconds: float, link: float) -> None:
    trace = trace_of(n, seconds)
    bound = bound_s(trace, workers, link)
    assert bound >= trace.total_s
    assert bound_s(trace, workers + 1, link) >= bound
    assert bound_s(trace, workers, link / 2) >= bound
    assert bound <= max(seconds, 2 * trace.nbytes / link)


def test_a_row_gets_the_share_of_its_bound() -> None:
    trace = trace_of(1, 0.5)
    assert bounded(Row("ring", 2, iteration_s=1.0), trace, None) == Row(
        "ring", 2, iteration_s=1.0, bound_s=0.5, of_bound=0.5
    )
    failed = bounded(Row("ring", 2, error="lost"), trace, None)
    assert (failed.bound_s, failed.of_bound) == (0.5, None)
    assert bounded(Row("ring", 2, iteration_s=1.0), None, None) == Row("ring", 2, iteration_s=1.0)
