"""``int8`` and ``int4``: equal steps between -max and max of a block, rounded to nearest.

The error of an element is at most half a step, max / (2 * levels) of its block with 127 or 7 levels. A block's largest
element is exact up to rounding, so the error is smaller than the block itself: a contraction, as error feedback needs.
Scales per block are due to Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_block, check_words, fresh_state, residual_of, words_of
from ._device import kernels_for


@dataclass(frozen=True)
class _Linear:
    """The base of both. ``block`` elements share a step; it is a multiple of the codes per word."""

    block: int
    bits: ClassVar[int]
    combine: ClassVar[Combine] = "owner"
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block(self.block, 32 // self.bits)

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """One word of codes per 32/bits elements and one word per block for its step."""
        size = 4 * words_of(spec.elements, self.block, 32 // self.bits)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        bad = kernels_for("linear", x).encode_linear(x, residual_of(state, start, len(x)), out, self.bits, self.block)
        return Encoded(words_of(len(x), self.block, 32 // self.bits), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(len(out), self.block, 32 // self.bits))
        kernels_for("linear", payload).decode_linear(payload, out, self.bits, self.block, add)


@register("codecs", "int8")
@dataclass(frozen=True)
class Int8(_Linear):
    """8 bits per element: 127 steps to either side of zero, one scale per block, rounded to nearest."""

    block: int = 1024
    bits: ClassVar[int] = 8


@register("codecs", "int4")
@dataclass(frozen=True)
class Int4(_Linear):
    """4 bits per element: 7 steps to either side of zero, one scale per block, rounded to nearest."""

    block: int = 2048
    bits: ClassVar[int] = 4
