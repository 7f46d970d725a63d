"""``fp16``, ``bf16`` and ``fp8``: shorter floating-point numbers, rounded to nearest even.

The relative error of an element is at most 2**-11 (float16), 2**-8 (bfloat16) and 2**-4 (E4M3 within its block), unless
it is subnormal in its type; then the error is at most half the type's smallest number. All three are contractions,
because the nearest number is never farther away than 0.

Payloads of the 16-bit types are arrays of numbers that any plan can add; a sum beyond their range becomes an infinity,
as usual. A finite *input* beyond the range is sent as the largest finite number, so that error feedback keeps the rest
and finite values stay finite. With ``sum=fp32`` owners widen the payloads of all ranks, add them in float32 and round
the sum once: its error does not grow with the number of ranks, at the cost of further decodings. Micikevicius et al.,
"Mixed precision training", ICLR 2018; Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019;
Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_words, fresh_state, residual_of, words_of
from ._blocks import Blocks
from ._device import halves, kernels_for


@dataclass(frozen=True)
class _Half:
    """The base of the 16-bit types: element i is half i % 2 of word i // 2; an unused last half is 0.

    Rounding to nearest is so much finer than the noise of a gradient that error feedback is only added on request:
    ``biased`` is False.
    """

    sum: Literal["payload", "fp32"] = "payload"
    number: ClassVar[str]
    block: ClassVar[int] = 2
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = False
    takes_tensors: ClassVar[bool] = True

    @property
    def combine(self) -> Combine:
        return "owner" if self.sum == "fp32" else "sum"

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        size = 4 * words_of(spec.elements, 2, 2, heads=0)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        words = words_of(len(x), 2, 2, heads=0)
        out[words - 1 : words] = 0
        kernels = kernels_for("cast", x)
        kernel = kernels.encode_float16 if self.number == "float16" else kernels.encode_bfloat16
        return Encoded(words, kernel(x, residual_of(state, start, len(x)), halves(out[:words])))

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(len(out), 2, 2, heads=0))
        kernels = kernels_for("cast", payload)
        kernel = kernels.decode_float16 if self.number == "float16" else kernels.decode_bfloat16
        kernel(halves(payload), out, add)


@register("codecs", "fp16", examples=("fp16", "fp16(sum=fp32)"))
@dataclass(frozen=True)
class Fp16(_Half):
    """16 bits per element: IEEE 754 half precision, up to 65504. Added as they are, or in float32."""

    number: ClassVar[str] = "float16"


@register("codecs", "bf16", examples=("bf16", "bf16(sum=fp32)"))
@dataclass(frozen=True)
class Bf16(_Half):
    """16 bits per element: bfloat16, the upper half of a float32. Added as they are, or in float32."""

    number: ClassVar[str] = "bfloat16"


@register("codecs", "fp8")
@dataclass(frozen=True)
class Fp8(Blocks):
    """8 bits per element: E4M3 numbers of the OCP, one scale per block, rounded to nearest even."""

    block: ClassVar[int] = 1024
    codes: ClassVar[int] = 4
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:  # noqa: ARG002
        """The scale maps a block's largest element to 448, the largest number of the type."""
        found: int = kernels_for("cast", x).encode_e4m3(x, kept, out, self.block)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        kernels_for("cast", payload).decode_e4m3(payload, out, self.block, add)
