"""``schedule=auto``: measures, chooses for all ranks, crosses iterations while nobody looks, and goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy import STAGED, Here, adam, alone, batch, close, loss_of, on_group, sgd, train, weights

from syncline.frameworks.torch import choosing
from syncline.nouns import Layer
from syncline.predict.network import LinearCost
from syncline.session.layout import Lay, Layout
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


LOOKS = [
    clips,
    scales,
    replaces_gradients,
    changes_kept_gradients,
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


@pytest.mark.parametrize("look", [clips, scales, replaces_gradients, uses_a_closure, averages_weights, reads_the_state])
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


def test_a_step_in_which_all_look_gives_one_workers_weights_and_all_go_back(group: Any, asked: Asked) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 8):
            (clips if number == STEPS + 3 else averages_weights if number == STEPS + 6 else step)(here, number)
        return weights(here.model) | dict(enumerate(here.__dict__["mean"]))  # type: ignore[arg-type]

    wanted = alone(sgd, body)
    for found in on_group(group, "direct", 2, sgd, body):
        close(found, wanted)
    assert asked == [True, False]


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=2, on=workers)", "native transport=inproc"])
def test_what_cannot_cross_chooses_among_the_others(group: Any, asked: Asked, place: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for number in range(STEPS + 2):
            step(here, number)
        if here.session is not None:
            assert schedule_of(here) == "wait_free"
        return weights(here.model)

    if place.startswith("native"):
        pytest.skip("no library between threads")
    wanted = alone(adam, body)
    for found in on_group(group, place, 2, adam, body):
        close(found, wanted)
    assert asked in ([False], [True])
