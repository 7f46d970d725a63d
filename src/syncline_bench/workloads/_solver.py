"""A recipe that makes a result insensitive to rounding: a learning rate that rises, then falls to zero.

Trajectories with different rounding have settled on the same decisions by then. Workloads that compare two ways of
training share the recipe.
"""

from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

WARM_UP = 0.1
"""The share of steps over which the learning rate rises from near zero."""


def rate_factor(step: int, steps: int) -> float:
    """The factor of the learning rate: linear warm-up, then half a cosine down to zero at the last step."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + cos(pi * min(1.0, (step - warm + 1) / max(1, steps - warm + 1))))


def warm_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """PyTorch's scheduler for ``rate_factor``."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: rate_factor(step, steps))
