"""``state_dict`` of model and optimizer pass through, wherever the state really lies."""

from __future__ import annotations

import copy
import io
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import (
    SERVED,
    STRATEGIES,
    Here,
    alone,
    batch,
    close,
    fill,
    making,
    mlp,
    on_group,
    same_as_alone,
    same_state,
    train,
    weights,
)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [*zip(STRATEGIES, ["sgd", "adagrad", "momentum", "adam", "adam", "momentum"], strict=True)],
)
def test_the_optimizers_state_is_that_of_one_worker(group: Any, strategy: str, optimizer: str) -> None:
    def body(here: Here) -> dict[str, Any]:
        train(here, range(3))
        return copy.deepcopy(here.optimizer.state_dict())

    wanted = alone(making(optimizer), body)
    for found in on_group(group, strategy, 2, making(optimizer), body):
        same_state(found, wanted)
        assert list(found["state"]) == list(wanted["state"])


@pytest.mark.parametrize(("strategy", "optimizer"), [*zip(SERVED, cycle(["momentum", "adam"]))])
def test_state_survives_torch_save_and_loads_into_a_plain_optimizer(group: Any, strategy: str, optimizer: str) -> None:
    """A run on servers goes on alone, as if it had been alone all the time."""

    def body(here: Here) -> bytes:
        train(here, range(3))
        file = io.BytesIO()
        torch.save({"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()}, file)
        return file.getvalue()

    def go_on(here: Here, data: bytes) -> dict[str, torch.Tensor]:
        saved = torch.load(io.BytesIO(data), weights_only=True)
        here.model.load_state_dict(saved["model"])
        here.optimizer.load_state_dict(saved["optimizer"])
        train(here, range(3, 5))
        return weights(here.model)

    def at_once(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(5))
        return weights(here.model)

    wanted = alone(making(optimizer), at_once)
    for data in on_group(group, strategy, 2, making(optimizer), body):
        close(alone(making(optimizer), lambda here, data=data: go_on(here, data)), wanted)


RESUMED = ("momentum", "adam", "adagrad")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "optimizer", "before"),
    [(text, RESUMED[n % 3], True) for n, text in enumerate(STRATEGIES)]
    + [("ring", "adam", False), ("ps(servers=2, on=workers)", "adagrad", False)],
)
def test_a_run_is_resumed_from_the_state_of_one_worker(group: Any, strategy: str, optimizer: str, before: bool) -> None:
    """The optimizer is loaded before or after prepare, the model before; the learning rate comes with the state."""

    def first(here: Here) -> dict[str, Any]:
        here.optimizer.param_groups[0]["lr"] = 0.05
        train(here, range(3))
        return copy.deepcopy({"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()})

    saved = alone(making(optimizer), first)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, made = making(optimizer)(index)
        model.load_state_dict(saved["model"])
        if before:
            made.load_state_dict(copy.deepcopy(saved["optimizer"]))
        return model, made

    def go_on(here: Here) -> dict[str, torch.Tensor]:
        if not before:
            here.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        assert here.optimizer.param_groups[0]["lr"] == 0.05
        train(here, range(3, 5))
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, go_on)


class WithScalars(torch.nn.Module):
    """Of a layer, if any, and scalars."""

    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.layer = torch.nn.Linear(4, 3) if layer else torch.nn.Identity()
        self.shift = torch.nn.Parameter(torch.tensor(-0.5))
        fill(self).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.scale + self.shift)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "layer", "strategy"),
    [
        (*row, other)
        for row, other in zip(
            [
                (torch.optim.Adam, True),
                (torch.optim.Adam, False),
                (torch.optim.Adagrad, False),
                (torch.optim.NAdam, True),
                (torch.optim.ASGD, True),
            ],
            cycle(SERVED),
        )
    ],
)
def test_a_run_with_scalars_is_resumed(group: Any, strategy: str, kind: Any, layer: bool) -> None:
    """Whose momentum and whose count of steps have the same shape; loaded before prepare, which tries the state."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = WithScalars(layer)
        return model, kind(model.parameters(), lr=0.02)

    def steps(here: Here, numbers: range) -> None:
        for step in numbers:
            here.optimizer.zero_grad()
            here.model(here.share(batch(step))).square().sum(1).mean().backward()
            here.optimizer.step()

    def first(here: Here) -> dict[str, Any]:
        steps(here, range(3))
        return copy.deepcopy({"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()})

    saved = alone(make, first)

    def resumed(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, made = make(index)
        model.load_state_dict(saved["model"])
        made.load_state_dict(copy.deepcopy(saved["optimizer"]))
        return model, made

    def go_on(here: Here) -> dict[str, Any]:
        steps(here, range(3, 5))
        here.optimizer.load_state_dict(copy.deepcopy(here.optimizer.state_dict()))
        steps(here, range(5, 7))
        return {"state": copy.deepcopy(here.optimizer.state_dict()), "weights": weights(here.model)}

    wanted = alone(resumed, go_on)
    for found in on_group(group, strategy, 2, resumed, go_on):
        same_state(found["state"], wanted["state"])
        close(found["weights"], wanted["weights"])


@pytest.mark.parametrize("strategy", SERVED)
def test_state_of_parameters_that_are_not_contiguous(group: Any, strategy: str) -> None:
    """Records are in memory order; state_dict has the parameters' shapes and a single process's values."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten()).double()
        fill(model).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=0.02)

    def steps(here: Here, count: int) -> None:
        for step in range(count):
            here.optimizer.zero_grad()
            x = batch(step, 4, 27).view(4, 3, 3, 3)
            here.model(here.share(x)).square().sum(1).mean().backward()
            here.optimizer.step()

    def body(here: Here) -> dict[str, Any]:
        steps(here, 2)
        state = copy.deepcopy(here.optimizer.state_dict())
        here.optimizer.load_state_dict(state)
        steps(here, 1)
        return {"state": copy.deepcopy(here.optimizer.state_dict()), "weights": weights(here.model)}

    wanted = alone(make, body)
    for found in on_group(group, strategy, 2, make, body):
        same_state(found["state"], wanted["state"])
        close(found["weights"], wanted["weights"])


