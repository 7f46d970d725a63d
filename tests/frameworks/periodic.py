"""What tests of workers that exchange weights have in common: their steps, and the formulas by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from toy import STAGED, Here, batch, loss_of, weights

WORKERS, STEPS = 3, 6


Weights = list[torch.Tensor]


Agree = Callable[[Weights, list[Weights]], None]
"""Changes the agreed weights, and all workers', in place."""


def under(strategy: str, sync: str) -> str:
    """A strategy with a sync mode; what ``toy`` says behind it stays there."""
    text, staged, _ = strategy.partition(STAGED)
    return f"{text} sync={sync}{staged}"


def shares(here: Here, steps: range = range(STEPS), rank: int | None = None) -> None:
    """Plain training on batches of this rank's own."""
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + (here.rank if rank is None else rank)))).backward()
        here.optimizer.step()


def by_hand(
    make: Callable[[int], Any], due: Callable[[int], bool], agree: Agree, workers: int = WORKERS
) -> list[list[dict[str, torch.Tensor]]]:
    """The same for every worker, one after the other in this process."""
    made = [make(index) for index in range(workers)]
    agreed = [parameter.detach().clone() for parameter in made[0][0].parameters()]
    found: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(workers)]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(made):
            shares(Here(model, optimizer), range(step, step + 1), rank)
        if due(step):
            with torch.no_grad():
                agree(agreed, [list(model.parameters()) for model, _ in made])
        for mine, (model, _) in zip(found, made, strict=True):
            mine.append(weights(model))
    return found


def mean(agreed: Weights, workers: list[Weights]) -> None:
    for place, value in enumerate(agreed):
        value.copy_(sum(mine[place] for mine in workers) / len(workers))  # type: ignore[arg-type]
        for mine in workers:
            mine[place].copy_(value)


def consolidate(here: Here) -> None:
    assert here.replica is not None
    assert here.replica.averaging is not None
    here.replica.trained.consolidate()


def equal(results: list[dict[str, torch.Tensor]]) -> None:
    """All ranks have the same bits."""
    for found in results[1:]:
        assert all(torch.equal(found[name], tensor) for name, tensor in results[0].items())


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))  # type: ignore[no-any-return]
