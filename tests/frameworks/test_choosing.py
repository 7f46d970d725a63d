"""``schedule=auto``: measures, chooses for all ranks, crosses iterations while nobody looks, and goes back."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from toy import STAGED, Here, adam, alone, batch, close, fill, loss_of, on_group, sgd, train, weights

from syncline import checkpoint
from syncline.costs.network import LinearCost
from syncline.errors import UsageError
from syncline.frameworks.torch import Options, Prepared, choosing, prepare
from syncline.frameworks.torch.joining import shadow_until_all_joined
from syncline.frameworks.torch.timing import BucketTimes
from syncline.nouns import Bucket, Layer
from syncline.schedules import Cost, PushAndPull
from syncline.schedules.merged import Merged
from syncline.session.layout import Lay, Layout
from syncline.session.session import Session
from syncline.strategy.grammar import read_part
from syncline.strategy.strategy import Strategy

STEPS = choosing._UNCOUNTED + choosing._MEASURED
"""After so many the schedule is chosen, at the next one's first gradient."""

Asked = list[bool]
Script = Callable[[Here, int], None]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Whether iterations might be crossed, each time rank 0 has chosen: then they are, and all else is decided too."""
    monkeypatch.setenv("SYNCLINE_TUNING", "on")
    given: Asked = []

    def choose(
        strategy: Strategy, layers: Sequence[Layer], cost: LinearCost | None, lay: Lay, crossing: bool
    ) -> Layout:
        assert cost is not None
        assert any(layer.backward_s > 0 for layer in layers)
        given.append(crossing)
        text = "priority(slice=40B)" if crossing else "wait_free"
        laid = lay(replace(strategy, schedule=read_part(text)))
        return replace(laid, schedule=text, reason="as a test would have it", cost=cost)

    monkeypatch.setattr(choosing, "choose_schedule", choose)
    return given


def step(here: Here, number: int) -> None:
    train(here, range(number, number + 1))


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("place", ["ring", "direct", "ps(servers=1, update=worker)", "ring" + STAGED])
def test_iterations_are_crossed_when_nobody_looks(group: Any, asked: Asked, place: str, make: Any) -> None:
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

    wanted = alone(make, body)
    for found in on_group(group, place, 2, make, body):
        close(found, wanted)
    assert asked == [True]


def schedule_of(here: Here) -> str:
    assert here.session is not None
    return here.session.stats().strategy.split("schedule=")[1].split()[0]


def crosses(here: Here) -> bool:
    return schedule_of(here).startswith("priority")


def clips(here: Here, number: int) -> None:
    loss_of(here.model(here.share(batch(number)))).backward()
    torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
    here.optimizer.step()
    here.optimizer.zero_grad()


def scales(here: Here, number: int) -> None:
    """A GradScaler without a device: what it does to gradients."""
    (4 * loss_of(here.model(here.share(batch(number))))).backward()
    with torch.no_grad():
        for parameter in here.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
    here.optimizer.step()
    here.optimizer.zero_grad()


def replaces_gradients(here: Here, number: int) -> None:
    loss_of(here.model(here.share(batch(number)))).backward()
    for parameter in here.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    here.optimizer.step()
    here.optimizer.zero_grad()


def changes_kept_gradients(here: Here, number: int) -> None:
    """By views that it has kept; a schedule that crosses iterations would refuse that."""
    loss_of(here.model(here.share(batch(number)))).backward()
    kept = here.__dict__.setdefault("kept", [parameter.grad for parameter in here.model.parameters()])
    torch._foreach_mul_(kept, 0.5)
    here.optimizer.step()
    here.optimizer.zero_grad(set_to_none=False)


def zeroes_by(keep: Callable[[torch.Tensor], Any], tensors: Callable[[Any], list[torch.Tensor]] = list) -> Script:
    """Zeroes gradients behind the step, by what it has kept once, and never reads them by name again."""

    def zeroes(here: Here, number: int) -> None:
        loss_of(here.model(here.share(batch(number)))).backward()
        here.optimizer.step()
        if "kept" not in vars(here):
            read = [parameter.grad for parameter in here.model.parameters()]
            vars(here)["kept"] = [keep(one) for one in read if one is not None]
        torch._foreach_zero_(tensors(vars(here)["kept"]))

    return zeroes


zeroes_kept_gradients = zeroes_by(lambda gradient: gradient)
zeroes_their_memory = zeroes_by(lambda gradient: gradient.data)
zeroes_unseen = zeroes_by(weakref.ref, lambda kept: [one() for one in kept])


def uses_a_closure(here: Here, number: int) -> None:
    def closure() -> torch.Tensor:
        here.optimizer.zero_grad()
        loss = loss_of(here.model(here.share(batch(number))))
        loss.backward()
        return loss

    here.optimizer.step(closure)  # type: ignore[arg-type]


def averages_weights(here: Here, number: int) -> None:
    step(here, number)
    mean = here.__dict__.setdefault("mean", [parameter.detach().clone() for parameter in here.model.parameters()])
    with torch.no_grad():
        torch._foreach_lerp_(mean, list(here.model.parameters()), 0.1)


def keeps_their_memory(here: Here, number: int) -> None:
    """What shares the memory of weights is not seen when it is read."""
    here.__dict__.setdefault("shared", here.model.state_dict())
    step(here, number)


def reads_the_state(here: Here, number: int) -> None:
    step(here, number)
    here.optimizer.state_dict()


def transforms(here: Here, number: int) -> None:
    step(here, number)
    named = dict(here.model.named_parameters())
    torch.func.grad(lambda x: torch.func.functional_call(here.model, named, (x,)).sum())(batch(number))


def trains_a_part(here: Here, number: int) -> None:
    """Without the model's own forward pass."""
    here.optimizer.zero_grad()
    output = here.share(batch(number))
    for module in here.model.children():
        output = module(output)
    loss_of(output).backward()
    here.optimizer.step()


