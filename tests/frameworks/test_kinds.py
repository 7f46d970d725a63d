"""Whatever torch offers for schedules, groups, options and parameters gives what one worker gets, servers or not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from toy import Here, alone, batch, close, fill, loss_of, mlp, on_group, same_as_alone, train, weights

KINDS = ["ring", "ps(servers=2)", "ps(servers=2, on=workers)"]

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 2),
}


def test_the_table_has_every_scheduler() -> None:
    abstract = {"LRScheduler"}
    assert set(lr_scheduler.__all__) - abstract <= SCHEDULERS.keys()


# Rates travel to servers; where every worker has its optimizer, or owns a part of it, a scheduler changes that one.
@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, "ps(servers=2)") for name in SCHEDULERS]
    + [(name, strategy) for name in list(SCHEDULERS)[::4] for strategy in KINDS if strategy != "ps(servers=2)"],
)
def test_learning_rates_follow_any_scheduler(group: Any, strategy: str, name: str) -> None:
    """Made after prepare; some write the momentum too. The values of the groups travel with every step."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        scheduler = SCHEDULERS[name](here.optimizer)
        for step in range(5):
            train(here, range(step, step + 1))
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


OPTIONS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05, dtype=torch.float64), foreach=False),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, differentiable=False, nesterov=True, momentum=0.5),
    "named": lambda p: torch.optim.Adam([(f"n{i}", one) for i, one in enumerate(p)], lr=0.05),
}


@pytest.mark.parametrize(("name", "strategy"), [*zip(OPTIONS, cycle(KINDS))])
def test_options_of_optimizers(group: Any, strategy: str, name: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, OPTIONS[name](model.parameters())

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(step))))
            here.optimizer.zero_grad()
            loss.backward()
            here.optimizer.step()
        state = here.optimizer.state_dict()
        here.optimizer.load_state_dict(state)
        train(here, range(3, 4))
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", KINDS)
def test_a_closure_computes_the_gradients(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                here.optimizer.zero_grad()
                loss = loss_of(here.model(here.share(batch(step))))
                loss.backward()
                return loss

            assert here.optimizer.step(closure) is not None  # type: ignore[arg-type]
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


class Many(torch.nn.Module):
    """Parameters in lists and dictionaries, without elements, without dimensions, of low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = torch.nn.ParameterList([torch.ones(4, 3), torch.zeros(3)])
        self.keyed = torch.nn.ParameterDict(
            {"scale": torch.ones(()), "none": torch.zeros(0, 2), "shift": torch.ones(3)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (x @ self.listed[0] + self.listed[1]) * self.keyed["scale"] + self.keyed["shift"]
        return out + self.keyed["none"].sum()


def normed(wrap: Callable[[Any], Any]) -> Callable[[], torch.nn.Module]:
    return lambda: torch.nn.Sequential(wrap(fill(torch.nn.Linear(4, 6).double())), fill(torch.nn.Linear(6, 3).double()))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "lists, dictionaries": lambda: fill(Many().double()),
    "weight_norm": normed(parametrizations.weight_norm),
    "spectral_norm": normed(lambda layer: settled(parametrizations.spectral_norm(layer, n_power_iterations=50))),
    "orthogonal": normed(parametrizations.orthogonal),
}


_SEEDED = threading.Lock()  # torch's generator, from which some begin, is one for the ranks of a test


def settled(layer: Any) -> Any:
    """Its vectors begin at random."""
    vectors = layer.parametrizations.weight[0]
    vectors._u.fill_(0.3)
    vectors._v.fill_(0.4)
    return layer


@pytest.mark.parametrize(("name", "strategy"), [*zip(MODELS, cycle(KINDS))])
def test_models_of_every_kind(group: Any, strategy: str, name: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        with _SEEDED:
            torch.manual_seed(0)
            model = MODELS[name]()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(3))
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body, unused="zeros")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("strategy", KINDS)
def test_complex_parameters(group: Any, strategy: str, dtype: torch.dtype) -> None:
    """Beside real ones."""

    class Rotation(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = torch.nn.Parameter(torch.full((4, 3), 0.5 + 0.25j, dtype=dtype))
            self.shift = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(dtype) @ self.turn).abs().double() + self.shift

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Rotation()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(2))
        here.model.turn.data.mul_(0.5)  # type: ignore[union-attr, operator]
        train(here, range(2, 3))
        return {"turn": torch.view_as_real(weights(here.model)["turn"]).double(), "shift": weights(here.model)["shift"]}

    wanted = alone(make, body)
    for found in on_group(group, strategy, 2, make, body):
        close(found, wanted, 1e-6 if dtype is torch.complex64 else 1e-9)


@pytest.mark.parametrize("strategy", KINDS)
def test_gradients_may_be_switched_off_and_on_between_exchanges(group: Any, strategy: str) -> None:
    """As in turns of two networks: nothing but the state at a backward pass counts."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.model.requires_grad_(False)
            x = here.share(batch(9)).requires_grad_()
            loss_of(here.model(x)).backward()
            here.model.requires_grad_(True)
            train(here, range(step, step + 1))
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)
