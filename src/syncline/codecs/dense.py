"""The codec ``none``: gradients travel unchanged, in their own element type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_words, fresh_state
from ._device import all_finite, floats, words


@register("codecs", "none")
@dataclass(frozen=True)
class Dense:
    """No compression: the payload is the array itself."""

    combine: ClassVar[Combine] = "sum"
    block: ClassVar[int] = 1
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    number: ClassVar[str] = "float32"
    takes_tensors: ClassVar[bool] = True

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        return spec.nbytes, spec.nbytes

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """No state except the residual, which stays zero."""
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG002
        out[: len(x)] = words(x)
        return Encoded(len(x), all_finite(x))

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, len(out))
        if add:
            out += floats(payload)
        else:
            out[:] = floats(payload)


@dataclass(frozen=True)
class Uncompressed(Dense):
    """Replaces a codec's payloads during its warm-up: float32 values, cut at the same blocks."""

    block: int = 1  # type: ignore[misc]  # an instance attribute here, a class attribute there
