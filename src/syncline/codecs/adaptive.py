"""``adaptive(CODEC)``: every tensor gets the codec that fits its size and kind.

    tensors of fewer than two dimensions, or below ``small`` bytes    none: biases and norms steer whole layers and
                                                                     are next to nothing on the wire
    kernels of convolutions (three dimensions and more) below 1 MiB  int8 with error feedback: shared by all places
                                                                     of an image, their gradients are dense
    all others                                                       CODEC, with error feedback where it is biased

Convolutions tolerate much less sparsity than fully connected and recurrent layers, and have far fewer bytes (Chen et
al., "AdaComp: adaptive residual gradient compression for data-parallel distributed training", AAAI 2018). The choice
depends only on the tensor, so all ranks make the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import UsageError
from ..nouns import Size, Spec
from ..registry import register
from . import Chooses, Codec, Combine, Encoded, Floats, NeedsFeedback, Payload, State
from .dense import Dense
from .feedback import Feedback
from .linear import Int8
from .threshold import Threshold

_SMALL = Size(8 << 10)
_LARGE_KERNEL_BYTES = 1 << 20


@register("codecs", "adaptive", wraps="codec", examples=("adaptive", "adaptive(topk(ratio=0.1), small=64B)"))
@dataclass(frozen=True)
class Adaptive:
    """A codec by size and kind of tensor: biases, norms and small tensors dense, small convolutions int8."""

    codec: Codec = field(default_factory=lambda: Threshold(ratio=0.01))
    small: Size = _SMALL

    def __post_init__(self) -> None:
        if isinstance(self.codec, Chooses):
            raise UsageError("adaptive(adaptive(...)) would choose twice: name the codec of the large tensors")
        if self.needs_feedback:
            raise UsageError(
                "adaptive(threshold(momentum=...)) would apply momentum to some tensors only: leave momentum= to the"
                " optimizer"
            )

    def choose(self, spec: Spec) -> Codec:
        if len(spec.shape) < 2 or spec.nbytes < self.small:
            return Dense()
        chosen = Int8() if len(spec.shape) > 2 and spec.nbytes < _LARGE_KERNEL_BYTES else self.codec
        return Feedback(chosen) if chosen.biased and chosen.contraction else chosen

    @property
    def needs_feedback(self) -> bool:
        """Whether the codec of the large tensors keeps state that requires a residual."""
        return isinstance(self.codec, NeedsFeedback) and self.codec.needs_feedback

    @property
    def combine(self) -> Combine:
        return self.codec.combine

    @property
    def block(self) -> int:
        """The whole tensor, because the possible cuts are known only after the choice."""
        return 0

    @property
    def contraction(self) -> bool:
        """Whether the large tensors' codec is a contraction; the other codecs are."""
        return self.codec.contraction

    @property
    def biased(self) -> bool:
        """Only if the inner codec has a bias that error feedback cannot correct; else it is wrapped in it already."""
        return self.codec.biased and not self.codec.contraction

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        return self.choose(spec).wire_bytes(spec)

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """The state of the tensor's own codec, with a residual if that codec is wrapped in feedback."""
        return self.choose(spec).init(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        return self.choose(state.spec).encode(x, out, state, start)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:
        self.choose(state.spec).decode(payload, out, state, add=add, start=start)
