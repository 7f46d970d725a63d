"""Post-local SGD: synchronous at first, while weights move far, then local (Lin, Stich, Patel, Jaggi, ICLR 2020).

The first ``after`` steps exchange gradients. Afterwards workers average their weights after every ``steps`` updates.
The paper starts the second phase where the learning rate is first lowered, and finds better generalization than from
large batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..registry import register
from ._periodic import Mean, check_steps


@register("sync", "post_local", examples=("post_local(after=3, steps=2)", "post_local(after=0, steps=4)"))
@dataclass(frozen=True)
class PostLocal(Mean):
    """Gradients are exchanged in the first ``after`` steps; then weights are averaged after every ``steps`` updates."""

    after: int
    steps: int
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_steps("post_local", self.steps)
        if self.after < 0:
            raise UsageError(
                f"after={self.after} of post_local: choose a number of steps that exchange gradients first, 0 or more"
            )

    def due(self, step: int) -> bool:
        return step < self.after

    def averages(self, step: int) -> bool:
        return step >= self.after and (step - self.after) % self.steps == self.steps - 1

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Only together in the first phase. In the second phase workers do not wait within a period."""
        return clock <= slowest or (
            slowest >= self.after and (clock - self.after) // self.steps <= (slowest - self.after) // self.steps
        )
