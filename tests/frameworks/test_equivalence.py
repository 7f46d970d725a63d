"""k steps on N workers equal k steps of one worker on the union of their batches; replicas are equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from syncline.frameworks.torch import prepare
from syncline.session.session import Session

STEPS = 5
BATCH = 12

ALLREDUCES = ["ring", "recursive_doubling", "halving_doubling", "tree", "double_tree", "hierarchical", "direct"]
SERVERS = [
    "ps(servers=1)",
    "ps(servers=2)",
    "ps(servers=3, update=worker)",
    "ps(servers=1, on=workers)",
    "ps(servers=1) schedule=wait_free",
    "ps(servers=2) schedule=fifo",
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def build(dtype: torch.dtype) -> torch.nn.Module:
    """The same model everywhere; not from torch's generator, which the ranks of a test share."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 16, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 5),
    ).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def data(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def train(
    session: Session | None, optimizer: str, dtype: torch.dtype, steps: int = STEPS
) -> dict[str, torch.Tensor] | None:
    model = build(dtype)
    update = OPTIMIZERS[optimizer](model.parameters())
    rank, world = 0, 1
    if session is not None:
        rank, world = session.rank, session.world_size
        if not session.alone and prepare(session, model, update) is None:
            return None
    for step in range(steps):
        x, y = data(step, dtype)
        bounds = [BATCH * part // world for part in range(world + 1)]
        mine = slice(bounds[rank], bounds[rank + 1])
        update.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        update.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert (found[name] - tensor).norm() <= 1e-9 * tensor.norm(), name


@cache
def alone(optimizer: str) -> dict[str, torch.Tensor]:
    """What one worker has learnt."""
    state = train(None, optimizer, torch.float64)
    assert state is not None
    return state


# Every strategy with every optimizer and every number of workers, and every one of those with each other.
CASES = [
    (strategy, workers, list(OPTIMIZERS)[(number + workers) % len(OPTIMIZERS)])
    for number, strategy in enumerate(ALLREDUCES + SERVERS)
    for workers in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("strategy", "workers", "optimizer"), CASES)
def test_workers_equal_one_worker_on_the_union(group: Any, strategy: str, workers: int, optimizer: str) -> None:
    for state in group(strategy, workers, lambda session: train(session, optimizer, torch.float64))[:workers]:
        close(state, alone(optimizer))


@pytest.mark.parametrize("strategy", ALLREDUCES + SERVERS)
def test_replicas_and_runs_are_equal_bit_for_bit(group: Any, strategy: str) -> None:
    runs = [group(strategy, 3, lambda session: train(session, "adam", torch.float32))[:3] for _ in range(2)]
    for state in (*runs[0][1:], *runs[1]):
        for name, tensor in runs[0][0].items():
            assert torch.equal(tensor, state[name]), name
