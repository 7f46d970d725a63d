"""``feedback(CODEC)``: the error of one step's encoding is added to the next gradient.

The residual e of a rank starts at zero; each step sends C(x + e) and keeps e = x + e - C(x + e). Gradients are delayed
but not lost, so the mean over many steps is right although every single step is biased. It converges if C is a
contraction, E |x - C(x)|^2 <= (1 - d) |x|^2 for some d > 0. Around an unbiased quantizer whose variance exceeds the
squared norm of the gradient the residual grows instead, and a strategy refuses that.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML
2019.

``warmup`` is for the start of training, when gradients are large and change quickly, so that delays do harm. In the
first ``warmup`` steps nothing is compressed, and the residual stays zero. Tang et al., "1-bit Adam: communication
efficient large-scale training with Adam's convergence speed", ICML 2021, use such a phase before one bit per element.

The inner codec updates the residual in the same pass in which it encodes; this file only composes the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Chooses, Codec, Combine, Encoded, Floats, Payload, State, relay_of


@register("codecs", "feedback", wraps="codec", examples=("feedback(int8)", "feedback(onebit, warmup=2)"))
@dataclass(frozen=True)
class Feedback:
    """Error feedback around another codec: its encoding error is added to the next gradient."""

    codec: Codec
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise UsageError(f"warmup={self.warmup}: choose a number of steps, or 0 for no warm-up")
        if self.warmup and (relay_of(self.codec) != self.codec or getattr(self.codec, "warmup", 0)):
            raise UsageError(
                f"feedback({self.codec}, warmup={self.warmup}): momentum correction, clipping and a warm-up of the"
                " codec itself would begin only after these steps; use one of the two"
            )
        if isinstance(self.codec, Feedback):
            raise UsageError(
                "feedback(feedback(...)): error feedback around error feedback changes nothing; write it once"
            )
        if isinstance(self.codec, Chooses):
            raise UsageError("feedback(adaptive(...)): each tensor already has error feedback; write adaptive(...)")

    @property
    def combine(self) -> Combine:
        return self.codec.combine

    @property
    def block(self) -> int:
        return self.codec.block

    @property
    def contraction(self) -> bool:
        return self.codec.contraction

    @property
    def biased(self) -> bool:
        """Not in the mean over many steps."""
        return False

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        return self.codec.wire_bytes(spec)

    def init(self, spec: Spec, rank: int, feedback: bool = True) -> State:  # noqa: ARG002
        return self.codec.init(spec, rank, feedback=True)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        return self.codec.encode(x, out, state, start)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:
        self.codec.decode(payload, out, state, add=add, start=start)
