"""``onebit`` and ``sign``: one bit per element.

``onebit`` sends the sign and, for each block, the means of its positive and of its negative elements: the least-squares
reconstruction from these bits. Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", Interspeech 2014.

``sign`` sends the sign and the mean magnitude m of a block of n elements. Its squared error is |x|^2 - n m^2, less than
|x|^2: a contraction by |x|_1^2 / (n |x|_2^2), and with error feedback it converges like SGD. Karimireddy et al., "Error
feedback fixes SignSGD and other gradient compression schemes", ICML 2019. The error of ``onebit`` is no larger.

``sign(vote=on)`` is the majority vote: the bare signs are summed, and the sign of the sum is sent back. All elements
have the same magnitude, whatever the gradient was; a tie is plus. Bernstein et al., "signSGD: compressed optimisation
for non-convex problems", ICML 2018, and "signSGD with majority vote is communication efficient and fault tolerant",
ICLR 2019. An optimizer's step is then as large as its learning rate, and the papers use 0.0001 where SGD uses 0.1. A
vote therefore counts as a gradient of ``scale``, by default that ratio, so that learning rates for SGD still fit.
``momentum`` applies to a rank's gradients, whose signs are sent: the papers' Signum. The published form is
``sign(vote=on, scale=1, momentum=0.9)`` under plain SGD with its own learning rate.

A block whose magnitudes add up to more than float32 can hold counts as not finite.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Floats, Payload, State, fresh_state, no_residual
from ._blocks import Blocks
from ._device import kernels_for

_SCALE = 0.001
"""The ratio of learning rates that both papers have tuned on other data. Digits would take more: three seeds in one
process end 1.9 points below dense training with it, 1.2 with 0.003, and 0.7 with 0.01 (docs/results/accuracy.md)."""
_LEAST_SCALE, _MOST_SCALE = 1e-30, 1e30
"""Within these bounds float32 can sum the votes of any number of ranks and multiply them by a learning rate."""

_MOMENTUM = "momentum"


@register("codecs", "onebit")
@dataclass(frozen=True)
class Onebit(Blocks):
    """1-bit SGD: signs, and the means of a block's positive and of its negative elements."""

    block: ClassVar[int] = 16384
    codes: ClassVar[int] = 32
    heads: ClassVar[int] = 2
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:  # noqa: ARG002
        found: int = kernels_for("signs", x).encode_means(x, kept, out)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        kernels_for("signs", payload).decode_bits(payload, out, 2, add)


@register("codecs", "sign", examples=("sign", "sign(vote=on)"))
@dataclass(frozen=True)
class Sign(Blocks):
    """Signs times the mean magnitude of a block, or, with ``vote=on``, times ``scale`` by the majority of the ranks."""

    # A vote has a word for its scale too, because bits alone cannot tell all ranks that a block is not finite.

    vote: Literal["off", "on"] = "off"
    scale: float = _SCALE
    momentum: float = 0.0
    block: ClassVar[int] = 16384
    codes: ClassVar[int] = 32
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _LEAST_SCALE <= self.scale <= _MOST_SCALE:
            raise UsageError(
                f"scale={self.scale}: choose the gradient that one vote stands for, such as 0.001, or 1 for the bare"
                " sign"
            )
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}: choose 0 for none, or a number below 1, such as 0.9")
        if self.vote == "off" and (self.scale != _SCALE or self.momentum):
            raise UsageError("scale= and momentum= of sign apply only to a vote: write vote=on, or leave them out")

    @property
    def contraction(self) -> bool:
        """True for scaled signs. The error of a vote does not shrink with the element."""
        return self.vote == "off"

    @property
    def relay(self) -> Sign:
        """Without momentum, which applies to a rank's own gradients."""
        return replace(self, momentum=0.0)

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """With momentum, also a velocity of zeros."""
        memory = {_MOMENTUM: np.zeros(spec.elements, np.float32)} if self.momentum else {}
        return fresh_state(spec, rank, feedback, **memory)

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:
        vote, decay = 0.0, 1.0
        if self.vote == "on":
            kept, vote, decay = no_residual(), self.scale, self.momentum
        if self.momentum:
            kept = state.memory[_MOMENTUM][start : start + len(x)]
        found: int = kernels_for("signs", x).encode_signs(x, kept, out, vote, decay)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        kernels_for("signs", payload).decode_bits(payload, out, 1, add)
