"""Codecs of blocks: a payload has one block after the other, each with its scales and then its codes."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..kernels.cuda import LARGEST_BLOCK
from ..nouns import Spec
from . import Codec, Combine, Encoded, Floats, Payload, State, check_words, fresh_state, residual_of, words_of
from ._device import kernels_for


class Blocks(Codec, Protocol):
    """The base of codecs of blocks. Codes are whole numbers of equal steps unless a codec has its own kernels."""

    combine: ClassVar[Combine] = "owner"
    heads: ClassVar[int] = 1
    """Words of scales per block."""

    @property
    def codes(self) -> int:
        """Codes per word."""
        ...

    @property
    def takes_tensors(self) -> bool:
        """Whether a program of a GPU can hold a block."""
        return self.block <= LARGEST_BLOCK

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        size = 4 * words_of(spec.elements, self.block, self.codes, self.heads)
        return size, size

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        bad = self._pack(x, residual_of(state, start, len(x)), out, state, start)
        return Encoded(words_of(len(x), self.block, self.codes, self.heads), bad == 0)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        check_words(payload, words_of(len(out), self.block, self.codes, self.heads))
        self._unpack(payload, out, add)

    def _pack(self, x: Floats, kept: Floats, out: Payload, state: State, start: int) -> int:  # noqa: ARG002
        """Encode ``x`` + ``kept``, the residual; return the number of blocks that are not finite."""
        found: int = kernels_for("linear", x).encode_linear(x, kept, out, 32 // self.codes, self.block)
        return found

    def _unpack(self, payload: Payload, out: Floats, add: bool) -> None:
        """Write or add the elements of a payload of the right length."""
        kernels_for("linear", payload).decode_linear(payload, out, 32 // self.codes, self.block, add)
