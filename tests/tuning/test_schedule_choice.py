"""The choice of a schedule: from what was measured, and by trials."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.costs.iteration import IterationTimes, predict_iteration
from syncline.costs.plans import LinearCost
from syncline.errors import UsageError
from syncline.nouns import Group, Layer, Spec
from syncline.session.layout import Layout
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import write
from syncline.tuning import schedule_choice
from syncline.tuning.schedule_choice import (
    CANDIDATES,
    CLEARLY,
    FAR,
    MARGIN,
    MOST,
    NEAR,
    OVERLAP_COST,
    STEPS,
    TURNS,
    UNLIKELY,
    Trials,
    candidates,
    choose_schedule,
    is_wanted,
    with_measuring_buckets,
    worth_a_trial,
)

MEGABYTE = 1 << 18
"""So many elements have it."""


def strategy(text: str, workers: int = 4) -> Strategy:
    return Strategy.parse(text).resolve(Group(workers), hosts=workers)


def model(count: int, elements: int, forward_s: float, backward_s: float) -> list[Layer]:
    return [Layer(Spec(f"layer {number}", (elements,)), forward_s, backward_s) for number in range(count)]


def names(text: str, overlap: bool = True, workers: int = 4) -> set[str]:
    return {one.schedule.name for one in candidates(strategy(text, workers), overlap)}


INSIDE = {"fixed", "wait_free", "merged"}
OVERLAPPING = {"priority", "split"}


@pytest.mark.parametrize(
    ("text", "overlap"),
    [
        ("ring", OVERLAPPING),
        ("direct", OVERLAPPING),
        ("recursive_doubling", {"priority"}),  # no rank owns a sum between two phases
        ("ring codec=int8", {"priority"}),
        ("ps(servers=1, update=worker)", {"priority"}),
        ("ps(servers=1)", set()),  # owners hold the weights
        ("native transport=torch", set()),  # nothing overtakes there
    ],
)
def test_candidates_are_those_that_go_with_the_rest(text: str, overlap: set[str]) -> None:
    """Never one that changes the mathematics, or fifo, which is no faster than fixed with all in one bucket."""
    assert names(text) == INSIDE | overlap
    assert names(text, overlap=False) == INSIDE


class Made:
    """Lays tensors out as a strategy's schedule does."""

    def __init__(self, layers: list[Layer], cost: LinearCost | None) -> None:
        self.layers, self.cost = layers, cost

    def lay(self, by: Strategy) -> Layout:
        schedule = by.schedule_object()
        buckets = tuple(schedule.buckets(self.layers, self.cost))
        return Layout(tuple(self.layers), buckets, tuple(map(schedule.priority, buckets)))

    def chosen(self, overlap: bool = True, text: str = "ring", *, crowded: bool = False) -> Layout:
        return choose_schedule(strategy(text), self.layers, self.cost, self.lay, overlap, crowded=crowded)


SLOW, FAST = LinearCost(1e-3, 4e-8), LinearCost(1e-6, 1e-12)


def test_what_is_near_enough_is_left_as_it_is() -> None:
    found = Made(model(20, MEGABYTE, 0.01, 0.02), FAST).chosen()
    assert found.schedule == "fixed"
    assert found.reason == "schedule=fixed: predicted 600 ms per iteration, 600 ms computing"


def test_a_slow_network_is_hidden_behind_the_next_forward_pass_if_that_may_be() -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    overlap, inside = made.chosen(), made.chosen(overlap=False)
    assert overlap.schedule in ("priority", "split")
    assert inside.schedule in CANDIDATES
    assert inside.strategy_in(strategy("ring")).schedule_object().apply == "step"
    assert overlap.cost == SLOW
    assert "with fixed" in overlap.reason


def test_latencies_that_cost_much_merge() -> None:
    """So many small tensors alone would take a latency each; all in one wait for the last."""
    found = Made(model(60, 1000, 1e-4, 1e-3), LinearCost(0.02, 1e-12)).chosen(overlap=False)
    assert found.schedule in ("fixed", "merged")
    assert len(found.buckets) < 10


def test_crowded_cores_overlap_nothing() -> None:
    """A schedule of many buckets then costs their latencies and hides none of them."""
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    overlapped, crowded = made.chosen(), made.chosen(crowded=True)
    assert overlapped.schedule != "fixed"
    exchange_s = 20 * 4 * MEGABYTE * SLOW.per_byte_s + SLOW.base_s * len(crowded.buckets)
    assert crowded.schedule == "fixed"
    assert f"predicted {1e3 * (0.6 + exchange_s):.4g} ms" in crowded.reason
    assert crowded.reason.endswith("without overlap because processes outnumber cores")
    layers, by = made.layers, strategy("ring")
    first, *_ = worth_a_trial(by, layers, SLOW, made.lay, True, lambda _: True, crowded=True)
    assert first.buckets == crowded.buckets


