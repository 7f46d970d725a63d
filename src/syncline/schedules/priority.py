"""Priority: the first layers' gradients go first, because the next forward pass starts with them.

Backward produces the last layer's gradients first, but the next forward pass needs the first layer's. In order of
production all gradients must arrive before it can start. With priorities the exchange continues during the forward
pass, each layer waits only for its own gradients, and an iteration takes the longer of communication and computation.
Urgent gradients overtake others in flight, so large tensors are cut into slices ("P3", Jayarajan et al., MLSys 2019;
"ByteScheduler", Peng et al., SOSP 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..registry import register
from ._slices import Sliced


@register("schedules", "priority")
@dataclass(frozen=True)
class Priority(Sliced):
    """Slices of up to ``slice`` bytes; slices that the forward pass needs first are sent first."""
