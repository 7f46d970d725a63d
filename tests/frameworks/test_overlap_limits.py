"""What schedules that overlap iterations cannot see: it is waited for elsewhere, or refused by name."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripts import ALL, LAYERED, STEPS, branches, plain, under_way
from toy import Here, batch, fill, loss_of, mlp, on_group, same_as_alone, sgd, train, weights

from syncline.errors import GradientError, UsageError
from syncline.frameworks.torch.first_use import DeferredParameter


@pytest.mark.parametrize("strategy", ALL)
def test_a_parameter_that_is_no_longer_used_is_named_where_that_is_not_said_to_be_meant(
    group: Any, strategy: str
) -> None:
    def body(here: Here) -> None:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)), True, step != 1 or here.rank == 1)).backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match=r"2 parameters got no gradient .*'right.weight', 'right.bias'.*unused"):
        on_group(group, strategy, 2, branches, body)


class Unseen(torch.nn.Module):
    """Reads a weight in a way that torch does not tell of, as extensions do: always, or from a step on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.linear, self.begins, self.calls = torch.nn.Linear(4, 3).double(), begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.begins:
            return self.linear(x)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias)


def unseen(begins: int) -> Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Unseen(begins))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return make


def test_weights_that_are_read_unseen_wait_at_the_models_forward_pass(group: Any) -> None:
    same_as_alone(group, LAYERED[1], 2, unseen(0), plain)


def test_a_weight_that_was_read_too_early_is_refused(group: Any) -> None:
    with pytest.raises(GradientError, match=r"'linear\.(?:weight|bias)' were read .* before their update.*\.flush"):
        on_group(group, LAYERED[1], 2, unseen(2), plain)


def test_a_forward_pass_that_fails_shows_nothing_of_what_training_reads(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        with pytest.raises(RuntimeError):
            here.model(torch.zeros(2, 5, dtype=torch.float64))
        weights(here.model)
        return plain(here)

    same_as_alone(group, LAYERED[1], 2, unseen(0), body, weight=1)


def test_an_evaluation_before_training_shows_nothing_of_what_training_reads(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            here.model(batch(99))
        return plain(here)

    same_as_alone(group, LAYERED[1], 2, unseen(1), body)


def test_a_flush_before_something_unseen_is_enough(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            if here.replica is not None:
                here.replica.flush()
                assert not under_way(here)
            train(here, range(step, step + 1))
        return weights(here.model)

    same_as_alone(group, LAYERED[1], 2, unseen(2), body)


def test_gradients_changed_behind_the_exchange_are_refused(group: Any) -> None:
    def body(here: Here) -> None:
        kept: list[torch.Tensor] = []
        here.model.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        loss_of(here.model(here.share(batch(0)))).backward()
        kept[0].mul_(2)
        here.optimizer.step()

    with pytest.raises(
        GradientError, match=r"the gradient of '0\.weight' was changed, while it was exchanged, through a"
    ):
        on_group(group, LAYERED[1], 2, sgd, body)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_gradients_that_are_changed_unseen_while_they_are_under_way_are_refused(group: Any, when: str) -> None:
    """By what nobody is seen to keep, before the optimizer is called or behind it."""

    def body(here: Here) -> None:
        parameter = here.model.get_parameter("0.weight")
        train(here, range(1))
        kept = weakref.ref(parameter.grad)  # type: ignore[arg-type]
        loss_of(here.model(here.share(batch(1)))).backward()
        assert under_way(here)
        gradient: Any = kept()
        if when == "before":
            gradient.zero_()
            assert parameter.grad is not None
            return
        del gradient
        here.optimizer.step()
        assert under_way(here)
        kept().zero_()  # type: ignore[union-attr]
        here.model(here.share(batch(2)))

    with pytest.raises(GradientError, match=r"the gradient of '0.weight' was changed, .* kept: .* schedule=fixed"):
        on_group(group, LAYERED[1], 2, sgd, body)


def test_parameters_that_share_memory_are_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        model.get_submodule("2").bias.data = model.get_submodule("0").bias.data[:3]  # type: ignore[union-attr, assignment]
        return model, optimizer

    with pytest.raises(UsageError, match=r"parameters '..bias' and '..bias' share memory.*schedule=fixed"):
        on_group(group, LAYERED[0], 2, make, plain)


def test_a_transform_that_looks_inside_is_refused(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(2))
        torch.func.vmap(lambda one: here.model(one[None]))(batch(3))

    with pytest.raises(UsageError, match=r"a transform of torch\.func reads weights .*syncline\.flush\(\)"):
        on_group(group, LAYERED[1], 2, sgd, body)


def test_gradients_of_one_half_before_the_forward_pass_of_the_other_accuse_nobody(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        first, last = here.model.get_submodule("0"), here.model.get_submodule("2")
        for step in range(STEPS):
            here.optimizer.zero_grad()
            x = here.share(batch(step))
            torch.autograd.grad(first(x).sum(), list(first.parameters()))
            loss_of(last(torch.tanh(first(x)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, LAYERED[1], 2, sgd, body, weight=1)


def test_the_class_of_a_deferred_parameter_makes_plain_ones(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        parameter = next(here.model.parameters())
        assert type(parameter) is DeferredParameter
        made = type(parameter)(torch.ones(2))
        assert type(made) is torch.nn.Parameter
        assert (made + 1).sum() == 4

    on_group(group, LAYERED[1], 2, sgd, body)


@pytest.mark.filterwarnings("ignore")  # torch.jit.script is deprecated, and used
def test_scripted_parts_wait_at_the_models_forward_pass(group: Any) -> None:
    """In an evaluation, with a penalty behind the pass, and where a weight is looked at elsewhere."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        whole = mlp()
        model = torch.nn.Sequential(whole[0], torch.jit.script(whole[2]))  # type: ignore[index, no-untyped-call]
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        found = {}
        for step in range(STEPS):
            here.optimizer.zero_grad()
            penalty = loss_of(here.model(here.share(batch(step))))
            for parameter in here.model.parameters():
                penalty = penalty + 0.1 * parameter.square().sum()
            penalty.backward()
            here.optimizer.step()
            with torch.no_grad():
                found[str(step)] = here.model(batch(99)).clone()
        return found | weights(here.model)

    same_as_alone(group, LAYERED[1], 2, make, body)


def test_what_could_not_be_waited_for_is_never_read_as_if_it_had(group: Any) -> None:
    """A wait that fails is told at every later look: the weights are not those of the step."""
    stepped = threading.Event()
    told: list[Exception] = []
    values: list[Any] = []

    def body(here: Here) -> None:
        if here.rank == 1:
            stepped.wait(20)
            raise RuntimeError("gone")
        train(here, range(1))
        stepped.set()
        for _ in range(6):
            try:
                values.append(here.model.state_dict())
            except Exception as error:
                told.append(error)

    with pytest.raises(RuntimeError, match="gone"):
        on_group(group, LAYERED[1], 2, sgd, body)
    assert values == []
    assert len(told) == 6


class Special(torch.nn.Parameter):
    """A parameter of somebody's own class."""


def test_parameters_of_another_class_are_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, _ = sgd(index)
        model.get_submodule("0").bias = Special(torch.zeros(6, dtype=torch.float64))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(UsageError, match=r"parameter '0\.bias' is a Special.*schedule=fixed"):
        on_group(group, LAYERED[0], 2, make, plain)