@pytest.mark.parametrize("cost", [None, SLOW])
def test_where_nothing_was_measured_it_stays_with_the_simplest(cost: LinearCost | None) -> None:
    times = (0.0, 0.0) if cost is not None else (0.01, 0.02)
    found = Made(model(4, 10, *times), cost).chosen()
    assert (found.schedule, found.reason) == ("fixed", "schedule=fixed: nothing was measured")


def test_buckets_that_cannot_be_are_left_out() -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)

    def lay(by: Strategy) -> Layout:
        if by.schedule.name in OVERLAPPING:
            raise UsageError("too many")
        return made.lay(by)

    found = choose_schedule(strategy("ring"), made.layers, SLOW, lay, overlap=True)
    assert found == made.chosen(overlap=False)


def test_what_is_predicted_of_is_named_where_fixed_cannot_be() -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)

    def lay(by: Strategy) -> Layout:
        if write("schedules", by.schedule) == "fixed":
            raise UsageError("too large")
        return made.lay(by)

    found = choose_schedule(strategy("ring"), made.layers, SLOW, lay, overlap=True)
    assert found.schedule in OVERLAPPING
    assert re.search(r" ms with fixed\(bucket=8MiB\), ", found.reason)


def test_a_candidate_that_fails_is_named_and_the_first_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    """With what was measured: neither the buckets of steps that are measured nor their reason stay."""
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)

    def lay(by: Strategy) -> Layout:
        if by.schedule.name == "merged":
            raise ZeroDivisionError("no time at all")
        return made.lay(by)

    found = choose_schedule(strategy("ring"), made.layers, SLOW, lay, overlap=True)
    why = "no schedule was predicted, because merged failed (ZeroDivisionError: no time at all)"
    assert (found.schedule, found.cost, found.reason) == ("fixed", SLOW, f"schedule=fixed: {why}")
    assert why in caplog.text


@pytest.mark.parametrize("cost", [None, SLOW])
def test_where_no_schedule_fits_that_is_said(cost: LinearCost | None) -> None:
    def lay(by: Strategy) -> Layout:
        raise UsageError(f"{by.schedule.name} is too large")

    with pytest.raises(
        UsageError, match="split is too large; none of the other schedules that schedule=auto tries fits"
    ):
        choose_schedule(strategy("ring"), model(3, 10, 0.01, 0.02), cost, lay, overlap=True)


