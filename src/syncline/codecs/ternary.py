"""``ternary``: every element as -1, 0 or 1 times the largest magnitude of its block, at 1.6 bits.

Rounded at random (TernGrad) the mean of what is sent is the gradient, but the variance grows with the maximum: around
it error feedback diverges, and without it training does where single elements are large. So gradients are clipped
first, as in the paper's section 3.3: an element of more than 2.5 standard deviations is sent as one of 2.5. Of normally
distributed ones that is one in 80, and the squared error is that of the gradient itself, whatever the block's size. The
paper clips and scales layer by layer; here both are of a block, and the standard deviation is that about zero, so that
elements that are all alike are not clipped. Only a rank's gradients are: the sum is no longer large where an owner
encodes it again.

Rounded to nearest (as in 3LC) an element's error is at most half the maximum, and never more
than the element itself, so that it is a contraction and wants error feedback. 20 trits fill a 32-bit word, since
3**20 < 2**32.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017; Lim,
Andersen and Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine learning", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_words, fresh_state, residual_of, words_of
from ._device import kernels_for

_TRITS = 20
_CLIP = 2.5
_MOST_CLIP = 100.0
"""Of a block's elements none is more standard deviations: the root of their number is 101."""


@register("codecs", "ternary", examples=("ternary", "ternary(rounding=nearest)"))
@dataclass(frozen=True)
class Ternary:
    """TernGrad and 3LC: -1, 0 or 1 times a block's maximum, rounded at random after clipping, or to nearest."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    clip: float = _CLIP
    combine: ClassVar[Combine] = "owner"
    block: ClassVar[int] = 512 * _TRITS

    def __post_init__(self) -> None:
        if self.clip and not 1 <= self.clip <= _MOST_CLIP:
            raise UsageError(f"clip={self.clip}: choose 1 to 100 standard deviations, as 2.5, or 0 for no clipping")
        if not self.stochastic and self.clip != _CLIP:
            raise UsageError(
                f"clip={self.clip}: only gradients that are rounded at random are clipped; leave clip= away, or choose"
                " rounding=stochastic"
            )

    @property
    def clips(self) -> bool:
        """True when elements are rounded at random, and large ones clipped before."""
        return self.stochastic and self.clip > 0

    @property
    def relay(self) -> Ternary:
        """Without clipping, which is for the gradients of a rank."""
        return replace(self, clip=0.0) if self.clips else self

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
        """True when rounded to nearest, or clipped."""
        return self.clips or not self.stochastic

    @property
    def leaves_out(self) -> bool:
        """True when rounded to nearest: 0 is sent for all that is smaller than half the maximum."""
        return not self.stochastic

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """A word for every 20 elements, and one for the maximum of each block."""
        size = 4 * words_of(spec.elements, self.block, _TRITS)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Maxima and trits, block by block."""
        kept = residual_of(state, start, len(x))
        clip = self.clip if self.clips else 0.0
        bad = kernels_for("ternary", x).encode_trits(
            x, kept, out, self.block, self.stochastic, clip, state.seed(), start
        )
        return Encoded(words_of(len(x), self.block, _TRITS), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """Trit times maximum."""
        check_words(payload, words_of(len(out), self.block, _TRITS))
        kernels_for("ternary", payload).decode_trits(payload, out, self.block, add)
