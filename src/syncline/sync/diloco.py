"""DiLoCo: local training with an outer optimizer on the result (Douillard et al., arXiv:2311.08105, 2023).

After every H updates of the inner optimizer, which is the script's own, the outer one makes a step from the common
weights W along the workers' mean difference (the negative pseudo-gradient). It is SGD with Nesterov momentum m:

    d = mean_j (x_j - W)
    v <- m v + d
    W <- W + lr (d + m v)        without ``nesterov``: W + lr v
    x_i <- W

W and v are the same on all workers bit for bit. The paper uses an H of some hundreds, AdamW inside, lr 0.7 and m 0.9.
With lr 1 and m 0 this is local SGD.

The outer momentum sums over 1 / (1 - m) periods, and weights lag behind the workers' progress until then. A run should
have at least twice as many periods, 20 by default (``advice``): on digits with 5 periods the defaults end 1.2 points
below synchronous training, and a momentum of 0.5 ends with it (docs/concepts/coordination.md).

Outer steps add up to lr / (1 - m) times the workers' differences, by default 7 times. If the period is so short that
these differences are proportional to learning rate and gradient, this multiplies the learning rate by 7, and an
ordinary one diverges: then use a smaller m, such as 0.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import UsageError
from ..registry import register
from . import Elements
from ._periodic import Period, check_steps

_LEAST = 2
"""A run should have at least this many times the periods over which the outer momentum sums."""


@register("sync", "diloco", examples=("diloco(steps=2)", "diloco(steps=3, lr=1.0, momentum=0.5, nesterov=off)"))
@dataclass(frozen=True)
class Diloco(Period):
    """After every ``steps`` updates an outer SGD with momentum makes a step by the workers' mean difference."""

    steps: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_steps("diloco", self.steps)
        if not 0 < self.lr < math.inf:
            raise UsageError(
                f"lr={self.lr} of diloco: choose a learning rate of the outer optimizer above 0, such as 0.7"
            )
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum} of diloco: choose a number from 0 up to below 1, such as 0.9")

    @property
    def remembers(self) -> bool:
        return self.momentum > 0

    def pull(self, workers: int) -> float:  # noqa: ARG002
        return 1.0

    def advice(self, steps: int) -> str:
        made = steps // self.steps
        if not self.momentum or made * (1 - self.momentum) >= _LEAST:
            return ""
        most = max(0.0, math.floor(100 * (1 - _LEAST / made)) / 100) if made else 0.0
        return (
            f"sync=diloco has made {made} outer steps in {steps} steps, and with momentum={self.momentum} the weights"
            f" lag behind the workers for the first {round(_LEAST / (1 - self.momentum))}: train for longer, choose"
            f" diloco(steps={self.steps}, momentum={most:g}), or use local(steps={self.steps})"
        )

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:
        """A step of the outer optimizer."""
        if memory is not None:
            memory *= self.momentum
            memory += mean
            if self.nesterov:
                mean += memory * self.momentum
            else:
                mean[:] = memory
        mean *= self.lr
        agreed += mean
