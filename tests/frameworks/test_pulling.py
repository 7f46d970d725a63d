"""Weights that others hold under schedules by layer: pushed, updated and pulled by bucket, applied when needed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from scripts import (
    STEPS,
    accumulated,
    changed_weights,
    copied,
    coupled,
    evaluated_by_one_rank,
    in_another_mode,
    moving_average,
    penalised,
    plain,
    plain_of_fifo,
    saved,
    scheduled,
    tied,
    under_way,
    weights_and_state,
    with_closure,
    zero_filled,
    zeroed_by_kept,
    zeroed_otherwise,
)
from toy import (
    OPTIMIZERS,
    STAGED,
    Here,
    adam,
    alone,
    batch,
    close,
    loss_of,
    making,
    mlp,
    on_group,
    same_as_alone,
    sgd,
    train,
    weights,
)

from syncline import checkpoint
from syncline.errors import GradientError, MismatchError, StrategyError, SynclineError
from syncline.frameworks.torch import Prepared
from syncline.strategy.strategy import Strategy

PLACES = ["ps(servers=1)", "ps(servers=2)", "ps(servers=2, on=workers)"]
LAYERED = [f"{place} schedule=priority(slice=40B)" for place in PLACES]
LAYERED += [f"ps(servers=1) schedule=priority(slice=40B){STAGED}", "ps(servers=2, on=workers) schedule=priority"]
SCRIPTS = [
    plain, moving_average, saved, scheduled, accumulated, zeroed_otherwise, changed_weights, penalised, copied,
    with_closure, in_another_mode, zeroed_by_kept,
]  # fmt: skip


# Every script under one of the strategies, which take turns.
TURNS = [*zip(SCRIPTS, cycle(LAYERED))]


@pytest.mark.every(2)
@pytest.mark.parametrize(("script", "strategy"), TURNS)
def test_scripts_get_one_workers_weights(group: Any, strategy: str, script: Callable[[Here], Any]) -> None:
    same_as_alone(group, strategy, 2, sgd, script)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", LAYERED)
def test_bits_are_those_of_fifo(group: Any, strategy: str) -> None:
    place, staged = strategy.split(" schedule")[0], STAGED if strategy.endswith(STAGED) else ""
    wanted = on_group(group, f"{place} schedule=fifo{staged}", 2, adam, plain_of_fifo)
    for found, other in zip(on_group(group, strategy, 2, adam, plain), wanted, strict=True):
        close(found, other, 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize(("codec", "place"), [*zip(["int8", "onebit", "topk(ratio=0.4)", "ternary"], cycle(PLACES))])
def test_a_codecs_bits_do_not_depend_on_the_schedule(group: Any, place: str, codec: str) -> None:
    """What it sees whole is in one bucket, wherever the schedule cuts it, and residuals are those of tensors."""
    wanted = on_group(group, f"{place} codec={codec} schedule=wait_free", 2, sgd, plain_of_fifo)
    found = on_group(group, f"{place} codec={codec} schedule=priority(slice=40B)", 2, sgd, plain)
    for one, other in zip(found, wanted, strict=True):
        close(one, other, 0.0)


@pytest.mark.parametrize(("optimizer", "strategy"), [*zip(OPTIMIZERS, cycle([LAYERED[1], LAYERED[2]]))])
def test_owners_know_what_one_optimizer_would(group: Any, strategy: str, optimizer: str) -> None:
    """Their state too, put together while weights are under way."""

    same_as_alone(group, strategy, 2, making(optimizer), weights_and_state)


@pytest.mark.parametrize("strategy", LAYERED[:3])
def test_one_rank_may_look_alone(group: Any, strategy: str) -> None:
    wanted = alone(sgd, evaluated_by_one_rank)
    found, other = on_group(group, strategy, 2, sgd, evaluated_by_one_rank)
    close(found, wanted)
    close({name: other[name] for name in weights(mlp())}, {name: wanted[name] for name in weights(mlp())})


@pytest.mark.parametrize("strategy", [LAYERED[0], LAYERED[2]])
def test_tied_weights_wait_where_they_are_read(group: Any, strategy: str) -> None:
    same_as_alone(group, strategy, 2, tied, zero_filled, unused="zeros")


def test_an_optimizer_that_nobody_knows_updates_all_at_once(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One server owns all that its step depends on."""
    same_as_alone(group, LAYERED[0], 2, coupled, plain_of_fifo)
    assert "its step waits for all gradients" in caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", LAYERED)
