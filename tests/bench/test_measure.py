"""The arithmetic of rows: an iteration's split, medians, the union of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.nouns import Seconds, Spec
from syncline_bench.measure import (
    COMPUTE_STAGES,
    MEASURES,
    IterationClock,
    Record,
    bound_s,
    bounded,
    link_bytes_per_s,
    row_of,
    scaled,
    timed,
    traffic,
    warmup,
)
from syncline_bench.report.comparison import STAGES, Point, Row
from syncline_bench.workloads import Pipeline, Speed
from syncline_bench.workloads._trace import Trace, TracedLayer

spans = st.lists(st.tuples(st.sampled_from(COMPUTE_STAGES), st.floats(0, 10), st.floats(0, 1)), min_size=1, max_size=12)


@given(spans)
def test_stages_and_exposed_communication_make_up_the_iteration(laps: list[tuple[str, float, float]]) -> None:
    at, blocked = [5.0], [2.0]
    clock = IterationClock(lambda: at[0], lambda: blocked[0])
    clock.begin()
    expected = dict.fromkeys(COMPUTE_STAGES, 0.0)
    for stage, work, share in laps:
        at[0] += work
        blocked[0] += work * share
        expected[stage] += work * (1 - share)
        clock.lap(stage)
    times = clock.end()
    assert times["iteration_s"] == pytest.approx(sum(work for _, work, _ in laps), abs=1e-9)
    assert times["compute_s"] + times["exposed_comm_s"] == pytest.approx(times["iteration_s"], abs=1e-9)
    assert sum(times[stage] for stage in STAGES) == pytest.approx(times["iteration_s"], abs=1e-9)
    for stage, value in expected.items():
        assert times[stage] == pytest.approx(value, abs=1e-9)


def test_clocks_read_one_after_the_other_never_give_negative_times() -> None:
    ticks: Iterator[float] = iter([0.0, 1.0])
    blocks: Iterator[float] = iter([0.0, 1.1])
    clock = IterationClock(lambda: next(ticks), lambda: next(blocks))
    clock.begin()
    clock.lap("backward_s")
    times = clock.end()
    assert times["backward_s"] == 0
    assert times["exposed_comm_s"] == times["iteration_s"] == 1.0
    assert times["compute_s"] == 0


def record_of(durations: list[float], samples: int = 8, loss: float = 1.0, sent: int = 100) -> Record:
    record = Record(len(durations))
    for duration in durations:
        times = {**dict.fromkeys(STAGES, duration / 10), "iteration_s": duration, "compute_s": duration * 0.9}
        record.add(times, loss, samples, sent)
    return record


def report_of(durations: list[float], sha256: str = "a", **changes: Any) -> dict[str, Any]:
    record = record_of(durations, **{key: changes.pop(key) for key in ("samples", "loss", "sent") if key in changes})
    record.evaluated(0.5, 0.25)
    peers = {"chosen": "ring transport=shm", "sha256": sha256, "sent": {}, "received": {}}
    peers |= {"start_s": 0.5, "cpu_s": 1.0, "peak_bytes": 1 << 28, "staleness": {}, "version_lag": {}, "waited_s": None}
    # In a run `sent` per peer comes from the transport, here it is not what the test is about.
    return {**record.report(), **peers, **changes}


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_medians_leave_out_the_warm_up_and_nothing_else(durations: list[float]) -> None:
    report = record_of(durations).report()
    skip = report["warmup"]
    assert skip == warmup(len(durations)) <= len(durations) / 5
    assert report["iterations"] == len(durations)
    assert set(report["measures"]) == set(MEASURES)
    assert report["measures"]["iteration_s"] == median(durations[skip:])


@given(st.integers(1, 2000))
def test_curves_stay_short_and_reach_the_last_iteration(count: int) -> None:
    record = record_of([0.001] * count)
    assert record.points[-1].iteration == count
    assert len(record.points) <= 101
    steps = [point.iteration for point in record.points]
    assert steps == sorted(set(steps))


def test_a_row_sums_throughput_and_takes_medians_of_the_rest() -> None:
    reports = [report_of([0.1] * 10, sent=100), report_of([0.2] * 10, sent=300), report_of([0.2] * 10, sent=200)]
    reports[1] |= {"start_s": 2.0, "peak_bytes": 1 << 29}
    row = row_of("ring", 3, 0, 24, reports, served_s=0.5)
    assert row.cpu_s_per_step == pytest.approx(3.5 / 10)  # of all workers and servers
    assert (row.start_s, row.peak_bytes) == (0.5, 1 << 29)  # the heaviest worker is what a machine has to hold
    assert row.images_per_s == pytest.approx(8 / 0.1 + 8 / 0.2 + 8 / 0.2)
    assert row.iteration_s == pytest.approx(0.2)
    assert row.bytes_sent_per_step == 200
    assert row.replicas_equal is True
    assert row.replica_sha256 == "a"
    assert (row.accuracy, row.loss) == (0.5, 0.25)
    assert row.chosen == "ring transport=shm"
    assert (row.iterations, row.warmup, row.batch) == (10, 2, 24)


def test_replicas_that_differ_are_found() -> None:
    row = row_of("ring", 2, 0, 16, [report_of([0.1] * 3), report_of([0.1] * 3, sha256="b")])
    assert row.replicas_equal is False
    assert row.replica_sha256 is None


def test_the_training_loss_is_the_mean_over_workers() -> None:
    row = row_of("ring", 2, 0, 16, [report_of([0.1] * 3, loss=1.0), report_of([0.1] * 3, loss=3.0)])
    assert {point.loss for point in row.curve} == {2.0, None}


def test_what_nobody_counts_is_unknown_and_not_zero() -> None:
    record = Record(4, counted=False)
    for _ in range(4):
        record.add({**dict.fromkeys(STAGES, 0.01), "iteration_s": 0.1, "compute_s": 0.1}, 1.0, 8, 0)
    report = {**record.report(), "chosen": "ddp", "sha256": "a", "sent": {}, "received": {}}
    report |= {
        "start_s": 0.5,
        "cpu_s": 1.0,
        "peak_bytes": 1 << 28,
        "staleness": {},
        "version_lag": {},
        "waited_s": None,
    }
    row = row_of("ddp", 2, 0, 16, [report, report])
    assert (row.exposed_comm_s, row.compute_s, row.bytes_sent_per_step, row.traffic) == (None, None, None, ())
    assert row.iteration_s == pytest.approx(0.1)
    assert row.images_per_s == pytest.approx(160)


def test_without_a_test_set_the_loss_is_that_of_training() -> None:
    report = report_of([0.1] * 3, loss=0.75)
    report["curve"] = [point for point in report["curve"] if point["accuracy"] is None]
    row = row_of("single", 1, 0, 8, [report])
    assert row.accuracy is None
    assert row.loss == 0.75


def test_efficiency_compares_with_the_single_worker() -> None:
    single = scaled(Row("single", 1, images_per_s=100.0), None)
    assert single.scaling_efficiency == 1.0
    assert scaled(Row("ring", 4, images_per_s=300.0), single).scaling_efficiency == 0.75
    assert scaled(Row("ring", 4, images_per_s=300.0), None).scaling_efficiency is None
    assert scaled(Row("ring", 4, error="lost"), single).scaling_efficiency is None


def test_what_servers_send_is_what_workers_received_from_them() -> None:
    matrix = traffic([{"2": 10.0}, {"2": 20.0}], [{"2": 30.0}, {"2": 40.0, "0": 99.0}], servers=1)
    assert matrix == ((0.0, 0.0, 10.0), (0.0, 0.0, 20.0), (30.0, 40.0, 0.0))


def test_throughput_is_what_each_worker_did_in_its_time() -> None:
    """Not of a median iteration, which stalls would not show in."""
    row = row_of("asp", 2, 0, 16, [report_of([0.1, 0.1, 0.1, 0.7]), report_of([0.5, 0.5])])
    assert row.images_per_s == pytest.approx(4 * 8 / 1.0 + 2 * 8 / 1.0)
    assert row.iteration_s == pytest.approx((0.1 + 0.5) / 2)
    assert (row.steps, row.iterations) == ((4, 2), 3)


def test_a_worker_without_a_batch_has_no_part_in_medians() -> None:
    idle, busy = {"staleness": {}, "waited_s": {"1": 0.3}}, {"waited_s": {"0": 1.0}}
    alone = row_of("asp", 2, 0, 16, [report_of([0.1] * 10, **busy), report_of([0.2] * 5, **busy)])
    reports = [report_of([], **idle), report_of([0.1] * 10, **busy), report_of([0.2] * 5, **busy), report_of([])]
    row = row_of("asp", 4, 0, 16, [report | {"waited_s": report["waited_s"] or {}} for report in reports])
    assert all(getattr(row, name) == getattr(alone, name) for name in (*MEASURES, "wait_s_per_step"))
    assert (row.steps, row.warmup, row.iterations) == ((0, 10, 5, 0), 2, 4)
    assert row.compute_by_rank_s == pytest.approx((0.0, 0.09, 0.18, 0.0))
    assert (row.slowest_rank, row.slower) == (2, pytest.approx(2.0))
    assert row.replicas_equal is True
    assert row.error is None


def test_the_curve_is_that_of_the_worker_with_most_steps_and_ends_with_the_last() -> None:
    """Rank 0, which tests the model, may do least, and end first."""
    slow, fast, slowest = report_of([]), report_of([0.1] * 4, loss=0.5), report_of([0.3] * 3, loss=1.5)
    row = row_of("asp", 3, 0, 24, [slow, fast, slowest])
    assert [(point.iteration, point.loss) for point in row.curve if point.loss is not None] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 0.5),
    ]
    assert timed(row, 0.5).time_to_accuracy_s == pytest.approx(0.9)
    assert row.loss == 0.25


def test_bytes_are_the_mean_over_the_run_the_warm_up_included() -> None:
    record = Record(20)
    for step in range(20):
        record.add({**dict.fromkeys(STAGES, 0.01), "iteration_s": 0.1, "compute_s": 0.1}, 1.0, 8, 160 * (step % 8 == 0))
    assert record.report()["measures"]["bytes_sent_per_step"] == 160 * 3 / 20


def test_points_are_where_the_run_is_and_not_where_the_worker_is() -> None:
    record = Record(3)
    times = {**dict.fromkeys(STAGES, 0.01), "iteration_s": 0.1, "compute_s": 0.1}
    for position in (1, 1, 2, 3, 3):
        record.add(times, 1.0, 8, 0, position)
    record.evaluated(0.5, 0.25, position=2, seconds=0.3)
    record.evaluated(0.75, 0.125)
    points = [(point["iteration"], point["accuracy"]) for point in record.report()["curve"]]
    assert points == [(1, None), (1, None), (2, None), (2, 0.5), (3, None), (3, None), (3, 0.75)]


def test_how_workers_were_coordinated_is_added_up() -> None:
    first = report_of([0.1] * 4, staleness={"0": 3, "10": 1}, version_lag={"2": 4}, waited_s={"1": 2.0})
    second = report_of([0.1] * 2, staleness={"0": 2, "1": 5}, waited_s={"0": 0.5})
    row = row_of("ssp", 2, 0, 16, [first, second])
    assert row.staleness == {0: 5, 1: 5, 10: 1}
    assert list(row.staleness) == [0, 1, 10]
    assert row.version_lag == {2: 4}
    assert row.waits == ((0.0, 2.0), (0.5, 0.0))
    assert row.wait_s_per_step == pytest.approx((2.0 / 4 + 0.5 / 2) / 2)


def test_waits_of_workers_in_step_are_unknown_and_not_zero() -> None:
    stepped = report_of([0.1] * 4, staleness={"0": 4})
    row = row_of("ring", 2, 0, 16, [stepped, stepped])
    assert (row.staleness, row.waits, row.wait_s_per_step) == ({0: 8}, (), None)
    watched = report_of([0.1] * 4, waited_s={})
    assert row_of("asp", 2, 0, 16, [watched, watched]).wait_s_per_step == 0


@pytest.mark.parametrize(("third", "slowest"), [(0.12, None), (0.13, 2), (0.3, 2), (0.01, None)])
def test_the_slowest_worker_is_named_where_there_is_one(third: float, slowest: int | None) -> None:
    row = row_of("ring", 3, 0, 24, [report_of([0.1] * 4), report_of([0.1] * 4), report_of([third] * 4)])
    assert row.compute_by_rank_s == pytest.approx((0.09, 0.09, 0.9 * third))
    assert row.slowest_rank == slowest
    assert row_of("single", 1, 0, 8, [report_of([third] * 4)]).slowest_rank is None


def test_the_time_to_an_accuracy_is_that_of_the_first_look_that_saw_it() -> None:
    scores = [(0.5, None), (None, 0.9), (1.0, 0.96), (1.5, 0.97), (2.0, 0.96), (2.5, 0.99)]
    curve = tuple(Point(1, seconds or 0.0, accuracy=accuracy) for seconds, accuracy in scores)
    assert timed(Row("ring", 2, curve=curve), 0.97).time_to_accuracy_s == 1.5
    assert timed(Row("ring", 2, curve=curve), 1.0).time_to_accuracy_s is None
    assert timed(Row("ring", 2, curve=curve), None).time_to_accuracy_s is None
    assert timed(Row("ring", 2, error="lost"), 0.97).time_to_accuracy_s is None


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
