"""What ranks of the pool do under sync modes in which every worker's push is an update by itself."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import fault_bodies
import numpy as np
import torch
from rank_bodies import BATCH, Place, batch, build, joined

import syncline

STEPS, SIZE, LR = 20, 1000, 0.5


def steps() -> dict[str, np.ndarray]:
    """The weights after plain descent on this rank's share of every batch; alone without a session."""
    model = build(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = 0, 1
    if syncline.is_initialized():
        rank, world = syncline.rank(), syncline.world_size()
        model, optimizer = syncline.prepare(model, optimizer)
    for step in range(4):
        x, y = batch(step, torch.float64)
        mine = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def train(line: Connection, place: Place, strategy: str) -> None:
    """The weights of a model of PyTorch."""
    with joined(place, strategy):
        line.send(steps())


class Descent:
    def __init__(self) -> None:
        self.lr = LR

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


def gradient_of(rank: int, step: int) -> np.ndarray:
    """Whole numbers, whose sums do not depend on their order."""
    return np.random.default_rng([rank, step]).integers(-8, 8, SIZE).astype(np.float64)


def add_up(line: Connection, place: Place, strategy: str) -> None:
    """The weights of a model of NumPy after different numbers of steps on every rank, when all have been applied."""
    with joined(place, strategy):
        weights, optimizer = syncline.prepare({"w": np.zeros(SIZE)}, Descent())
        for step in range(STEPS + 5 * place[0]):
            optimizer.step({"w": gradient_of(place[0], step)})
        syncline.consolidate()
        line.send(weights["w"].copy())


def train_until(line: Connection, *case: Any) -> None:
    """As the one of merged pushes."""
    fault_bodies.train_until(line, *case)


def count(line: Connection, place: Place, strategy: str) -> None:
    """How far this rank was ahead in its steps, and how late what it pushed, until it leaves."""
    with joined(place, strategy):
        _, optimizer = syncline.prepare({"w": np.zeros(SIZE)}, Descent())
        steps = STEPS + 5 * place[0]
        for step in range(steps):
            optimizer.step({"w": gradient_of(place[0], step)})
        stats = syncline.stats()
        line.send([steps, dict(stats.staleness), dict(stats.version_lag)])
