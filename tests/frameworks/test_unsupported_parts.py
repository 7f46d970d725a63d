"""What schedules and sync modes ask of the adapter is done, or refused by name: parts that are registered here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from toy import Here, alone, batch, close, loss_of, on_group, sgd, weights

from remade import Remade
from syncline import registry
from syncline.errors import GradientError, MismatchError, UsageError
from syncline.frameworks._supported import check_schedule
from syncline.frameworks.torch.prepare import shadow_until_all_joined
from syncline.schedules import Application, Phases
from syncline.schedules.fixed import Fixed
from syncline.strategy.strategy import Strategy
from syncline.sync.bsp import Bsp

STEPS = 5


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("schedules", "sync"):
        registry.names(kind)
        monkeypatch.setitem(registry._entries, kind, dict(registry._entries[kind]))

    @registry.register("schedules", "two_phases")
    @dataclass(frozen=True)
    class TwoPhases(Fixed):
        phases: ClassVar[Phases] = "split"

    @registry.register("schedules", "by_layer")
    @dataclass(frozen=True)
    class ByLayer(Fixed):
        apply: ClassVar[Application] = "layer"

    @registry.register("schedules", "later")
    @dataclass(frozen=True)
    class Later(Fixed):
        apply: ClassVar[Application] = "next_step"

    @registry.register("sync", "odd")
    @dataclass(frozen=True)
    class Odd(Bsp):
        def due(self, step: int) -> bool:
            return step % 2 == 1


@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("later", r"a step later \(apply='next_step'\)"),
        ("remade", r"forms new buckets .*\(measures=2\)"),
    ],
)
def test_what_a_framework_cannot_do_is_refused_by_name(name: str, why: str) -> None:
    registry.register("schedules", "remade")(Remade)
    with pytest.raises(UsageError, match=rf"schedule={name} .*{why}.* NumPy.* use schedule=fixed"):
        check_schedule(Strategy.parse(f"ring schedule={name}"), "NumPy")


def train(here: Here, *, averaged: int) -> list[dict[str, torch.Tensor]]:
    """Weights after every step; only odd steps are exchanged, and alone those of ``averaged`` ranks are averaged."""
    found = []
    for step in range(STEPS):
        here.optimizer.zero_grad()
        x = batch(step)
        parts = [x[len(x) * rank // averaged : len(x) * (rank + 1) // averaged] for rank in range(averaged)]
        loss_of(here.model(parts[here.rank])).backward()
        here.optimizer.step()
        found.append(weights(here.model))
    return found


@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize("schedule", ["fixed", "wait_free", "fifo"])
@pytest.mark.parametrize("weight", ["batch", 1.0])
def test_steps_that_are_not_due_are_each_ranks_own(group: Any, schedule: str, weight: Any) -> None:
    """As two processes that average their gradients by hand in every second step."""
    made = [sgd(), sgd()]
    wanted: list[list[dict[str, torch.Tensor]]] = [[], []]
    for step in range(STEPS):
        x = batch(step)
        for (model, optimizer), part in zip(made, (x[:6], x[6:]), strict=True):
            optimizer.zero_grad()
            loss_of(model(part)).backward()
        if step % 2 == 1:
            for a, b in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
                assert a.grad is not None
                assert b.grad is not None
                a.grad = b.grad = (a.grad + b.grad) / 2
        for rank, (model, optimizer) in enumerate(made):
            optimizer.step()
            wanted[rank].append(weights(model))
    found = on_group(
        group, f"ring sync=odd schedule={schedule}", 2, sgd, lambda here: train(here, averaged=2), weight=weight
    )
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            close(a, b)


@pytest.mark.usefixtures("own_parts")
@pytest.mark.parametrize("schedule", ["fixed", "wait_free"])
def test_who_has_no_batches_left_takes_part_in_the_steps_that_are_exchanged(group: Any, schedule: str) -> None:
    """Those come further apart than the meetings do in which it learns of them; of one that trains on all follows."""
    counts = (1, 6)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for step in range(counts[here.rank]):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank, 4))).backward()
            here.optimizer.step()
        shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        for step in range(counts[1]):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + 1, 4))).backward()
            here.optimizer.step()
        return weights(here.model)

    wanted = alone(sgd, one)
    for found in on_group(group, f"ring sync=odd schedule={schedule}", 2, sgd, body):
        close(found, wanted)


@pytest.mark.usefixtures("own_parts")
def test_ranks_that_exchange_different_steps_are_named(group: Any) -> None:
    """As a mode would that goes by what each rank has measured."""

    def body(here: Here) -> None:
        if here.rank == 1:
            assert here.replica is not None
            object.__setattr__(here.replica.exchange.mode, "due", lambda step: step % 2 == 0)
        train(here, averaged=2)

    with pytest.raises(MismatchError, match=r"rank [01] is at a training step .call .*, step [01].* while rank"):
        on_group(group, "ring sync=odd", 2, sgd, body)


@pytest.mark.usefixtures("own_parts")
def test_servers_that_hold_the_weights_refuse_a_step_of_which_they_hear_nothing(group: Any) -> None:
    with pytest.raises(GradientError, match=r"sync=odd exchanges nothing in step 0.*use ring"):
        on_group(group, "ps(servers=1) sync=odd", 2, sgd, lambda here: train(here, averaged=2))
