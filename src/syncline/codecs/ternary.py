"""``ternary``: every element as -1, 0 or 1 times the largest magnitude of its block, at 1.6 bits.

Stochastic rounding (TernGrad) is unbiased, but its variance grows with the maximum: error feedback diverges around it,
and training without feedback diverges if single elements are large. Gradients are therefore clipped first, as in
section 3.3 of the paper: an element of more than 2.5 standard deviations is sent as one of 2.5. For normally
distributed elements that is one in 80, and the squared error equals the squared norm of the gradient, whatever the
block's size. The paper clips and scales layer by layer; here both are per block, and the standard deviation is taken
about zero, so that equal elements are not clipped. Only a rank's own gradients are clipped, because sums that an owner
encodes again have no such outliers.

With rounding to nearest (as in 3LC) an element's error is at most half the maximum, and never more than the element
itself: a contraction, which should have error feedback. 20 trits fill a 32-bit word, because 3**20 < 2**32.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017; Lim,
Andersen and Kaminsky, "3LC: lightweight and effective traffic compression for distributed machine learning", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ..errors import UsageError
from ..registry import register
from . import Floats, Payload, State
from ._blocks import Blocks
from ._device import kernels_for

_CLIP = 2.5
_MOST_CLIP = 100.0
"""No element can exceed this many standard deviations: the square root of a block's size is 101."""


@register("codecs", "ternary", examples=("ternary", "ternary(rounding=nearest)"))
@dataclass(frozen=True)
class Ternary(Blocks):
    """TernGrad and 3LC: -1, 0 or 1 times a block's maximum, rounded at random after clipping, or to nearest."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    clip: float = _CLIP
    block: ClassVar[int] = 512 * 20
    codes: ClassVar[int] = 20

    def __post_init__(self) -> None:
        if self.clip and not 1 <= self.clip <= _MOST_CLIP:
            raise UsageError(
                f"clip={self.clip}: choose 1 to 100 standard deviations, such as 2.5, or 0 for no clipping"
            )
        if not self.stochastic and self.clip != _CLIP:
            raise UsageError(
                f"clip={self.clip}: clipping needs random rounding; leave clip= out, or choose rounding=stochastic"
            )

    @property
    def clips(self) -> bool:
        """Whether elements are rounded stochastically and large ones clipped before."""
        return self.stochastic and self.clip > 0

    @property
    def relay(self) -> Ternary:
        """Without clipping, which applies to a rank's own gradients."""
        return replace(self, clip=0.0) if self.clips else self

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def contraction(self) -> bool:
        """True with rounding to nearest. With stochastic rounding an error can be as large as the maximum."""
        return not self.stochastic

    @property
    def biased(self) -> bool:
        """True with rounding to nearest, and with clipping."""
        return self.clips or not self.stochastic

    @property
    def leaves_out(self) -> bool:
        """True with rounding to nearest, which sends 0 for all elements below half the maximum."""
        return not self.stochastic

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:
        clip, encode = self.clip if self.clips else 0.0, kernels_for("ternary", x).encode_trits
        found: int = encode(x, kept, out, self.block, self.stochastic, clip, state.seed(), start)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        kernels_for("ternary", payload).decode_trits(payload, out, self.block, add)
