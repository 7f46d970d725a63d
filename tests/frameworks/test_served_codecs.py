"""Codecs under servers that hold the weights: what else ``ps`` does goes on working.

With codecs that change next to nothing training is that of one worker; float32 is what is left of float64 then.
"""

from __future__ import annotations

import copy
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import STAGED, Here, alone, batch, close, fill, loss_of, mlp, on_group, weights

from syncline.errors import GradientError

NEARLY_EXACT = ["topk(ratio=1)", "adaptive(int8, small=1GiB)"]
PLACES = [
    "ps(servers=1)",
    "ps(servers=2) schedule=wait_free",
    "ps(servers=2, on=workers)",
    "ps(servers=2, local=on)",
    "ps(servers=1, on=workers) schedule=fifo" + STAGED,
    "ps(servers=1)" + STAGED,
]
TOLERANCE = 2e-6


def coded(place: str, codec: str) -> str:
    staged = STAGED if place.endswith(STAGED) else ""
    return f"{place.removesuffix(STAGED)} codec={codec}{staged}"


def adam(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    """Two groups with values of their own; the learning rate of one changes."""
    model = mlp()
    first, last = model[0], model[2]
    groups = [{"params": first.parameters(), "lr": 0.05}, {"params": last.parameters(), "weight_decay": 0.1}]
    return model, torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def momentum(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def train(here: Here, steps: range, max_norm: float | None = None) -> None:
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        if max_norm is not None:
            if here.client is None:
                torch.nn.utils.clip_grad_norm_(here.model.parameters(), max_norm)
            else:
                here.client.clip(max_norm)
        here.optimizer.param_groups[0]["lr"] *= 0.9
        here.optimizer.step()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("place", "codec", "make"),
    [
        (place, codec, (adam, momentum)[(number + turn) % 2])
        for number, place in enumerate(PLACES)
        for turn, codec in enumerate(NEARLY_EXACT)
    ],
)
def test_a_codec_that_loses_nothing_trains_as_one_worker_does(group: Any, make: Any, place: str, codec: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(5), max_norm=0.5)
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, coded(place, codec), 3, make, body):
        close(found, wanted, TOLERANCE)


@pytest.mark.parametrize(
    ("codec", "place"), [*zip(["int8", "fp16", "topk(ratio=0.5)"], cycle(["ps(servers=1)", "ps(servers=2)"]))]
)
def test_one_worker_alone_with_its_servers(group: Any, place: str, codec: str) -> None:
    def body(here: Here) -> float:
        train(here, range(30))
        return loss_of(here.model(batch(0))).item()

    before = loss_of(mlp()(batch(0))).item()
    after = alone(momentum, body)
    (found,) = on_group(group, coded(place, codec), 1, momentum, body)
    assert found < before - 0.8 * (before - after)


@pytest.mark.every(2)
@pytest.mark.parametrize("place", PLACES)
def test_the_optimizers_state_comes_and_goes(group: Any, place: str) -> None:
    def body(here: Here) -> dict[str, Any]:
        train(here, range(2))
        state = copy.deepcopy(here.optimizer.state_dict())
        train(here, range(2, 3))
        here.optimizer.load_state_dict(state)
        train(here, range(3, 4))
        return {"state": copy.deepcopy(here.optimizer.state_dict()), "weights": weights(here.model)}

    wanted = alone(adam, body)
    for found in on_group(group, coded(place, "topk(ratio=1)"), 2, adam, body):
        close(found["weights"], wanted["weights"], TOLERANCE)
        for index, state in wanted["state"]["state"].items():
            close(found["state"]["state"][index], state, TOLERANCE)


def test_a_state_is_loaded_into_the_whole_model_or_not_at_all(group: Any) -> None:
    """Of what the owners know and the workers do not, nothing is lost without a word."""

    def body(here: Here) -> None:
        train(here, range(2))
        state = copy.deepcopy(here.model.state_dict())
        here.model.load_state_dict(state)
        train(here, range(2, 3))
        here.model.load_state_dict({"0.weight": state["0.weight"]}, strict=False)
        train(here, range(3, 4))

    with pytest.raises(GradientError, match=r"weights '0.weight' were changed .* load a state_dict into the whole"):
        on_group(group, "ps(servers=1) codec=topk(ratio=0.5)", 1, momentum, body)


@pytest.mark.parametrize("place", ["ps(servers=2)", "ps(servers=2, on=workers)"])
def test_parameters_that_are_not_contiguous(group: Any, place: str) -> None:
    """What owners have is put together in the parameters' shapes."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten()).double())
        model.to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.02)

    def body(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        for step in range(2):
            here.optimizer.zero_grad()
            here.model(here.share(batch(step, 4, 27).view(4, 3, 3, 3))).square().sum(1).mean().backward()
            here.optimizer.step()
        assert here.client is not None
        owners = here.client.owners_weights()
        here.client.resume(2, owners)
        again = here.client.owners_weights()
        assert all(torch.equal(owners[name], again[name]) for name in owners)
        return weights(here.model), owners

    for known, owners in on_group(group, coded(place, "topk(ratio=1)"), 2, make, body):
        close(known, owners, TOLERANCE)
