"""Splits each exchange: gradients are reduced during backward, and the sums are gathered during the next forward pass.

An allreduce is a reduce-scatter, whose input backward produces, and an all-gather, whose result only the next forward
pass needs. Separate, the two overlap with the backward pass and the next forward pass, and no bucket overtakes another
("DeAR", Zhang et al., ICDCS 2023).
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
    """Slices of up to ``slice`` bytes; slices that the forward pass needs first are gathered first."""

    phases: ClassVar[Phases] = "split"
