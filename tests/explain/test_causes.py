"""Causes of slow iterations: each is found where it was planted, and nobody is accused for another's fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import STAGES, Planted, causes, slower

from syncline.engine.trace import Kind
from syncline.errors import UsageError
from syncline.timeline.chrome import RecordedRun
from syncline.timeline.spans import TimedSpan
from syncline_bench.explain.activity import AGREEING, Link, Message, common, observe, thread_of, total, union
from syncline_bench.explain.causes import LEAST, _bytes_s
from syncline_bench.explain.path import critical_path
from syncline_bench.report.explanation import CAUSES
from timelines import process, span


def words(run: RecordedRun) -> list[str]:
    return [cause.cause for cause in causes(run)]


def test_a_healthy_run_accuses_nobody() -> None:
    assert causes(Planted().run()) == []
    assert causes(Planted(workers=2).run()) == []
    uneven = Planted(slow=lambda rank, stage, step: STAGES[stage] * (1 + 0.05 * ((rank + step) % 2)))
    assert causes(uneven.run()) == []


@given(
    workers=st.integers(2, 6),
    place=st.integers(0, 5),
    stage=st.sampled_from(["forward", "backward", "optimizer", "loading"]),
    seconds=st.floats(0.03, 0.5),
)
def test_a_slow_rank_is_told_from_its_victims(workers: int, place: int, stage: str, seconds: float) -> None:
    rank = place % workers
    found = causes(Planted(workers=workers, slow=slower(rank, stage, seconds)).run())
    assert [(one.cause, one.rank) for one in found] == [("late_loader" if stage == "loading" else "slow_rank", rank)]
    assert found[0].seconds == pytest.approx(seconds, rel=0.01)
    assert found[0].link is None


def test_a_late_loader_of_one_rank_and_slow_loading_of_all_are_two_findings() -> None:
    (one,) = causes(Planted(slow=slower(2, "loading", 0.1)).run())
    (every,) = causes(Planted(slow=slower(None, "loading", 0.1)).run())
    assert (one.cause, one.rank) == ("late_loader", 2)
    assert (every.cause, every.rank) == ("slow_loading", None)
    assert "ranks 0-1, 3 wait" in one.said


def test_a_rank_slow_in_two_stages_is_named_for_both() -> None:
    def slow(rank: int, stage: str, _: int) -> float:
        return STAGES[stage] + (0.1 if rank == 1 and stage in ("loading", "backward") else 0.0)

    assert [(one.cause, one.rank) for one in causes(Planted(slow=slow).run())] == [
        ("late_loader", 1),
        ("slow_rank", 1),
    ]


def test_ranks_that_are_late_in_turn_are_jitter_and_none_is_named() -> None:
    found = causes(Planted(steps=12, slow=lambda rank, stage, step: STAGES[stage] + 0.06 * (rank == step % 4)).run())
    assert [(one.cause, one.rank) for one in found] == [("jitter", None)]


@pytest.mark.parametrize("link", [(0, 1), (3, 0)])
def test_a_slow_link_is_named_by_its_ends(link: tuple[int, int]) -> None:
    found = causes(Planted(rates={link: 4e7}).run())
    assert (found[0].cause, found[0].link, found[0].rank) == ("slow_link", link, None)
    assert not {"slow_rank", "network"} & {one.cause for one in found}


def test_all_slow_links_of_a_rank_are_its_port() -> None:
    found = causes(Planted(rates={(1, 2): 4e7, (2, 3): 4e7}).run())
    assert (found[0].cause, found[0].rank) == ("slow_link", 2)


def test_links_inside_hosts_are_not_compared_with_those_between_hosts() -> None:
    """Two hosts of two ranks: the links between them are ten times slower, as is usual."""
    slow = {(1, 2): 5e7, (3, 0): 5e7}
    found = causes(Planted(rates=slow, host=lambda rank: f"host{rank // 2}").run())
    assert "slow_link" not in [one.cause for one in found]
    assert found[0].cause == "network"
    alone = Planted(workers=6, rates={(1, 2): 5e7, (3, 4): 5e7, (5, 0): 5e6}, host=lambda rank: f"host{rank // 2}")
    assert causes(alone.run())[0].link == (5, 0)


def test_small_buckets_are_told_from_a_slow_network() -> None:
    small = Planted(buckets=(16_384, 512) * 40, fixed=0.002)
    assert words(small.run())[0] == "small_buckets"
    equal = Planted(buckets=(16_384,) * 80, fixed=0.002)
    assert words(equal.run())[0] == "small_buckets"
    slow = Planted(buckets=(16_384,) * 80, fixed=0.00002, rate=1e7)
    assert words(slow.run())[0] == "network"
    assert "small_buckets" not in words(Planted(buckets=(4_000_000,) * 40).run())


def on_shared_memory(run: RecordedRun, agreeing_s: float) -> RecordedRun:
    """Without messages, and with agreements that take so long, as on busy cores."""

    def late(one: TimedSpan) -> TimedSpan:
        return one._replace(end_s=one.end_s + agreeing_s) if one.label == AGREEING else one

    kept = [
        replace(one, spans=tuple(late(span) for span in one.spans if span.kind not in ("send", "receive")))
        for one in run.processes
    ]
    return replace(run, processes=kept)


def test_bytes_that_explain_the_time_are_no_fixed_cost() -> None:
    """16 MB a step on two ranks over shared memory, whose agreements wait for a core, beside a latency that counts."""
    large = Planted(workers=2, buckets=(16_000_000,), rate=5e9, late=True)
    large.slow = lambda rank, stage, step: STAGES[stage] / 5  # noqa: ARG005
    found = words(on_shared_memory(large.run(), 0.01))
    assert "network" in found
    assert "fixed_cost" not in found
    few = Planted(workers=2, buckets=(40_000,), fixed=0.05, late=True).run()
    (found,) = [one for one in causes(on_shared_memory(few, 0.0)) if one.cause == "fixed_cost"]
    assert "mostly latency" in found.said
    assert "short" not in found.said
    assert "change the training" in (found.remedy or "")
    assert "consolidate()" in (found.remedy or "")


def test_the_time_that_bytes_need_is_told_from_latency() -> None:
    """Messages of 2 MB take 21 ms: by their bytes, or because any message does."""
    activity = observe(Planted(workers=2).run())
    steps = activity.steps.shape[1]

    def needs(latency_s: float) -> float:
        lasted = [(16, latency_s), *[(2_000_000, 0.021)] * steps]
        messages = tuple(Message(0, 1, nbytes, 7, 1.0, 1.0, 1.0 + seconds) for nbytes, seconds in lasted)
        return _bytes_s(replace(activity, links={(0, 1): Link(messages)}), 2e6)

    assert needs(0.0001) == pytest.approx(0.0209, rel=0.01)
    assert needs(0.02) == pytest.approx(0.001, rel=0.01)
    assert needs(0.03) == 0.0


def test_a_server_that_all_workers_share() -> None:
    found = causes(Planted(servers=1, rate=2e8, strategy="ps(servers=1)").run())
    assert (found[0].cause, found[0].rank) == ("shared_server", 4)
    fair = Planted(servers=4, rate=2e8, strategy="ps(servers=4)")
    assert "shared_server" not in words(fair.run())


def with_spans(run: RecordedRun, rank: int, kind: Kind, seconds: float) -> RecordedRun:
    """A span on a rank in each of its waits, in the thread that makes progress."""
    one = run.processes[rank]
    more = [
        span(wait.begin_s, wait.begin_s + seconds, kind=kind, label="bucket 0", thread="progress")
        for wait in one.spans
        if wait.kind == "wait"
    ]
    spans = tuple(sorted((*one.spans, *more), key=lambda one: one.begin_s))
    return replace(run, processes=[*run.processes[:rank], replace(one, spans=spans), *run.processes[rank + 1 :]])


def test_a_worker_that_owns_all_weights_is_a_shared_server() -> None:
    star = {(0, 1): 1e8, (1, 0): 1e8, (0, 2): 1e8, (2, 0): 1e8}
    run = Planted(workers=3, rates=star, rate=1e8).run()
    assert "shared_server" not in words(run)
    found = {one.cause: one for one in causes(with_spans(run, 0, "update", 0.02))}
    assert found["shared_server"].rank == 0


def test_codecs_that_keep_workers_waiting() -> None:
    run = Planted(buckets=(8_000_000,), rate=1e8).run()
    wait_s = next(one.end_s - one.begin_s for one in run.processes[1].spans if one.kind == "wait")
    (found,) = (one for one in causes(with_spans(run, 1, "compute", 0.7 * wait_s)) if one.cause == "codec")
    assert found.seconds == pytest.approx(0.7 * wait_s, rel=0.01)


def test_a_fault_comes_before_the_schedule_that_could_hide_it() -> None:
    found = words(Planted(late=True, buckets=(1_500_000,), rates={(0, 1): 4e7}).run())
    assert found[0] == "slow_link"


def test_an_exchange_after_the_backward_pass() -> None:
    found = words(Planted(late=True, buckets=(8_000_000,), rate=2.5e8).run())
    assert found == ["no_overlap"]
    assert "no_overlap" not in words(Planted(buckets=(2_000_000,) * 8, rate=5e7).run())


def test_causes_that_are_below_their_share_do_not_count() -> None:
    step_s = observe(Planted().run()).step_s
    assert words(Planted(slow=slower(1, "backward", 0.5 * LEAST * step_s)).run()) == []
    assert words(Planted(slow=slower(1, "backward", 1.5 * LEAST * step_s)).run()) == ["slow_rank"]


def test_every_cause_has_a_word_and_the_main_one_comes_first() -> None:
    both = replace(Planted(rates={(0, 1): 4e7}), slow=slower(2, "backward", 0.3))
    found = causes(both.run())
    assert {one.cause for one in found} <= set(CAUSES)
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
    assert {"slow_rank", "slow_link"} <= {one.cause for one in found}


def test_scripts_without_passes_are_judged_by_their_own_time() -> None:
    """As under NumPy: neither forward nor backward passes, nor an optimizer."""
    run = Planted(slow=slower(2, "backward", 0.2)).run()
    kept = [
        replace(one, spans=tuple(span for span in one.spans if span.kind not in ("forward", "backward", "optimizer")))
        for one in run.processes
    ]
    assert [(one.cause, one.rank) for one in causes(RecordedRun(kept))] == [("slow_rank", 2)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_ended_early_is_refused(steps: int) -> None:
    with pytest.raises(UsageError, match="record at least 3 iterations"):
        causes(Planted(steps=steps).run())


def test_one_rank_is_refused() -> None:
    run = Planted(workers=2).run()
    with pytest.raises(UsageError, match="one rank only"):
        causes(RecordedRun(run.processes[:1]))
    with pytest.raises(UsageError, match="no rank"):
        causes(RecordedRun([]))


def test_names_of_others_lose_their_control_characters() -> None:
    run = Planted(workers=2, slow=slower(1, "backward", 0.2), host=lambda _: "\x1b[2Jevil\n").run()
    (found,) = causes(run)
    assert found.said.isprintable()


# What causes are judged by


INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda two: (min(two), max(two))), max_size=8
)


@given(INTERVALS, INTERVALS)
def test_unions_and_common_times_are_those_of_sets(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {point for begin, end in intervals for point in range(begin, end)}

    assert total(union(ones)) == len(points(ones))
    assert total(common(union(ones), union(others))) == len(points(ones) & points(others))


def test_the_innermost_span_counts_and_the_time_before_a_forward_pass_is_loading() -> None:
    spans = [
        span(1, 3, kind="forward"),
        span(3, 9, kind="backward"),
        span(4, 5, kind="wait"),
        span(10, 14, kind="optimizer"),
        span(11, 12, kind="wait"),
        span(20, 22, kind="forward"),
        span(21, 30, kind="work", key=1),
    ]
    found = thread_of(process(0, *spans), [one.begin_s for one in spans], [one.end_s for one in spans])
    assert [(one.stage, one.begin_s, one.end_s) for one in found] == [
        ("forward", 1, 3), ("backward", 3, 4), ("wait", 4, 5), ("backward", 5, 9), ("script", 9, 10),
        ("optimizer", 10, 11), ("wait", 11, 12), ("optimizer", 12, 14), ("loading", 14, 20), ("forward", 20, 22),
    ]  # fmt: skip


@given(rank=st.integers(0, 3), seconds=st.floats(0.05, 0.5))
def test_the_critical_path_goes_through_the_slow_rank_and_is_an_iteration_long(rank: int, seconds: float) -> None:
    activity = observe(Planted(slow=slower(rank, "backward", seconds)).run())
    path = critical_path(activity)
    assert sum(leg.seconds for leg in path) == pytest.approx(activity.step_s, rel=0.02)
    assert (path[0].what, path[0].rank, path[0].thread) == ("backward", rank, "training thread")


def test_the_critical_path_goes_over_the_slow_link() -> None:
    path = critical_path(observe(Planted(rates={(1, 2): 1e7}).run()))
    assert (path[0].what, path[0].link) == ("message", (1, 2))
