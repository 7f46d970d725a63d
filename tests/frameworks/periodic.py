"""What tests of workers that exchange weights have in common: their steps, and how they are brought together."""

from __future__ import annotations

import torch
from toy import STAGED, Here, batch, loss_of

WORKERS, STEPS = 3, 6


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
