"""Optimizers under schedules that overlap iterations: of every kind, used in parts, or refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import ALL, LAYERED, STEPS, Global, coupled, plain, under_way, weights_and_state
from torch.optim.lr_scheduler import StepLR
from toy import (
    OPTIMIZERS,
    Here,
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

from syncline.errors import UsageError


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_in_parts_do_what_they_do_at_once(group: Any, strategy: str, optimizer: str) -> None:
    """Their state too."""

    same_as_alone(group, strategy, 2, making(optimizer), weights_and_state)


class Sure(Global):
    """Says of itself what is not so."""

    updates_parameters_alone = True


class Alone(torch.optim.SGD):
    """Says of itself what is so."""

    updates_parameters_alone = True


def of_class(kind: type[torch.optim.SGD]) -> Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, kind(model.parameters(), lr=0.1)

    return make


@pytest.mark.parametrize("strategy", ALL[:2])
def test_an_optimizer_that_nobody_knows_updates_all_at_once(
    group: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = alone(coupled, plain)
    for found in on_group(group, strategy, 2, coupled, settled):
        close(found, wanted)
    assert "Global is not one of torch's own optimizers" in caplog.text


def test_delayed_steps_need_an_optimizer_that_is_known(group: Any) -> None:
    with pytest.raises(UsageError, match=r"Global, which is not one of torch's own, .*schedule=fixed"):
        on_group(group, "ring schedule=delayed", 2, coupled, settled)


def settled(here: Here) -> dict[str, torch.Tensor]:
    train(here, range(STEPS))
    assert not under_way(here)
    return weights(here.model)


@pytest.mark.parametrize("strategy", ALL)
def test_an_optimizer_that_says_it_updates_parameters_alone_is_tried(group: Any, strategy: str) -> None:
    with pytest.raises(UsageError, match=r"Sure cannot update parameters one by one.*depends on others"):
        on_group(group, strategy, 2, of_class(Sure), plain)
    wanted = alone(of_class(Alone), plain)
    found, other = on_group(group, strategy, 2, of_class(Alone), plain)
    close(found, other, 0.0)
    if strategy != ALL[-1]:
        close(found, wanted)


def test_an_optimizer_that_calls_its_closure_often_gets_averages_each_time(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), max_iter=4)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                here.optimizer.zero_grad()
                loss = loss_of(here.model(here.share(batch(step))))
                loss.backward()
                return loss.detach() * 0  # what ranks have of it differs

            here.optimizer.step(closure)
        return weights(here.model)

    same_as_alone(group, LAYERED[1], 2, make, body)


@pytest.mark.parametrize("optimizer", ["LBFGS", "SGD"])
def test_while_the_optimizer_runs_another_thread_may_look(group: Any, optimizer: str) -> None:
    """As a device's thread of autograd does in a closure's backward pass; SGD with hooks updates at once too."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    def body(here: Here) -> list[bool]:
        assert here.replica is not None
        looked: list[bool] = []

        def look() -> None:
            looking = threading.Thread(target=here.replica.flush, daemon=True)  # type: ignore[union-attr]
            looking.start()
            looking.join(5)
            looked.append(not looking.is_alive())

        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(0))))
            loss.backward()
            if optimizer == "LBFGS":
                look()
            return loss.detach() * 0

        if optimizer == "SGD":
            here.optimizer.register_step_pre_hook(lambda *_: look())
        here.optimizer.step(closure)
        return looked

    for looked in on_group(group, LAYERED[1], 2, make, body):
        assert looked
        assert all(looked)


class Counts(torch.optim.SGD):
    """Keeps a count of its steps in its groups, and slows down by it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


class Counted(Counts):
    """Is known to keep nothing elsewhere."""

    updates_parameters_alone = True


def counting(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, Counted(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ALL[:2])
def test_what_an_optimizer_keeps_in_its_groups_counts_once_a_step(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(STEPS))
        state = here.optimizer.state_dict()
        return weights(here.model) | {"steps": torch.tensor(state["param_groups"][0]["steps"])}

    wanted = alone(counting, body)
    assert wanted["steps"] == STEPS
    for found in on_group(group, strategy, 2, counting, body):
        close(found, wanted)


def test_delayed_steps_count_once_too(group: Any) -> None:
    def body(here: Here) -> int:
        train(here, range(STEPS))
        return int(here.optimizer.state_dict()["param_groups"][0]["steps"])

    assert on_group(group, "ring schedule=delayed(local=off)", 2, counting, body) == [STEPS] * 2


class Old(torch.optim.SGD):
    """Zeroes in place unless told otherwise, as optimizers once did."""

    updates_parameters_alone = True

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


class Zeroes(torch.nn.Sequential):
    """Zeroes its gradients by itself."""

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
def test_a_zero_grad_of_somebodys_own_waits(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Zeroes(*mlp().children())
        return model, Old(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
            (here.optimizer if step % 2 else here.model).zero_grad()
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


def half(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.SGD(model.get_submodule("2").parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", ALL)
def test_parameters_that_are_added_to_the_optimizer_later_are_updated_too(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(6):
            if step == 3:
                added = list(here.model.get_submodule("0").parameters())
                here.optimizer.add_param_group({"params": added, "lr": 0.05})
            here.model.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    wanted = alone(half, body)
    found, other = on_group(group, strategy, 2, half, body)
    close(found, other, 0.0)
    if strategy != ALL[-1]:
        close(found, wanted)
    with pytest.raises(UsageError, match="not a parameter of the model"):
        on_group(group, strategy, 2, half, lambda here: here.optimizer.add_param_group({"params": [torch.zeros(2)]}))


def test_a_step_that_was_replaced_on_the_optimizer_is_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        return model, optimizer

    with pytest.raises(UsageError, match=r"step\(\) of this SGD was replaced on the object itself.*after syncline"):
        on_group(group, LAYERED[0], 2, make, plain)


def test_hooks_of_the_optimizer_are_called_once_a_step(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        calls: list[str] = []
        here.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        here.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(here, range(STEPS))
        assert calls == ["before", "after"] * STEPS
        return weights(here.model)

    same_as_alone(group, LAYERED[1], 2, sgd, body)


@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers_may_be_made_before_or_after(group: Any, before: bool) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        if before:
            optimizer.scheduler = StepLR(optimizer, 1, 0.5)  # type: ignore[attr-defined]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        scheduler = here.optimizer.scheduler if before else StepLR(here.optimizer, 1, 0.5)  # type: ignore[attr-defined]
        for step in range(STEPS):
            train(here, range(step, step + 1))
            scheduler.step()
        return weights(here.model)

    same_as_alone(group, LAYERED[1], 2, make, body)


def test_overlap_needs_an_optimizer_of_one_model(group: Any) -> None:
    from syncline.frameworks.torch import Options, prepare

    def without(session: Any) -> None:
        prepare(session, mlp(), None, Options())

    with pytest.raises(UsageError, match=r"schedule=priority updates weights at their first use: give .* optimizer"):
        group(LAYERED[0], 2, without)

    def foreign(session: Any) -> None:
        model, other = mlp(), torch.nn.Linear(2, 2)
        prepare(session, model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), Options())

    with pytest.raises(UsageError, match=r"not a parameter of the model, and schedule=priority .*ModuleList"):
        group(LAYERED[0], 2, foreign)
