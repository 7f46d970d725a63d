"""The first layers first: the next forward pass begins when their gradients have arrived, the others follow it.

Backward produces the last layer's gradients first, and the next forward pass needs the first layer's. In the order in
which they are produced everything has to arrive before that can begin; by priority the exchange goes on during the
forward pass, each layer waiting for itself, and an iteration takes what the wire or the computation takes. A gradient
that is more urgent overtakes one that is under way, so large tensors are cut into slices ("P3", Jayarajan et al., MLSys
2019; "ByteScheduler", Peng et al., SOSP 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register
from ._slices import Sliced


@register("schedules", "priority")
@dataclass(frozen=True)
class Priority(Sliced):
    """Slices of up to ``slice`` bytes, those that the forward pass needs first before the others."""