def test_state_larger_than_a_request_loads_into_servers(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Linear(500, 300).double())
        return model, torch.optim.Adam(model.parameters(), lr=0.02)

    def step(here: Here, number: int) -> None:
        here.optimizer.zero_grad()
        here.model(here.share(batch(number, 4, 500))).square().sum(1).mean().backward()
        here.optimizer.step()

    def body(here: Here) -> dict[str, torch.Tensor]:
        step(here, 0)
        state = copy.deepcopy(here.optimizer.state_dict())
        step(here, 1)
        here.optimizer.load_state_dict(state)
        step(here, 2)
        return weights(here.model)

    same_as_alone(group, "ps(servers=2)", 2, make, body)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "ps(servers=2) codec=int8", "ps(servers=2, on=workers) codec=fp16"])
def test_a_model_may_be_loaded_after_prepare_and_later(group: Any, strategy: str) -> None:
    """As under a ring; under servers these take the weights over with the next step."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        here.model.load_state_dict(mlp(seed=9).state_dict())
        train(here, range(2))
        here.model.load_state_dict(mlp(seed=10).state_dict())
        train(here, range(2, 4))
        return weights(here.model)

    wanted = alone(making("momentum"), body)
    for found in on_group(group, strategy, 2, making("momentum"), body):
        close(found, wanted, 0.05 if "codec" in strategy else 1e-9)


def test_ranks_that_save_alone_where_that_is_collective_get_an_error(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        if here.rank == 0:
            here.optimizer.state_dict()
        train(here, range(1, 2))

    with pytest.raises(Exception, match="gather"):
        on_group(group, "ps(servers=2, on=workers)", 2, making("sgd"), body)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2)"])
def test_one_rank_may_save_alone_from_servers(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, Any] | None:
        train(here, range(2))
        state = copy.deepcopy(here.optimizer.state_dict()) if here.rank == 1 else None
        train(here, range(2, 3))
        return state

    def first(here: Here) -> dict[str, Any]:
        train(here, range(2))
        return copy.deepcopy(here.optimizer.state_dict())

    same_state(on_group(group, strategy, 2, making("adam"), body)[1], alone(making("adam"), first))


class ScheduleFree(torch.optim.Optimizer):
    """As schedule-free SGD: weights are another mean of the same two sequences in training than in evaluation."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "training": False, "step": 0})

    def train(self) -> None:
        self._turn(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._turn(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _turn(self, training: bool, weight: Any) -> None:
        for group in self.param_groups:
            for tensor in group["params"] if group["training"] is not training else ():
                if "z" in self.state[tensor]:
                    tensor.lerp_(self.state[tensor]["z"], weight(group["beta"]))
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            assert group["training"]
            group["step"] += 1
            for tensor in group["params"]:
                z = self.state[tensor].setdefault("z", tensor.clone())
                tensor.lerp_(z, 1 / group["step"])
                tensor.sub_(group["lr"] * (1 - group["beta"]) * tensor.grad)
                z.sub_(group["lr"] * tensor.grad)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_has_other_weights_in_evaluation_trains_as_alone(group: Any, strategy: str) -> None:
    def make(index: int) -> Any:
        model = mlp(index)
        return model, ScheduleFree(model.parameters())

    def body(here: Here) -> dict[str, torch.Tensor]:
        optimizer: Any = here.optimizer
        evaluated = {}
        for epoch in range(3):
            optimizer.train()
            train(here, range(2 * epoch, 2 * epoch + 2))
            optimizer.eval()
            evaluated |= {f"{epoch}.{name}": value.clone() for name, value in weights(here.model).items()}
        return evaluated

    same_as_alone(group, strategy, 2, make, body)
