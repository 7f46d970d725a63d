"""``ternary``: every element as -1, 0 or 1 times the largest magnitude of its block, at 1.6 bits.

Rounded at random (TernGrad) the mean of what is sent is the gradient, but the variance grows with the block: around it
error feedback diverges. Rounded to nearest (as in 3LC) an element's error is at most half the maximum, and never more
than the element itself, so that it is a contraction and wants error feedback. 20 trits fill a 32-bit word, since
3**20 < 2**32.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017; Lim,
Andersen and Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine learning", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..registry import register
from ..types import Spec
from . import Combine, Encoded, Floats, Payload, State, fresh_state
from .blocks import residual_of, words_of
from .checks import check_words
from .device import kernels_for

_TRITS = 20


@register("codecs", "ternary", examples=("ternary", "ternary(rounding=nearest)"))
@dataclass(frozen=True)
class Ternary:
    """TernGrad and 3LC: -1, 0 or 1 times a block's maximum, 20 to a word, rounded at random or to nearest."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    combine: ClassVar[Combine] = "owner"
    block: ClassVar[int] = 512 * _TRITS

    @property
    def stochastic(self) -> bool:
        """True when elements are rounded at random."""
        return self.rounding == "stochastic"

    @property
    def contraction(self) -> bool:
        """True when rounded to nearest: at random the error of a small element can be as large as the maximum."""
        return not self.stochastic

    @property
    def biased(self) -> bool:
        """True when rounded to nearest."""
        return not self.stochastic

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """A word for every 20 elements, and one for the maximum of each block."""
        size = 4 * words_of(spec.elements, self.block, _TRITS)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """Nothing beside the residual."""
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Maxima and trits, block by block."""
        kept = residual_of(state, start, len(x))
        bad = kernels_for("ternary", x).encode_trits(x, kept, out, self.block, self.stochastic, state.seed(), start)
        return Encoded(words_of(len(x), self.block, _TRITS), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """Trit times maximum."""
        check_words(payload, words_of(len(out), self.block, _TRITS))
        kernels_for("ternary", payload).decode_trits(payload, out, self.block, add)
