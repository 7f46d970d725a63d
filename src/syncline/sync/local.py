"""Local SGD: workers train locally and average their weights after every H updates (Stich, ICLR 2019).

    x_i <- W + mean_j (x_j - W)        W being the common weights after the previous average

The differences from W travel. They are small, unlike weights, so a codec can compress them with error feedback like
gradients. With H = 1 and plain descent this is synchronous training. With larger H workers drift apart between two
averages, which costs accuracy at large learning rates, and exchanges are H times fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register
from ._periodic import Mean, Period, check_steps


@register("sync", "local", examples=("local(steps=1)", "local(steps=4)"))
@dataclass(frozen=True)
class Local(Period, Mean):
    """Workers train by themselves; after every ``steps`` updates all go on from the mean of their weights."""

    steps: int

    def __post_init__(self) -> None:
        check_steps("local", self.steps)
