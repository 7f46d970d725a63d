"""Two exchanges in place of one: gradients are reduced during backward, and the sums gathered during the next forward.

An allreduce is a reduce-scatter, which only backward can feed, and an all-gather, which only the next forward pass
waits for. Apart from each other the two hide behind both halves of the computation, without any bucket overtaking
another ("DeAR", Zhang et al., ICDCS 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import register
from . import Phases
from ._slices import Sliced


@register("schedules", "split")
@dataclass(frozen=True)
class Split(Sliced):
    """Slices of up to ``slice`` bytes; those that the forward pass needs first are gathered first."""

    phases: ClassVar[Phases] = "split"
