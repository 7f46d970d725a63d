"""``qsgd`` and ``natural``: stochastic rounding, which makes the encoding unbiased.

QSGD divides the range from 0 to the L2 norm of a block into ``levels`` steps. Its variance is at most min(n /
levels**2, sqrt(n) / levels) of the squared norm of a block of n elements. Below 1 it is a contraction in the mean;
otherwise error feedback diverges. Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and
encoding", NeurIPS 2017.

Natural compression rounds to a power of two; its variance is at most 1/8 of the squared norm. Horvath et al., "Natural
compression for distributed deep learning", 2019.

The mean is exact up to the resolution of the random numbers, 2**-24 (qsgd) and 2**-23 (natural). Two limits of float32
remain: a qsgd block whose norm is 2**127 or more counts as not finite, and natural sends at most 2**127.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..registry import register
from . import Floats, Payload, State, check_block
from ._blocks import Blocks
from ._device import kernels_for


@register("codecs", "qsgd", examples=("qsgd", "qsgd(levels=7)"))
@dataclass(frozen=True)
class Qsgd(Blocks):
    """QSGD: stochastic rounding to ``levels`` steps of a block's norm, in 4 bits (up to 7 levels) or 8 (up to 127)."""

    levels: int = 127
    block: int = 1024
    biased: ClassVar[bool] = False
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise UsageError(f"levels={self.levels}: choose 1 to 7 for 4 bits per element, 8 to 127 for 8 bits")
        check_block(self.block, self.codes)

    @property
    def codes(self) -> int:
        return 8 if self.levels <= 7 else 4

    @property
    def contraction(self) -> bool:
        """Whether the bound of the variance is below 1, that is, whether there are enough levels for the block."""
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels) < 1

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:
        encode = kernels_for("stochastic", x).encode_steps
        found: int = encode(x, kept, out, 32 // self.codes, self.levels, self.block, state.seed(), start)
        return found


@register("codecs", "natural")
@dataclass(frozen=True)
class Natural(Blocks):
    """Natural compression: stochastic rounding to a power of two, sign and exponent in 8 bits."""

    block: ClassVar[int] = 1024
    codes: ClassVar[int] = 4
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    stochastic: ClassVar[bool] = True

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:
        found: int = kernels_for("stochastic", x).encode_powers(x, kept, out, self.block, state.seed(), start)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        kernels_for("stochastic", payload).decode_powers(payload, out, self.block, add)
