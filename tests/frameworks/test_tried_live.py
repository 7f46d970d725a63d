"""``auto(budget=...)``: schedules are tried on the live run, and no bit of the weights tells which, or whether."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from choosing_runs import schedule_of
from toy import Here, fill, on_group, weights

from syncline import checkpoint
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.session import session as sessions
from syncline.session.member import Membership, Process
from syncline.session.session import Session
from syncline.strategy.choice import Choice
from syncline.strategy.strategy import Strategy
from syncline.transports import MemoryStore, Place
from syncline.transports.torch import Torch
from syncline.tuning import schedule_choice
from syncline.tuning.schedule_choice import STEPS

COUNT = 8 + 12 * STEPS
"""Steps in which all that fits is tried, and some more."""


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_TUNING", "on")
    monkeypatch.setattr(schedule_choice, "UNLIKELY", math.inf)  # whatever is predicted on a busy machine


def make(_: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Float32, in which the order of additions shows, with tensors of sizes that no number of ranks divides."""
    layers = torch.nn.Linear(37, 53), torch.nn.Tanh(), torch.nn.Linear(53, 41), torch.nn.Tanh(), torch.nn.Linear(41, 7)
    model = fill(torch.nn.Sequential(*layers))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def data(number: int) -> torch.Tensor:
    return torch.randn(24, 37, generator=torch.Generator().manual_seed(number))


def plain(here: Here, number: int) -> None:
    here.model(here.share(data(number))).pow(2).mean().backward()
    here.optimizer.step()
    here.optimizer.zero_grad()


def trained(seen: list[str], script: Callable[[Here, int], None] = plain) -> Callable[[Here], dict[str, torch.Tensor]]:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(COUNT):
            script(here, number)
            if here.rank == 0 and here.session is not None:
                seen.append(schedule_of(here))
        return weights(here.model)

    return body


def of_one_order(group: Any) -> Any:
    """A group that was told to run halving-doubling, as ``tuning`` tells it where that is not slower."""

    def begun(strategy: str, workers: int, body: Callable[[Session], Any], nodes: tuple[int, ...] = ()) -> Any:
        def within(session: Session) -> Any:
            session.run_by(Choice(((0, "halving_doubling"),)))
            return body(session)

        return group(strategy, workers, within, nodes)

    return begun


def run(group: Any, strategy: str, workers: int, seen: list[str], script: Callable[[Here, int], None] = plain) -> Any:
    first, *others = on_group(group, strategy, workers, make, trained(seen, script), weight=1)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    return first


@pytest.mark.parametrize("workers", [3, pytest.param(4, marks=pytest.mark.slow)])  # of two any order has one sum
def test_a_run_that_tries_schedules_has_the_bits_of_one_that_does_not(group: Any, workers: int) -> None:
    seen: list[str] = []
    found = run(of_one_order(group), "auto(budget=60s)", workers, seen)
    assert {"fixed", "merged", "wait_free", "priority"} <= set(seen)
    assert len(set(seen[-STEPS:])) == 1
    for schedule in ("fixed", "wait_free", "priority"):
        wanted = run(group, f"halving_doubling schedule={schedule}", workers, [])
        assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_nothing_is_tried_where_other_buckets_would_change_bits(group: Any) -> None:
    def body(here: Here) -> tuple[list[str], str]:
        assert here.session is not None
        seen = []
        for number in range(8 + 4 * STEPS):
            plain(here, number)
            seen.append(schedule_of(here))
        return seen, here.session.stats().reason

    for seen, reason in on_group(group, "auto(budget=60s)", 3, make, body, weight=1):
        assert len(set(seen[8:])) == 1
        assert "no other schedule was tried, since other buckets change the order" in reason


def test_other_buckets_do_change_bits_on_a_ring(group: Any) -> None:
    """So that the law above could fail."""
    fixed, alone = (run(group, f"ring schedule={name}", 3, []) for name in ("fixed", "wait_free"))
    assert not all(torch.equal(fixed[name], alone[name]) for name in fixed)


