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
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_block, check_words, fresh_state, residual_of, words_of
from ._device import kernels_for


@register("codecs", "qsgd", examples=("qsgd", "qsgd(levels=7)"))
@dataclass(frozen=True)
class Qsgd:
    """QSGD: stochastic rounding to ``levels`` steps of a block's norm, in 4 bits (up to 7 levels) or 8 (up to 127)."""

    levels: int = 127
    block: int = 1024
    combine: ClassVar[Combine] = "owner"
    biased: ClassVar[bool] = False
    stochastic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise UsageError(f"levels={self.levels}: choose 1 to 7 for 4 bits per element, 8 to 127 for 8 bits")
        check_block(self.block, 32 // self.bits)

    @property
    def bits(self) -> int:
        """Bits per element."""
        return 4 if self.levels <= 7 else 8

    @property
    def contraction(self) -> bool:
        """Whether the bound of the variance is below 1, that is, whether there are enough levels for the block."""
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels) < 1

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """One word per 8 or 4 elements and one word per block for its step."""
        size = 4 * words_of(spec.elements, self.block, 32 // self.bits)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        kept = residual_of(state, start, len(x))
        bad = kernels_for("stochastic", x).encode_steps(
            x, kept, out, self.bits, self.levels, self.block, state.seed(), start
        )
        return Encoded(words_of(len(x), self.block, 32 // self.bits), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(len(out), self.block, 32 // self.bits))
        kernels_for("linear", payload).decode_linear(payload, out, self.bits, self.block, add)


@register("codecs", "natural")
@dataclass(frozen=True)
class Natural:
    """Natural compression: stochastic rounding to a power of two, sign and exponent in 8 bits."""

    combine: ClassVar[Combine] = "owner"
    block: ClassVar[int] = 1024
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    stochastic: ClassVar[bool] = True

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """One byte per element and one word per block for its largest exponent."""
        size = 4 * words_of(spec.elements, self.block, 4)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        bad = kernels_for("stochastic", x).encode_powers(
            x, residual_of(state, start, len(x)), out, self.block, state.seed(), start
        )
        return Encoded(words_of(len(x), self.block, 4), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(len(out), self.block, 4))
        kernels_for("stochastic", payload).decode_powers(payload, out, self.block, add)
