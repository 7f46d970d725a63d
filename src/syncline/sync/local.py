"""Local SGD: workers train by themselves and average their weights after every H updates (Stich, ICLR 2019).

    x_i <- W + mean_j (x_j - W)        W being the weights that all had after the average before

What travels is the difference from these, which is small where weights are not: a codec rounds it with error feedback
as it does gradients. With H = 1 and plain descent that is synchronous training. With larger H workers drift apart
between two averages, which costs accuracy where learning rates are large, and exchanges are H times fewer.
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
