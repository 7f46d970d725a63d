"""Trials: which layout comes next, and which is taken, where steps take what they are said to take."""

from __future__ import annotations

import pytest

from syncline.errors import UsageError
from syncline.session.layout import Layout
from syncline.tuning.trials import CLEARLY, FAR, MOST, NEAR, STEPS, TURNS, Trials


class Run:
    """A run whose steps take so many seconds by the name of the layout, and some (layout, step) so many more."""

    def __init__(
        self, seconds: dict[str, float], until_s: float = 1e9, held_up: dict[tuple[str, int], float] | None = None
    ) -> None:
        self.now_s, self.seconds, self.held_up = 0.0, seconds, held_up or {}
        layouts = [Layout((), (), (), name) for name in seconds]
        self.trials = Trials(layouts, until_s, lambda: self.now_s, lambda layout: layout.schedule.startswith("cross"))
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
    assert "950 ms per iteration, 1000 ms with first, of 4 that were tried on the live run" in found.reason
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
def test_what_crosses_is_not_run_any_more_once_that_is_refused(after: int) -> None:
    run = Run({"first": 1.0, "cross a": 0.1, "b": 0.5, "cross c": 0.2})
    for _ in range(after):
        layout = run.trials.following()
        run.trials.began()
        for _ in range(2):
            run.now_s += run.seconds[layout.schedule]
            run.trials.step_ended()
    run.trials.refuse_crossing()
    assert run.go().schedule == "b"
    assert not any(name.startswith("cross") for name in run.ran)


def test_the_best_of_those_that_do_not_cross_is_known_too() -> None:
    run = Run({"first": 1.0, "cross a": 0.1, "b": 0.5})
    assert run.go().schedule == "cross a"
    assert run.trials.best(crossing=False).schedule == "b"


def test_where_iterations_may_not_be_crossed_the_best_is_one_that_does_not_even_before_any_has_run() -> None:
    run = Run({"cross first": 1.0, "cross a": 0.1, "b": 0.5})
    run.trials.refuse_crossing()
    assert run.trials.best().schedule == "b"


def test_where_every_layout_crosses_and_none_may_that_is_said() -> None:
    run = Run({"cross a": 0.1})
    run.trials.refuse_crossing()
    with pytest.raises(UsageError, match="no schedule whose steps end by themselves"):
        run.trials.following()