def reads_behind_a_failure(here: Here, number: int) -> None:
    """A forward pass that fails is over."""
    step(here, number)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        here.model(torch.zeros(2, 5, dtype=torch.float64))
    weights(here.model)


LOOKS = [
    clips,
    scales,
    replaces_gradients,
    changes_kept_gradients,
    zeroes_kept_gradients,
    zeroes_their_memory,
    zeroes_unseen,
    uses_a_closure,
    averages_weights,
    keeps_their_memory,
    reads_the_state,
    transforms,
]


@pytest.mark.parametrize("look", LOOKS)
def test_iterations_are_not_crossed_where_one_rank_looks_in_the_steps_that_are_measured(
    group: Any, asked: Asked, look: Script
) -> None:
    """One rank, in one step or in all: the others do as it does in those that all count."""

    def body(here: Here) -> None:
        for number in range(STEPS + 2):
            (look if here.rank == 1 else step)(here, number)
        assert schedule_of(here) == "wait_free"
        assert type(here.optimizer) is torch.optim.SGD

    on_group(group, "ring", 2, sgd, body)
    assert asked == [False]


@pytest.mark.parametrize("look", LOOKS)
def test_scripts_that_look_get_one_workers_weights(group: Any, look: Script) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            look(here, number)
        return weights(here.model)

    wanted = alone(sgd, body)
    for found in on_group(group, "ring", 2, sgd, body):
        close(found, wanted)


@pytest.mark.parametrize(
    "look",
    [clips, scales, replaces_gradients, uses_a_closure, averages_weights, reads_the_state, reads_behind_a_failure],
)
@pytest.mark.parametrize("who", [0, 2])
def test_one_look_of_one_rank_later_makes_all_go_back(group: Any, asked: Asked, look: Script, who: int) -> None:
    """In the step after the one whose ticket tells of it."""
    at = STEPS + 3

    def body(here: Here) -> list[bool]:
        found = []
        for number in range(at + 5):
            (look if here.rank == who and number == at else step)(here, number)
            found.append(crosses(here))
        assert type(here.optimizer) is torch.optim.SGD
        return found

    found = on_group(group, "ring", 3, sgd, body)
    first = found[0]
    assert first[STEPS:at] == [True] * 3
    assert first[-2:] == [False] * 2
    assert all(one == first for one in found)
    assert asked == [True, False]