def test_steps_are_measured_in_buckets_of_all_sizes() -> None:
    made = Made(model(40, MEGABYTE // 8, 0.0, 0.0), None)
    found = with_measuring_buckets(strategy("ring"), made.lay)
    sizes = [bucket.nbytes for bucket in found.buckets]
    assert found.schedule == "merged"
    assert max(sizes) > 8 * min(sizes)


models = st.lists(
    st.tuples(st.integers(1, 1 << 22), st.floats(0, 0.01), st.floats(1e-6, 0.02)), min_size=1, max_size=6
).map(lambda rows: [Layer(Spec(str(i), (size,)), forward, back) for i, (size, forward, back) in enumerate(rows)])


@settings(max_examples=25)
@given(models, st.builds(LinearCost, st.floats(0, 0.01), st.floats(1e-12, 1e-8)), st.booleans())
def test_the_simplest_counts_of_those_that_are_predicted_to_be_as_fast_as_the_best(
    layers: list[Layer], cost: LinearCost, overlap: bool
) -> None:
    made = Made(layers, cost)
    found = made.chosen(overlap)
    whole_s = {}
    for one in candidates(strategy("ring"), overlap):
        times = predict_iteration(layers, made.lay(one), one.schedule_object(), one.sync_mode(), cost)
        whole_s[str(one)] = times.whole_s * (1 + OVERLAP_COST if one.schedule_object().apply == "layer" else 1)
    best_s, mine = min(whole_s.values()), str(found.strategy_in(strategy("ring")))
    fast = [text for text, seconds in whole_s.items() if seconds <= best_s * (1 + MARGIN)]
    assert fast[0] == mine


@settings(max_examples=12)
@given(models, st.builds(LinearCost, st.floats(0, 0.01), st.floats(1e-12, 1e-8)), st.booleans())
def test_what_runs_without_trials_is_tried_first_and_then_what_is_predicted_not_to_be_far_behind(
    layers: list[Layer], cost: LinearCost, overlap: bool
) -> None:
    made = Made(layers, cost)
    found = worth_a_trial(strategy("ring"), layers, cost, made.lay, overlap, lambda _: True)
    alike = [one for one in found if one.travels_like(made.chosen(overlap))]
    assert found[0] in alike
    ends = [layout.strategy_in(strategy("ring")).schedule_object().apply == "step" for layout in found]
    assert any(ends)
    assert overlap or all(ends)
    expected_s = []
    for layout, by_itself in zip(found, ends, strict=True):
        one = layout.strategy_in(strategy("ring"))
        whole_s = predict_iteration(layers, layout, one.schedule_object(), one.sync_mode(), cost).whole_s
        expected_s.append(whole_s * (1.0 if by_itself else 1 + OVERLAP_COST))
    assert expected_s[1:-1] == sorted(expected_s[1:-1])  # the last one may be there for ending its steps by itself
    assert all(seconds <= min(expected_s) * (1 + UNLIKELY) for seconds in expected_s[:-1])


def test_what_may_not_be_tried_is_not_even_where_it_would_run_without_trials() -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    chosen = made.chosen().schedule
    found = worth_a_trial(
        strategy("ring"), made.layers, SLOW, made.lay, True, lambda one: write("schedules", one.schedule) != chosen
    )
    assert chosen not in [one.schedule for one in found]
    assert len(found) > 1


def test_what_may_not_run_does_not_where_nothing_else_ends_its_steps_by_itself() -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    chosen = made.chosen().schedule

    def fits(one: Strategy) -> bool:
        return one.schedule.name in OVERLAPPING and write("schedules", one.schedule) != chosen

    found = worth_a_trial(strategy("ring"), made.layers, SLOW, made.lay, True, fits)
    assert [one.schedule for one in found] == [
        write("schedules", one.schedule) for one in candidates(strategy("ring"), True) if fits(one)
    ][:1]
    with pytest.raises(UsageError, match="none of the schedules that schedule=auto tries can run here"):
        worth_a_trial(strategy("ring"), made.layers, SLOW, made.lay, True, lambda _: False)


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """No iteration of these schedules can be predicted."""

    def predict(layers: Any, laid: Layout, schedule: Any, sync: Any, cost: Any) -> IterationTimes:
        if type(schedule) in kinds:
            raise ZeroDivisionError("no time at all")
        return predict_iteration(layers, laid, schedule, sync, cost)

    offered = candidates(strategy("ring"), True)
    kinds = {type(one.schedule_object()) for one in offered if one.schedule.name in names}
    monkeypatch.setattr(schedule_choice, "predict_iteration", predict)


def test_what_cannot_be_predicted_is_named_and_not_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And those far behind the best of the others are not tried, either."""
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    failing(monkeypatch, "wait_free")
    found = [one.schedule for one in worth_a_trial(strategy("ring"), made.layers, SLOW, made.lay, True, lambda _: True)]
    assert "wait_free" not in found
    assert len(found) > 1
    assert "wait_free is not tried, because it failed (ZeroDivisionError: no time at all)" in caplog.text


def test_where_nothing_can_be_predicted_the_simplest_that_may_run_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(model(20, MEGABYTE, 0.01, 0.02), SLOW)
    failing(monkeypatch, *INSIDE, *OVERLAPPING)

    def fits(one: Strategy) -> bool:
        return one.schedule.name != "fixed"

    found = worth_a_trial(strategy("ring"), made.layers, SLOW, made.lay, True, fits)
    assert [one.schedule for one in found] == ["wait_free"]


@pytest.mark.parametrize(
    ("text", "workers", "wanted"), [("ring", 2, True), ("ring", 1, False), ("ring schedule=fixed", 2, False)]
)
def test_there_is_something_to_choose_between_workers_where_it_is_left_open(
    monkeypatch: pytest.MonkeyPatch, text: str, workers: int, wanted: bool
) -> None:
    assert not is_wanted(Strategy.parse(text), workers)  # tests measure nothing
    monkeypatch.setenv("SYNCLINE_TUNING", "on")
    assert is_wanted(Strategy.parse(text), workers) == wanted


class Run:
    """A run whose steps take so many seconds by the name of the layout, and some (layout, step) so many more."""

    def __init__(
        self, seconds: dict[str, float], until_s: float = 1e9, held_up: dict[tuple[str, int], float] | None = None
    ) -> None:
        self.now_s, self.seconds, self.held_up = 0.0, seconds, held_up or {}
        layouts = [Layout((), (), (), name) for name in seconds]
        self.trials = Trials(layouts, until_s, lambda: self.now_s, lambda layout: layout.schedule.startswith("overlap"))
        self.ran: list[str] = []
        self.steps: dict[str, int] = {}

    def go(self) -> Layout:
        """Until nothing is tried any more."""
        while (layout := self.trials.following()).trial:
            self.ran.append(layout.schedule)
            self.trials.began()
            step, ends = 0, False
            while not ends:
                ends = self.trials.ends
                self.now_s += self.seconds[layout.schedule] * (5 if step == 0 else 1)  # the first one takes longer
                self.now_s += self.held_up.get((layout.schedule, self.steps.get(layout.schedule, 0)), 0.0)
                self.trials.step_ended()
                self.steps[layout.schedule] = self.steps.get(layout.schedule, 0) + 1
                step += 1
        return layout


def test_the_fastest_is_taken_and_every_one_has_run() -> None:
    run = Run({"first": 1.0, "a": 0.96, "b": 0.95, "c": 0.99})
    found = run.go()
    assert found.schedule == "b"
    assert set(run.ran) == {"first", "a", "b", "c"}
    assert run.ran.count("first") == run.ran.count("b") == TURNS
    assert "950 ms per iteration, 1000 ms with first, the fastest of 4 schedules tried on the live run" in found.reason
    assert not found.trial


def test_what_is_far_behind_the_best_ends_early_and_runs_no_more() -> None:
    run = Run({"first": 1.0, "far": 1.01 + FAR, "behind": 1.01 + NEAR, "near": 1.0 + NEAR / 2})
    assert run.go().schedule == "first"
    assert run.steps["far"] == 4  # that fills, two that count, that ends
    assert run.ran.count("far") == run.ran.count("behind") == 1
    assert run.steps["behind"] == STEPS
    assert run.ran.count("near") == run.ran.count("first") == TURNS


def test_the_first_runs_no_more_either_when_it_is_far_behind() -> None:
    run = Run({"first": 2.0, "a": 1.0, "b": 1.01})
    assert run.go().schedule == "a"
    assert run.ran.count("first") == 1


@pytest.mark.parametrize("steps_s", [(5.0, 0.9, 9.0), (5.0, 4.0, 0.9)])
def test_a_single_step_that_is_held_up_ends_no_trial(steps_s: tuple[float, ...]) -> None:
    run = Run({"first": 1.0, "a": 0.9})
    run.trials.following()
    run.trials.began()
    for seconds in (5.0, 1.0, 1.0, 1.0, 1.0):
        run.now_s += seconds
        run.trials.step_ended()
    run.trials.following()
    run.trials.began()
    for seconds in steps_s:
        assert not run.trials.ends
        run.now_s += seconds
        run.trials.step_ended()
    assert not run.trials.ends


def test_the_best_is_taken_even_if_its_first_step_that_counts_is_held_up() -> None:
    run = Run({"first": 0.95, "a": 0.9, "b": 0.95}, held_up={("a", 1): 4.0})
    assert run.go().schedule == "a"
    assert run.ran.count("a") == TURNS


def test_the_first_stays_where_nothing_is_clearly_faster() -> None:
    assert Run({"first": 1.0, "a": 1.0 - CLEARLY / 2}).go().schedule == "first"
    assert Run({"first": 1.0, "a": 1.0 - 2 * CLEARLY}).go().schedule == "a"


def test_what_the_budget_does_not_last_for_is_not_tried() -> None:
    run = Run({"first": 1.0, "a": 0.9, "b": 0.5}, until_s=15.0)
    assert run.go().schedule == "a"
    assert run.ran == ["first", "a"]
    assert run.now_s < 17.0  # a trial ends with the budget


def test_nothing_is_tried_when_the_budget_is_spent() -> None:
    run = Run({"first": 1.0, "a": 0.9}, until_s=0.0)
    assert run.go().schedule == "first"
    assert run.ran == []


def test_no_more_than_so_many_run_in_a_turn() -> None:
    run = Run({"first": 1.0, **{f"n{number}": 1.0 + number / 1000 for number in range(30)}})
    run.go()
    assert len(set(run.ran)) == MOST


@pytest.mark.parametrize("after", [0, 2])
def test_overlapping_schedules_stop_once_overlap_is_refused(after: int) -> None:
    run = Run({"first": 1.0, "overlap a": 0.1, "b": 0.5, "overlap c": 0.2})
    for _ in range(after):
        layout = run.trials.following()
        run.trials.began()
        for _ in range(2):
            run.now_s += run.seconds[layout.schedule]
            run.trials.step_ended()
    run.trials.refuse_overlap()
    assert run.go().schedule == "b"
    assert not any(name.startswith("overlap") for name in run.ran)


def test_the_best_schedule_without_overlap_is_known_too() -> None:
    run = Run({"first": 1.0, "overlap a": 0.1, "b": 0.5})
    assert run.go().schedule == "overlap a"
    assert run.trials.best(overlap=False).schedule == "b"


def test_without_permission_to_overlap_the_best_has_none_even_before_the_first_run() -> None:
    run = Run({"overlap first": 1.0, "overlap a": 0.1, "b": 0.5})
    run.trials.refuse_overlap()
    assert run.trials.best().schedule == "b"


def test_an_error_says_that_every_layout_overlaps_and_none_may() -> None:
    run = Run({"overlap a": 0.1})
    run.trials.refuse_overlap()
    with pytest.raises(UsageError, match="no schedule whose steps end within their iteration"):
        run.trials.following()