def test_iterations_do_not_overlap_if_the_script_looks_at_gradients(group: Any) -> None:
    def script(here: Here, number: int) -> None:
        here.model(here.share(data(number))).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
        here.optimizer.step()
        here.optimizer.zero_grad()

    seen: list[str] = []
    run(group, "auto(budget=60s)", 2, seen, script)
    assert "wait_free" in seen
    assert not any(name.startswith(("priority", "split")) for name in seen)


def test_a_script_that_looks_late_ends_the_trials_of_overlapping_schedules(group: Any) -> None:
    def script(here: Here, number: int) -> None:
        (plain if number < 8 + 2 * STEPS else looks)(here, number)

    def looks(here: Here, number: int) -> None:
        here.model(here.share(data(number))).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
        here.optimizer.step()
        here.optimizer.zero_grad()

    seen: list[str] = []
    run(group, "auto(budget=60s)", 2, seen, script)
    assert not any(name.startswith(("priority", "split")) for name in seen[8 + 3 * STEPS :])


def test_a_budget_that_is_spent_leaves_what_was_first(group: Any) -> None:
    seen: list[str] = []
    run(group, "auto(budget=1us)", 2, seen)
    assert len(set(seen[8:])) == 1  # what runs without trials


def test_a_checkpoint_names_what_was_chosen_and_the_run_goes_on_with_it(group: Any) -> None:
    def body(here: Here) -> tuple[list[str], list[str]]:
        assert here.session is not None
        before, after = [], []
        prepared = [here.session.prepared[0]]
        middle: dict[str, Any] = {}
        for number in range(COUNT):
            plain(here, number)
            before.append(schedule_of(here))
            if number == 8 + STEPS:
                middle = copy.deepcopy(checkpoint.save(here.session, prepared))
        over = checkpoint.save(here.session, prepared)
        assert [one["measured"] for one in (middle["layouts"][0], over["layouts"][0])] == [False, True]
        checkpoint.load(here.session, prepared, over)
        for number in range(4):
            plain(here, number)
            after.append(schedule_of(here))
        return before, after

    found = on_group(group, "auto(budget=60s)", 2, make, body, weight=1)
    assert found[0] == found[1]
    before, after = found[0]
    assert set(after) == {before[-1]}


def over_torch(strategy: str, workers: int, body: Callable[[Session], Any], nodes: tuple[int, ...] = ()) -> list[Any]:
    """A group over torch.distributed, each rank a thread."""
    assert not nodes
    store, asked = MemoryStore(), Strategy.parse(strategy)
    chosen = asked.resolve(Group(workers), hosts=1)

    def rank(index: int) -> Any:
        session = Session(chosen, Membership(Process(Group(workers), index, Torch(Place(index, workers, store)))))
        session.chooses_schedule = schedule_choice.is_wanted(asked, workers)
        try:
            return body(session)
        finally:
            session.shutdown()

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(rank, range(workers)))


def test_a_schedule_is_chosen_without_a_budget_where_a_message_library_has_no_plan() -> None:
    def body(here: Here) -> str:
        assert here.session is not None
        for number in range(12):
            plain(here, number)
        return here.session.stats().reason

    for reason in on_group(over_torch, "native transport=torch", 2, make, body, weight=1):
        assert "while steps are measured" not in reason
        assert "no other schedule was tried" not in reason
        assert reason.startswith("schedule=")


@pytest.mark.parametrize(("strategy", "at_most"), [("ring", 0), ("auto(budget=60s)", 1)])
def test_the_order_of_additions_is_asked_for_once_where_there_is_a_budget(
    group: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, at_most: int
) -> None:
    """Rank 0 alone asks, of each algorithm that may run."""
    asked: list[str] = []
    order = sessions.order_of_additions

    def counted(plan: Plan) -> str | None:
        asked.append(plan.name)
        return order(plan)

    monkeypatch.setattr(sessions, "order_of_additions", counted)
    run(of_one_order(group) if at_most else group, strategy, 2, [])
    assert len(asked) <= at_most
