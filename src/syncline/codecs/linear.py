"""``int8`` and ``int4``: equal steps between -max and max of a block, rounded to nearest.

The error of an element is at most half a step, max / (2 * levels) of its block with 127 or 7 levels. A block's largest
element is exact up to rounding, so the error is smaller than the block itself: a contraction, as error feedback needs.
Scales per block are due to Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..registry import register
from . import check_block
from ._blocks import Blocks


@register("codecs", "int8")
@dataclass(frozen=True)
class Int8(Blocks):
    """8 bits per element: 127 steps to either side of zero, one scale per block, rounded to nearest."""

    block: int = 1024
    codes: ClassVar[int] = 4
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.block, self.codes)


@register("codecs", "int4")
@dataclass(frozen=True)
class Int4(Blocks):
    """4 bits per element: 7 steps to either side of zero, one scale per block, rounded to nearest."""

    block: int = 2048
    codes: ClassVar[int] = 8
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.block, self.codes)
