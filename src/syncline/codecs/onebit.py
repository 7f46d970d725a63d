"""``onebit`` and ``sign``: one bit per element.

``onebit`` sends the sign and, for each block, the mean of its positive and that of its negative elements: the
reconstruction of least squares for these bits. Seide et al., "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs", Interspeech 2014.

``sign`` sends the sign and the mean magnitude m of a block of n elements. Its squared error is |x|^2 - n m^2, less
than |x|^2: a contraction by |x|_1^2 / (n |x|_2^2), and with error feedback it converges like SGD. Karimireddy et al.,
"Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019. ``onebit`` errs no more than it.

``sign(vote=on)`` is the majority vote: the bare signs are summed, and the sign of the sum is sent back, so that every
element comes out as plus or minus the same whatever the gradient was; a tie is plus. Bernstein et al., "signSGD:
compressed optimisation for non-convex problems", ICML 2018, and "signSGD with majority vote is communication efficient
and fault tolerant", ICLR 2019. An optimizer's step is then as large as its learning rate, for which the papers have
0.0001 where SGD has 0.1. So a vote is a gradient of ``scale``, by default that ratio, and learning rates stay what they
are for SGD. ``momentum`` is that of a rank's gradients, whose signs are sent: the papers' Signum. As published it is
``sign(vote=on, scale=1, momentum=0.9)`` under plain SGD with its own learning rate.

A block whose magnitudes add up to more than float32 holds counts as not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_words, fresh_state, no_residual, residual_of, words_of
from ._device import kernels_for

_BITS = 32
_SCALE = 0.001
_LEAST_SCALE, _MOST_SCALE = 1e-30, 1e30
"""Within these float32 can add up, and multiply with a learning rate, what any number of ranks say."""

_MOMENTUM = "momentum"


@register("codecs", "onebit")
@dataclass(frozen=True)
class Onebit:
    """1-bit SGD: signs, and the means of a block's positive and of its negative elements."""

    combine: ClassVar[Combine] = "owner"
    block: ClassVar[int] = 16384
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """A word for every 32 elements, and two for the means of each block."""
        size = 4 * words_of(spec.elements, self.block, _BITS, heads=2)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Means and bits, block by block."""
        bad = kernels_for("signs", x).encode_means(x, residual_of(state, start, len(x)), out)
        return Encoded(words_of(len(x), self.block, _BITS, heads=2), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """One of the two means."""
        check_words(payload, words_of(len(out), self.block, _BITS, heads=2))
        kernels_for("signs", payload).decode_bits(payload, out, 2, add)


@register("codecs", "sign", examples=("sign", "sign(vote=on)"))
@dataclass(frozen=True)
class Sign:
    """Signs times the mean magnitude of a block, or, with ``vote=on``, times ``scale`` by the majority of the ranks."""

    vote: Literal["off", "on"] = "off"
    scale: float = _SCALE
    momentum: float = 0.0
    combine: ClassVar[Combine] = "owner"
    block: ClassVar[int] = 16384
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _LEAST_SCALE <= self.scale <= _MOST_SCALE:
            raise UsageError(f"scale={self.scale}: choose what gradient a vote is, as 0.001, or 1 for the bare sign")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}: choose 0 for none, or below 1, as 0.9")
        if self.vote == "off" and (self.scale != _SCALE or self.momentum):
            raise UsageError("scale= and momentum= of sign are those of a vote: write vote=on, or leave them away")

    @property
    def contraction(self) -> bool:
        """True for scaled signs; the error of a vote does not depend on how small the element is."""
        return self.vote == "off"

    @property
    def relay(self) -> Sign:
        """Without momentum, which is of the gradients of a rank."""
        return replace(self, momentum=0.0)

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """A word for every 32 elements, and one for each block: its mean magnitude, or the scale of a vote.

        A vote needs that word too: bits alone cannot say that a block is not finite, which every rank has to learn.
        """
        size = 4 * words_of(spec.elements, self.block, _BITS)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """With momentum that of zeros, beside the residual."""
        memory = {_MOMENTUM: np.zeros(spec.elements, np.float32)} if self.momentum else {}
        return fresh_state(spec, rank, feedback, **memory)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Magnitudes and bits, block by block."""
        kept, vote, decay = residual_of(state, start, len(x)), 0.0, 1.0
        if self.vote == "on":
            kept, vote, decay = no_residual(), self.scale, self.momentum
        if self.momentum:
            kept = state.memory[_MOMENTUM][start : start + len(x)]
        bad = kernels_for("signs", x).encode_signs(x, kept, out, vote, decay)
        return Encoded(words_of(len(x), self.block, _BITS), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """Plus or minus the magnitude."""
        check_words(payload, words_of(len(out), self.block, _BITS))
        kernels_for("signs", payload).decode_bits(payload, out, 1, add)