def test_weights_stay_the_old_ones_until_the_optimizer_is_called(group: Any, strategy: str) -> None:
    """Also where those that have come are looked for: the owners have made the update by then."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(2))
        before = weights(here.model)
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(2)))).backward()
        assert here.replica is None or under_way(here)
        for name, tensor in weights(here.model).items():
            assert torch.equal(tensor, before[name])
        here.optimizer.step()
        train(here, range(3, 5))
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


# Layers in another order on each rank, and layers that are not used --------------------------------------------------


class Branches(torch.nn.Module):
    """Two branches, of which ``first`` says which backward comes to first; ``used`` says which are used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]).double()
        self.order, self.used = [0, 1], [True, True]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.branches[index](x) for index in self.order if self.used[index]]
        return torch.stack(parts).sum(0)


def branches(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = Branches()
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, 0.1 * (number + 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def in_another_order(here: Here) -> dict[str, torch.Tensor]:
    """On every rank and in every step."""
    for step in range(STEPS):
        here.model.order = [0, 1] if (step + here.rank) % 2 else [1, 0]  # type: ignore[assignment]
        train(here, range(step, step + 1))
    return weights(here.model)


def used_by_turns(here: Here) -> dict[str, torch.Tensor]:
    """Other parameters in every step, on all ranks alike; one step has all."""
    for step in range(STEPS):
        here.model.used = [step % 3 != 1, step % 3 != 2]  # type: ignore[assignment]
        here.optimizer.zero_grad(set_to_none=False)
        train(here, range(step, step + 1))
    return weights(here.model)


OTHERS = ["ps(servers=1) schedule=wait_free", "ps(servers=1, update=worker) schedule=priority(slice=40B)"]


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*LAYERED, *OTHERS])
def test_layers_may_fire_in_another_order_on_each_rank(group: Any, strategy: str) -> None:
    same_as_alone(group, strategy, 2, branches, in_another_order)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*LAYERED, *OTHERS])
def test_parameters_may_come_and_go_where_that_is_said(group: Any, strategy: str) -> None:
    """As zeros, for which momentum goes on; else the parameter without a gradient is named."""

    def whole(here: Here) -> dict[str, torch.Tensor]:
        """As if what is not used had gradients of zero."""
        for step in range(STEPS):
            here.model.used = [step % 3 != 1, step % 3 != 2]  # type: ignore[assignment]
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            for parameter in here.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            here.optimizer.step()
        return weights(here.model)

    wanted = alone(branches, whole)
    for found in on_group(group, strategy, 2, branches, used_by_turns, unused="zeros"):
        close(found, wanted)
    with pytest.raises(GradientError, match=r"2 parameters got no gradient in this backward pass: 'branches.0.weight'"):
        on_group(group, strategy, 2, branches, used_by_turns)


# What is refused -----------------------------------------------------------------------------------------------------


def after_backward(change: Callable[[Here], Any]) -> Callable[[Here], None]:
    """A script that does something between backward and step."""

    def body(here: Here) -> None:
        train(here, range(2))
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(2)))).backward()
        change(here)
        here.optimizer.step()

    return body


def faster(here: Here) -> None:
    here.optimizer.param_groups[0]["lr"] *= 2


def clamped(here: Here) -> None:
    with torch.no_grad():
        for parameter in here.model.parameters():
            parameter.clamp_(-0.01, 0.01)


