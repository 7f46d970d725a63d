"""Elastic averaging: workers explore around a centre that attracts them (Zhang, Choromanska, LeCun, NIPS 2015).

After every tau updates, with the centre c, its share of movement beta and alpha = beta / N, both move:

    x_i <- x_i - alpha (x_i - c)
    c   <- c + beta (mean_j x_j - c)

The workers' weights stay different; the centre is the model to evaluate. The paper's beta is 0.9, its tau 1 to 64. This
is its synchronous form: all workers have the same centre, which each computes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..registry import register
from . import Elements
from ._periodic import Period, check_steps


@register("sync", "easgd", examples=("easgd(steps=2)", "easgd(steps=1, beta=0.5)"))
@dataclass(frozen=True)
class Easgd(Period):
    """After every ``steps`` updates a centre moves by ``beta`` to the workers' mean, and pulls each of them back."""

    steps: int
    beta: float = 0.9
    remembers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_steps("easgd", self.steps)
        if not 0 < self.beta <= 1:
            raise UsageError(
                f"beta={self.beta} of easgd: choose a share above 0 and up to 1, such as 0.9, by which the centre moves"
                " towards the workers' mean"
            )

    def pull(self, workers: int) -> float:
        return self.beta / workers

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:  # noqa: ARG002
        mean *= self.beta
        agreed += mean
