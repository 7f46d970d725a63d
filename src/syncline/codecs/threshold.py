"""``threshold``: deep gradient compression, which selects the largest elements by a sampled threshold.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018.
Besides error feedback, the paper's "local gradient accumulation", it has

    momentum correction   u = momentum * u + x is accumulated in the residual instead of x, as if every element had
                          been sent late but with its own momentum; the optimizer's own momentum must be 0 then
    momentum masking      u is cleared where the element was sent, so that stale momentum does not push it further
    local clipping        a rank's gradient of a tensor is scaled down to the norm clip / sqrt(N) before all that
    warm-up               the share that is sent falls exponentially from 25 % to the ratio in the first steps

The threshold is estimated from a random sample, four standard deviations low. Among the elements that reach it, the
largest are sent, up to the ratio. If fewer reach it, fewer are sent: unlike ``topk`` it never reads the tensor again
and never sends a zero. For independent elements this happens in about one step of 30,000. Small tensors are sampled
completely. Elements are sent exactly: a contraction with d = k/n whenever k elements are found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, fresh_state, no_residual
from ._device import on_device
from ._sparse import Source, decode_pairs, encode_largest, pair_words
from .sparse import check_ratio, share

_WARM = 0.25
"""The share of elements in the first step of a warm-up."""

_VELOCITY = "velocity"


@register("codecs", "threshold", examples=("threshold(ratio=0.01)", "threshold(ratio=0.3)"))
@dataclass(frozen=True)
class Threshold:
    """Deep gradient compression: elements above a sampled threshold, with momentum correction, clipping and warm-up."""

    ratio: float
    momentum: float = 0.0
    clip: float = 0.0
    warmup: int = 0
    combine: ClassVar[Combine] = "gather"
    block: ClassVar[int] = 0
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}: choose 0 for none, or a number below 1, such as 0.9")
        if not 0 <= self.clip < math.inf:
            raise UsageError(f"clip={self.clip}: choose the greatest norm of a tensor's gradient, or 0 for no clipping")
        if self.warmup < 0:
            raise UsageError(f"warmup={self.warmup}: choose a number of steps, or 0 for no warm-up")

    @property
    def relay(self) -> Threshold:
        """Without momentum correction and clipping, which apply to a rank's own gradients."""
        return replace(self, momentum=0.0, clip=0.0)

    @property
    def needs_feedback(self) -> bool:
        """Momentum correction needs the residual."""
        return self.momentum > 0

    @property
    def takes_tensors(self) -> bool:
        """Norms, which clipping needs, are computed on the host."""
        return self.clip == 0

    def ratio_at(self, step: int) -> float:
        if step >= self.warmup or self.ratio >= _WARM:
            return self.ratio
        return float(_WARM * (self.ratio / _WARM) ** (step / self.warmup))

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """6 bytes for each of k elements, 4 per 65536 elements of the tensor. The maximum is the size at the start of a
        warm-up.

        The maximum exceeds the expected size even without a warm-up, because fewer elements may reach the threshold.
        """
        expected = 4 * pair_words(spec.elements, share(self.ratio, spec.elements))
        greatest = 4 * pair_words(spec.elements, self._most(spec.elements))
        return expected, max(greatest, expected + 4)

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """With momentum correction, also a velocity of zeros. Raises UsageError for momentum correction without error
        feedback."""
        if not self.momentum:
            return fresh_state(spec, rank, feedback)
        if not feedback:
            raise UsageError("momentum correction accumulates the unsent elements: leave out feedback=off or momentum=")
        return fresh_state(spec, rank, feedback, **{_VELOCITY: np.zeros(spec.elements, np.float32)})

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG002
        """Reads x and the state once; with feedback writes the state once. Clipping reads x once more.

        Raises UsageError for clipping on a device, where the fixed order of the norm's sum would be slow.
        """
        residual = no_residual() if state.residual is None else state.residual
        velocity = state.memory[_VELOCITY] if self.momentum else no_residual()
        source = Source(x, residual, velocity, self.momentum, self._scale(x, state.world))
        k = share(self.ratio_at(state.step), len(x))
        return encode_largest(source, k, out, state.seed(), exact=False)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        decode_pairs(payload, out, 0, self._most(len(out)), add)

    def _most(self, elements: int) -> int:
        return share(self.ratio_at(0), elements)

    def _scale(self, x: Floats, world: int) -> float:
        """The factor by which clipping scales the gradient; 1 if it is not finite, which ``encode`` detects later."""
        if not self.clip:
            return 1.0
        if on_device(x):
            raise UsageError(f"clip={self.clip}: norms are computed on the host; leave clip= out for tensors on a GPU")
        from ..kernels.sparse import norm

        length = norm(x)
        limit = self.clip / math.sqrt(world)
        return limit / length if limit < length < math.inf else 1.0