def loaded(here: Here) -> None:
    assert here.replica is not None
    here.replica.flush()  # PyTorch has errors of its own for what comes up while a state is loaded
    here.model.load_state_dict(mlp(5).state_dict())


def clipped(here: Here) -> None:
    torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.01)


def clipped_past_autograd(here: Here) -> None:
    for parameter in here.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def clipped_by_owners(here: Here) -> None:
    assert here.client is not None
    here.client.clip(1.0)


def prepared(here: Here) -> tuple[Any, list[Prepared]]:
    assert here.replica is not None
    return here.session, [Prepared(here.model, here.optimizer, here.replica, here.client)]


def saved_by_syncline(here: Here) -> None:
    checkpoint.save(*prepared(here))


def loaded_by_syncline(here: Here) -> None:
    checkpoint.load(*prepared(here), {})


def again(here: Here) -> None:
    loss_of(here.model(here.share(batch(3)))).backward()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "says", "strategy"),
    [
        (*row, other)
        for row, other in zip(
            [
                (
                    faster,
                    r"'lr' of the optimizer's group 0 was 0.1 at the first gradient of this step and is 0.2 at "
                    r"step\(\)",
                ),
                (clamped, r"'0.weight' were changed between the first gradient of this step and step\(\)"),
                (loaded, r"'0.weight' were changed between the first gradient of this step and step\(\)"),
                (clipped, r"the gradient of '0.weight' was changed between backward\(\) and step\(\)"),
                (clipped_past_autograd, r"the gradient of '0.weight' was changed between backward\(\) and step\(\)"),
                (
                    clipped_by_owners,
                    r"under schedule=priority owners of the weights update each bucket when it arrives",
                ),
                (
                    lambda here: here.optimizer.state_dict(),
                    r"optimizer.state_dict\(\) between backward\(\) and step\(\)",
                ),
                (saved_by_syncline, r"syncline.state_dict\(\) between backward\(\) and step\(\)"),
                (loaded_by_syncline, r"syncline.load_state_dict\(\) between backward\(\) and step\(\)"),
                (lambda here: here.optimizer.zero_grad(), r"the gradient of '0.weight' was changed"),
                (again, r"a second backward\(\) before step\(\)"),
            ],
            cycle([LAYERED[0], LAYERED[2], LAYERED[3]]),
        )
    ],
)
def test_what_owners_cannot_take_into_account_is_refused(
    group: Any, strategy: str, change: Callable[[Here], Any], says: str
) -> None:
    with pytest.raises(GradientError, match=says):
        on_group(group, strategy, 2, sgd, after_backward(change))


@pytest.mark.parametrize("strategy", [LAYERED[0], LAYERED[2]])
def test_ranks_whose_values_differ_are_named(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        here.optimizer.param_groups[0]["lr"] = 0.1 * (here.rank + 1)
        train(here, range(2))
        here.replica.flush() if here.replica is not None else None

    with pytest.raises((MismatchError, SynclineError), match=r"rank 1"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ps(servers=1) schedule=split", r"push and pull are two phases .* works is 'ps\(servers=1\) schedule=pri"),
        ("ps(servers=1, on=workers) schedule=split", "push and pull are two phases"),
        ("ps(servers=1) schedule=delayed", r"owners of the weights handle one step at a time; .* works is"),
    ],
)
def test_what_owners_of_weights_do_not_do_is_refused_by_its_reason(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        Strategy.parse(text)


def test_a_checkpoint_under_a_codec_is_no_change_of_weights(group: Any) -> None:
    """What has been pulled is in the parameters then, whoever has put it there."""

    def body(here: Here) -> None:
        for _ in range(2):
            train(here, range(2))
            checkpoint.save(*prepared(here))

    on_group(group, "ps(servers=1) schedule=priority codec=int8", 2, adam, body)
