"""``schedule=auto``: measures, chooses for all ranks, and goes on with what was chosen."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from choosing_runs import STEPS, Asked, Script, answered, clips, overlaps, schedule_of, step
from torch.optim.lr_scheduler import StepLR
from toy import (
    STAGED,
    Here,
    adam,
    alone,
    batch,
    close,
    fill,
    loss_of,
    on_group,
    same_as_alone,
    sgd,
    train,
    uneven_epochs_as_alone,
    weights,
)

from syncline import checkpoint
from syncline.costs.plans import LinearCost
from syncline.errors import UsageError
from syncline.frameworks.torch import Options, Prepared, choosing, prepare
from syncline.nouns import Bucket, Layer
from syncline.schedules import Cost, PushAndPull
from syncline.schedules.merged import Merged
from syncline.session.layout import Lay, Layout
from syncline.session.session import Session
from syncline.strategy.grammar import read_part
from syncline.strategy.strategy import Strategy
from syncline.training.exchange import BucketTimes


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return answered(monkeypatch)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "make"), [*zip(["ring", "direct", "ps(servers=1, update=worker)", "ring" + STAGED], cycle([sgd, adam]))]
)
def test_iterations_overlap_when_no_rank_looks(group: Any, asked: Asked, place: str, make: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        seen = []
        for number in range(STEPS + 4):
            step(here, number)
            if here.session is not None:
                seen.append(here.session.stats().strategy.split("schedule=")[1].split()[0])
        if here.session is not None:
            assert seen == ["fixed"] * 2 + ["merged"] * 6 + ["priority(slice=40B)"] * 4
            assert here.session.stats().reason == "as a test would have it"
        return weights(here.model)

    same_as_alone(group, place, 2, make, body)
    assert asked == [True]


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_without_overlap_the_other_schedules_are_candidates(group: Any, asked: Asked, place: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            step(here, number)
        if here.session is not None:
            assert schedule_of(here) == "wait_free"
        return weights(here.model)

    same_as_alone(group, place, 2, adam, body)
    assert asked == [False]


def test_a_parameter_of_something_else_that_is_added_makes_all_go_back(group: Any, asked: Asked) -> None:
    """A schedule that the script has named would refuse it; one that was chosen gives way."""

    def body(here: Here) -> torch.Tensor:
        other = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        for number in range(STEPS + 6):
            if number == STEPS + 2:
                assert here.session is None or overlaps(here)
                here.optimizer.add_param_group({"params": [other], "lr": 0.5})
            here.optimizer.zero_grad()
            (loss_of(here.model(here.share(batch(number)))) + other.sum() / here.world).backward()
            if other.grad is not None:
                other.grad.mul_(here.world)  # nobody averages it
            here.optimizer.step()
        assert here.session is None or not overlaps(here)
        return other.detach()

    wanted = alone(sgd, body)
    for found in on_group(group, "ring", 2, sgd, body):
        assert torch.equal(found, wanted)
    assert asked == [True, False]


class Odd(torch.optim.SGD):
    """Of which nobody knows whether it updates parameters alone."""


def odd(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = sgd(index)
    return model, Odd(model.parameters(), lr=0.1)


def odd_on_one(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return odd(index) if index == 1 else sgd(index)


ONE_BY_ONE = threading.Lock()
"""The compiler of scripts is not for several threads."""


def scripted(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, _ = sgd(index)
    with ONE_BY_ONE:
        model[1] = torch.jit.script(model[1])  # type: ignore[index, operator]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("make", [odd, odd_on_one, scripted])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_what_one_rank_cannot_do_none_does(group: Any, asked: Asked, caplog: Any, make: Any) -> None:
    def body(here: Here) -> None:
        for number in range(STEPS + 2):
            step(here, number)
        assert schedule_of(here) == "wait_free"

    on_group(group, "ring", 2, make, body)
    assert asked == [False]
    assert not caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("at", "look", "codec"),
    [
        (1, step, "none"),
        (5, step, "topk(ratio=0.4)"),
        (5, clips, "none"),
        (STEPS + 1, step, "none"),
        (STEPS + 1, clips, "topk(ratio=0.4)"),
        (STEPS + 3, step, "topk(ratio=0.4)"),
        (STEPS + 3, clips, "none"),
    ],
)
def test_a_resumed_run_goes_on_with_what_was_chosen(
    group: Any, asked: Asked, at: int, look: Script, codec: str
) -> None:
    kept: dict[int, Any] = {}
    more = range(at, at + STEPS + 3)
    strategy = f"ring codec={codec}"

    def prepared(here: Here) -> list[Prepared]:
        assert here.replica is not None
        return [Prepared(here.model, here.optimizer, here.replica, here.client)]

    def first(here: Here) -> dict[str, torch.Tensor]:
        for number in range(at):
            look(here, number)
        assert here.session is not None
        state = [here.model.state_dict(), here.optimizer.state_dict(), checkpoint.save(here.session, prepared(here))]
        kept[here.rank] = copy.deepcopy([*state, schedule_of(here)])
        for number in more:
            look(here, number)
        return weights(here.model)

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        model, optimizer, state, schedule = kept[here.rank]
        here.model.load_state_dict(model)
        here.optimizer.load_state_dict(optimizer)
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), state)
        assert schedule_of(here) == schedule
        for number in more:
            look(here, number)
        return weights(here.model)

    wanted = on_group(group, strategy, 2, sgd, first)
    for found, known in zip(on_group(group, strategy, 2, sgd, resumed), wanted, strict=True):
        close(found, known, 0.0)
    # Saving also counts as a look if iterations overlapped or might have overlapped.
    assert len(asked) >= 1


def test_a_state_of_what_was_chosen_goes_with_the_schedule_by_name(group: Any) -> None:
    """And a schedule that this version does not have is named."""
    kept: dict[int, Any] = {}

    def prepared(here: Here) -> list[Prepared]:
        assert here.replica is not None
        return [Prepared(here.model, here.optimizer, here.replica, here.client)]

    def first(here: Here) -> None:
        for number in range(STEPS + 2):
            step(here, number)
        assert here.session is not None
        kept[here.rank] = checkpoint.save(here.session, prepared(here))

    def resumed(here: Here) -> None:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[here.rank])
        assert schedule_of(here) == "fixed"
        step(here, STEPS + 2)

    def strange(here: Here) -> None:
        assert here.session is not None
        state = copy.deepcopy(kept[here.rank])
        state["layouts"][0]["chosen"]["schedule"] = "newest"
        with pytest.raises(UsageError, match="unknown schedule 'newest'"):
            checkpoint.load(here.session, prepared(here), state)

    on_group(group, "ring", 2, sgd, first)
    on_group(group, "ring schedule=fixed", 2, sgd, resumed)
    on_group(group, "ring", 2, sgd, strange)


def test_schedules_are_chosen_for_the_codec_that_is_resumed(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where codec=auto has taken another one than the run before: it may not go with what goes with that."""
    asked_for: list[Strategy] = []

    def choose(strategy: Strategy, _: Any, cost: LinearCost, lay: Lay, overlap: bool, **_more: Any) -> Layout:
        assert overlap
        asked_for.append(strategy)
        laid = lay(replace(strategy, schedule=read_part("wait_free")))
        return replace(laid, schedule="wait_free", reason="as a test would have it", cost=cost)

    monkeypatch.setattr(choosing, "choose_schedule", choose)
    kept: dict[int, Any] = {}

    def prepared(here: Here) -> list[Prepared]:
        assert here.replica is not None
        return [Prepared(here.model, here.optimizer, here.replica, here.client)]

    def first(here: Here) -> None:
        step(here, 0)
        assert here.session is not None
        kept[here.rank] = checkpoint.save(here.session, prepared(here))

    def resumed(here: Here) -> Strategy:
        assert here.session is not None
        here.session.chose_codec = True
        checkpoint.load(here.session, prepared(here), kept[here.rank])
        for number in range(1, STEPS + 3):
            step(here, number)
        assert schedule_of(here) == "wait_free"
        return here.session.strategy

    on_group(group, "ring codec=int8", 2, sgd, first)
    running, _ = on_group(group, "ring", 2, sgd, resumed)
    assert "int8" in str(running)
    assert asked_for == [running]


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_a_push_and_its_pull_are_predicted_as_one_and_cut_as_two(
    group: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    predicted: list[LinearCost | None] = []
    cut: list[Cost | None] = []
    half, buckets = LinearCost(1.0, 2.0), Merged.buckets

    def noted(self: Merged, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        cut.append(cost)
        return buckets(self, layers, cost)

    def choose(strategy: Strategy, _: Any, cost: LinearCost | None, lay: Lay, overlap: bool, **_more: Any) -> Layout:
        assert not overlap
        predicted.append(cost)
        laid = lay(replace(strategy, schedule=read_part("merged")))
        return replace(laid, schedule="merged", reason="as a test would have it", cost=cost)

    monkeypatch.setattr(choosing, "choose_schedule", choose)
    monkeypatch.setattr(Merged, "buckets", noted)
    monkeypatch.setattr(BucketTimes, "cost", lambda *_: half)
    on_group(group, place, 2, sgd, lambda here: train(here, range(STEPS + 1)))
    assert predicted == [LinearCost(2.0, 4.0)]
    assert [cost for cost in cut if cost is not None] == [PushAndPull(half, half)]


def test_what_was_measured_is_kept_where_no_schedule_can_be_chosen(
    group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = LinearCost(1.0, 2.0)

    def choose(*_: object, **_more: object) -> Layout:
        raise UsageError("none fits")

    def body(here: Here) -> Layout:
        train(here, range(STEPS + 1))
        assert here.replica is not None
        return here.replica.exchange.layout

    monkeypatch.setattr(choosing, "choose_schedule", choose)
    monkeypatch.setattr(BucketTimes, "cost", lambda times, _: cost if times._shortest_s else None)
    first, second = on_group(group, "ring", 2, sgd, body)
    assert first == second
    assert (first.schedule, first.cost) == ("merged", cost)
    assert any(layer.backward_s for layer in first.layers)
    assert "schedule=auto: none fits; buckets stay as they were" in caplog.text


@pytest.mark.parametrize("counts", [[3, 12, 7], [12, 3, 3], [STEPS, STEPS + 1, STEPS + 3]])
def test_ranks_without_batches_come_along(group: Any, counts: list[int]) -> None:
    """Through every phase, rank 0 among them, and again in the next epoch."""
    uneven_epochs_as_alone(group, "ring", counts, lambda _: None)


@pytest.mark.parametrize(
    ("place", "nodes"),
    [("ring codec=int8", ()), ("ring codec=powersgd(rank=1)", ()), ("hierarchical codec=int8", (0, 0, 1))],
)
def test_codecs_see_the_same_tensors_under_any_schedule(group: Any, place: str, nodes: tuple[int, ...]) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 4):
            step(here, number)
        return weights(here.model)

    plain = on_group(group, f"{place} schedule=wait_free", 3, sgd, body, nodes)
    for found, wanted in zip(on_group(group, place, 3, sgd, body, nodes), plain, strict=True):
        close(found, wanted, 1e-6 if "powersgd" in place else 0.0)


class Branches(torch.nn.Module):
    """Whose halves go in another order on each rank."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 3).double(), torch.nn.Linear(4, 3).double()
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            return torch.tanh(self.left(x)) + self.right(x)
        right = self.right(x)
        return right + torch.tanh(self.left(x))


def test_layers_may_fire_in_any_order(group: Any, asked: Asked) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = fill(Branches(index == 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 4):
            step(here, number)
        return weights(here.model)

    same_as_alone(group, "ring", 3, make, body)
    assert asked == [True]


def test_two_models_choose_each_for_itself(group: Any, asked: Asked) -> None:
    """One of them is clipped."""

    def body(session: Session) -> tuple[str, str]:
        models = [sgd(), sgd()]
        made = [prepare(session, *one, Options()) for one in models]
        for number in range(STEPS + 3):
            for index, (model, optimizer) in enumerate(models):
                loss_of(model(batch(number))).backward()
                if index == 1:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        stats = session.stats()
        for one in made:
            assert one is not None
            one.release(settle=True)
        return stats.strategy, stats.reason

    found = group("ring", 2, body)
    assert found[0] == found[1]
    assert "schedule=priority(slice=40B)" in found[0][0]
    assert found[0][1].count("as a test would have it") == 2
    assert sorted(asked) == [False, True]


@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers_may_be_made_before_or_after(group: Any, asked: Asked, before: bool) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        if before:
            optimizer.scheduler = StepLR(optimizer, 1, 0.9)  # type: ignore[attr-defined]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        scheduler = here.optimizer.scheduler if before else StepLR(here.optimizer, 1, 0.9)  # type: ignore[attr-defined]
        for number in range(STEPS + 8):
            (clips if number == STEPS + 4 else step)(here, number)
            scheduler.step()
        return weights(here.model)

    same_as_alone(group, "ring", 2, make, body)
    assert asked == [True, False]


def test_what_is_kept_is_not_left_behind(group: Any) -> None:
    """When all is over the optimizer is the user's own, and the model has no hooks but those that it always has."""

    def body(here: Here) -> tuple[list[int], type, set[str]]:
        for number in range(STEPS + 4):
            (clips if number == 4 else step)(here, number)
        modules = list(here.model.modules())
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
        hooks += [len(parameter._backward_hooks or ()) for parameter in here.model.parameters()]
        return hooks, type(here.optimizer), {*vars(here.optimizer), *vars(here.model)} - {"_opt_called"}

    chosen, named = (on_group(group, f"ring{schedule}", 2, sgd, body) for schedule in ("", " schedule=wait_free"))
    assert chosen == named