def test_iterations_are_crossed_again_when_nobody_has_looked_for_long(
    group: Any, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as late each time; a look while ranks watch lets them wait again."""
    patience = 8  # longer than iterations are crossed here
    monkeypatch.setattr(choosing, "_PATIENCE", patience)
    again = STEPS + 2 + 2 + patience + choosing._MEASURED  # a look at once, three steps until all are back
    looks = (STEPS, again + 2, again + 5 + 2 * patience + 2)
    last = again + 5 + 2 * patience + choosing._MEASURED + 4 * patience + choosing._MEASURED + 4

    def body(here: Here) -> dict[str, torch.Tensor]:
        seen = []
        for number in range(last):
            (reads_the_state if number in looks else step)(here, number)
            if here.session is not None:
                seen.append(crosses(here))
        if here.session is not None:
            changes = [number for number in range(1, last) if seen[number] != seen[number - 1]]
            assert changes[:3] == [STEPS, STEPS + 3, STEPS + 3 + patience + choosing._MEASURED]
            assert seen[-1]
        return weights(here.model)

    wanted = alone(sgd, body)
    for found in on_group(group, "ring", 2, sgd, body):
        close(found, wanted)
    assert asked == [True, False, True, False, False, True], asked


@pytest.mark.parametrize("at", [STEPS, STEPS + 2])
@pytest.mark.parametrize("keep", ["weights", "gradients", "memory of gradients"])
def test_what_is_kept_while_iterations_are_crossed_is_found_in_the_same_step(
    group: Any, asked: Asked, keep: str, at: int
) -> None:
    """Tensors with the memory of weights, made where nothing is under way, or gradients that are zeroed by them."""

    def body(here: Here) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for number in range(STEPS + 7):
            if number < at:
                step(here, number)
                continue
            output = here.model(here.share(batch(number)))
            if keep == "weights" and number == at:
                kept = [parameter.detach() for parameter in here.model.parameters()]
            loss_of(output).backward()
            here.optimizer.step()
            if keep == "weights":
                found += [one.clone() for one in kept]
                here.optimizer.zero_grad()
                continue
            if number == at:
                read = [parameter.grad for parameter in here.model.parameters()]
                kept = [one if keep == "gradients" else one.data for one in read if one is not None]
                del read
            torch._foreach_zero_(kept)
        assert here.session is None or not crosses(here)
        return [*found, *weights(here.model).values()]

    wanted = dict(enumerate(alone(sgd, body)))
    for found in on_group(group, "ring", 2, sgd, body):
        close(dict(enumerate(found)), wanted)  # type: ignore[arg-type]
    assert asked == [True, False]


def in_shared_memory(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = sgd(index)
    model.share_memory()
    return model, optimizer


def over_numpy(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = sgd(index)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    return model, optimizer


@pytest.mark.parametrize("make", [in_shared_memory, over_numpy])
def test_iterations_are_not_crossed_where_others_than_tensors_have_the_memory_of_weights(
    group: Any, asked: Asked, make: Any
) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            step(here, number)
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, "ring", 2, make, body):
        close(found, wanted)
    assert asked == [False]


def test_ranks_wait_no_longer_than_at_first_once_iterations_have_been_crossed_for_longer(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a checkpoint now and then: all go back three steps behind it."""
    patience, crossed = 4, 11
    monkeypatch.setattr(choosing, "_PATIENCE", patience)
    period = crossed + patience + choosing._MEASURED

    def body(here: Here) -> list[int]:
        seen = []
        for number in range(STEPS + 3 * period + 1):
            looks = number >= STEPS and (number - STEPS) % period == crossed - 3
            (reads_the_state if looks else step)(here, number)
            seen.append(crosses(here))
        return [number - STEPS for number in range(1, len(seen)) if seen[number] != seen[number - 1]]

    wanted = [0, crossed, period, period + crossed, 2 * period, 2 * period + crossed, 3 * period]
    assert on_group(group, "ring", 2, sgd, body) == [wanted] * 2


@pytest.mark.parametrize("at", [4, STEPS + 1])
def test_methods_that_were_kept_are_the_plain_ones_when_all_have_gone_back(group: Any, asked: Asked, at: int) -> None:
    """Kept while steps are watched, or iterations crossed; a scheduler looks at whether the optimizer was called."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        optimizer.scheduler = StepLR(optimizer, 5, 0.9)  # type: ignore[attr-defined]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        optimizer: Any = here.optimizer
        for number in range(STEPS + 8):
            if number <= at:
                zero_grad, state = optimizer.zero_grad, optimizer.state_dict
                load, add = optimizer.load_state_dict, optimizer.add_param_group
            zero_grad()
            loss_of(here.model(here.share(batch(number)))).backward()
            if number == STEPS + 3:
                assert all(parameter.grad is not None for parameter in here.model.parameters())
            if number <= at:
                update = partial(optimizer.step)
            update()
            optimizer.scheduler.step()
        load(state())
        if here.replica is not None:
            assert type(optimizer) is torch.optim.SGD
        with pytest.raises(TypeError, match="param_group must be a dict"):
            add([])
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, "ring", 2, make, body):
        close(found, wanted)
    assert asked == [True, False]


def counted(call: Callable[[], Any], calls: list[int]) -> Callable[[], None]:
    def counts() -> None:
        calls.append(1)
        call()

    return counts


def test_a_step_that_the_script_puts_on_the_optimizer_meanwhile_stays(group: Any, asked: Asked) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        optimizer.scheduler = StepLR(optimizer, 5, 0.9)  # type: ignore[attr-defined]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        optimizer: Any = here.optimizer
        calls: list[int] = []
        for number in range(STEPS + 8):
            if number == STEPS + 1:
                optimizer.step = counted(optimizer.step, calls)
            (reads_gradients if number == STEPS + 3 else step)(here, number)
            optimizer.scheduler.step()
        assert len(calls) == 7
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, "ring", 2, make, body):
        close(found, wanted)
    assert asked == [True, False]


def test_weights_that_are_used_without_the_models_forward_pass_are_looked_at(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 3):
            trains_a_part(here, number)
        return weights(here.model)

    wanted = alone(sgd, body)
    for found in on_group(group, "ring", 2, sgd, body, weight=1):
        close(found, wanted)
    assert asked == [False]


def test_a_step_in_which_all_look_gives_one_workers_weights_and_all_go_back(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 8):
            (clips if number == STEPS + 3 else averages_weights if number == STEPS + 6 else step)(here, number)
        return weights(here.model) | dict(enumerate(here.__dict__["mean"]))  # type: ignore[arg-type]

    wanted = alone(sgd, body)
    for found in on_group(group, "direct", 2, sgd, body):
        close(found, wanted)
    assert asked == [True, False]


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_what_cannot_cross_chooses_among_the_others(group: Any, asked: Asked, place: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            step(here, number)
        if here.session is not None:
            assert schedule_of(here) == "wait_free"
        return weights(here.model)

    wanted = alone(adam, body)
    for found in on_group(group, place, 2, adam, body):
        close(found, wanted)
    assert asked == [False]


def test_a_parameter_of_something_else_that_is_added_makes_all_go_back(group: Any, asked: Asked) -> None:
    """A schedule that the script has named would refuse it; one that was chosen gives way."""

    def body(here: Here) -> torch.Tensor:
        other = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        for number in range(STEPS + 6):
            if number == STEPS + 2:
                assert here.session is None or crosses(here)
                here.optimizer.add_param_group({"params": [other], "lr": 0.5})
            here.optimizer.zero_grad()
            (loss_of(here.model(here.share(batch(number)))) + other.sum() / here.world).backward()
            if other.grad is not None:
                other.grad.mul_(here.world)  # nobody averages it
            here.optimizer.step()
        assert here.session is None or not crosses(here)
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


@pytest.mark.parametrize("at", [1, 5, STEPS + 1, STEPS + 3])
@pytest.mark.parametrize("look", [step, clips])
@pytest.mark.parametrize("codec", ["none", "topk(ratio=0.4)"])
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
    # Who saves has looked, too, where iterations were crossed or might have been.
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

    def choose(strategy: Strategy, _: Any, cost: LinearCost, lay: Lay, crossing: bool) -> Layout:
        assert crossing
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

    def choose(strategy: Strategy, _: Any, cost: LinearCost | None, lay: Lay, crossing: bool) -> Layout:
        assert not crossing
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

    def choose(*_: object) -> Layout:
        raise UsageError("none fits")

    def body(here: Here) -> Layout:
        train(here, range(STEPS + 1))
        assert here.replica is not None
        return here.replica.gradients.layout

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

    def part(number: int, rank: int) -> torch.Tensor:
        return batch(100 * number + rank, 4)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for epoch in (0, 100):
            for number in range(epoch, epoch + counts[here.rank]):
                here.optimizer.zero_grad()
                loss_of(here.model(part(number, here.rank))).backward()
                here.optimizer.step()
            shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    def union(here: Here) -> dict[str, torch.Tensor]:
        for epoch in (0, 100):
            for number in range(epoch, epoch + max(counts)):
                here.optimizer.zero_grad()
                parts = [part(number, rank) for rank, count in enumerate(counts) if number - epoch < count]
                loss_of(here.model(torch.cat(parts))).backward()
                here.optimizer.step()
        return weights(here.model)

    wanted = alone(sgd, union)
    for found in on_group(group, "ring", 3, sgd, body):
        close(found, wanted)


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

    wanted = alone(make, body)
    for found in on_group(group, "ring", 3, make, body):
        close(found, wanted)
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

    wanted = alone(make, body)
    for found in on_group(group, "ring", 2, make, body):
        close(found, wanted)
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


def reads_gradients(here: Here, number: int) -> None:
    here.optimizer.zero_grad()
    loss_of(here.model(here.share(batch(number)))).backward()
    assert all(parameter.grad is not None for parameter in here.model.parameters())
    here.optimizer.step()


def evaluates(here: Here, number: int) -> None:
    step(here, number)
    here.model.eval()
    with torch.no_grad():
        here.model(batch(number))
    here.model.train()


def flushes(here: Here, number: int) -> None:
    step(here, number)
    if here.replica is not None:
        here.replica.flush()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_ranks_look_at_and_when_all_run_the_same_and_the_weights_are_those_of_fifo(
    group: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """To the bit between two, whose sums are the same however tensors are cut."""
    monkeypatch.setattr(choosing, "_PATIENCE", 3)
    ways = [step] * 24 + [reads_gradients, evaluates, flushes, reads_the_state, averages_weights]
    chosen = np.random.default_rng(seed).integers(len(ways), size=(2, 60))

    def body(here: Here) -> tuple[list[str], dict[str, torch.Tensor]]:
        seen = []
        for number, way in enumerate(chosen[here.rank]):
            ways[way](here, number)
            seen.append(schedule_of(here))
        return seen, weights(here.model)

    (first, found), (second, other) = on_group(group, "ring", 2, sgd, body)
    assert first == second
    assert {"fixed", "merged", "wait_free"} <= set(first)
    (_, wanted), _ = on_group(group, "ring schedule=fifo", 2, sgd, body)
    close(found, wanted, 0.0)
    close(other, wanted, 0.0)
