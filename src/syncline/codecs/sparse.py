"""``topk``, ``gtopk`` and ``randomk``: send a few elements of a tensor exactly and keep the others in the residual.

Of n elements k = max(1, round(ratio * n)) are sent. The k largest hold at least k/n of the squared norm of x; k random
ones hold k/n of it in the mean. Both are contractions with d = k/n, as error feedback needs (Stich, Cordonnier, Jaggi,
"Sparsified SGD with memory", NeurIPS 2018). An element that is sent has no error.

    topk     every rank sends its own k largest; the sum has up to N*k elements (Aji, Heafield, EMNLP 2017)
    gtopk    when two ranks' selections meet, the k largest of their sum go on, so that every rank gets k elements
             (Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification", ICDCS 2019)
    randomk  all ranks draw the same k elements, so that only values travel and plans can sum them

With error feedback and random selection an element is sent n/k steps late on average, however large it has become, as
the sum of n/k gradients. Learning rates would have to be k/n of the usual ones, as in the paper's theorem, and ordinary
ones diverge. ``randomk`` therefore multiplies its residual by ``decay`` in each step, which keeps it below ``decay / (1
- decay)`` gradients; GRACE's residual memory has the same factor. ``decay=1`` is the paper's memory. The other codecs
send large elements soon and keep everything.

A payload of pairs has the layout of ``kernels/sparse.py``: 6 bytes per pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..errors import UsageError
from ..nouns import Spec
from ..registry import register
from . import Combine, Encoded, Floats, Payload, State, check_words, fresh_state, no_residual
from ._device import floats, kernels_for, on_device
from ._sparse import Source, decode_pairs, encode_largest, pair_words, read_pairs

_DECAY = 0.8


def check_ratio(ratio: float) -> None:
    """Raise UsageError unless ``ratio`` is above 0 and at most 1."""
    if not 0 < ratio <= 1:
        raise UsageError(f"ratio={ratio}: choose a share of the elements above 0 and up to 1, such as 0.01")


def share(ratio: float, elements: int) -> int:
    """The number of elements for a ratio: at least one, unless there are none."""
    return min(elements, max(1, round(ratio * elements)))


@register("codecs", "topk", examples=("topk(ratio=0.01)", "topk(ratio=0.3)"))
@dataclass(frozen=True)
class TopK:
    """The share of elements that are largest in magnitude, exactly, each with its index."""

    ratio: float
    combine: ClassVar[Combine] = "gather"
    block: ClassVar[int] = 0
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    takes_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def ratio_at(self, step: int) -> float:  # noqa: ARG002
        return self.ratio

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """6 bytes for each of k elements, and 4 per 65536 elements of the tensor."""
        words = pair_words(spec.elements, share(self.ratio, spec.elements))
        return 4 * words, 4 * words

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG002
        """Reads x and the residual once; with feedback writes the residual once."""
        residual = no_residual() if state.residual is None else state.residual
        source = Source(x, residual, no_residual())
        return encode_largest(source, share(self.ratio, len(x)), out, state.seed())

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        k = share(self.ratio, len(out))
        decode_pairs(payload, out, k, k, add)


@register("codecs", "gtopk", examples=("gtopk(ratio=0.01)", "gtopk(ratio=0.3)"))
@dataclass(frozen=True)
class GTopK(TopK):
    """Like topk, but the sum over the ranks also keeps only its largest elements: payloads are merged on a tree."""

    combine: ClassVar[Combine] = "merge"
    takes_tensors: ClassVar[bool] = False  # payloads are merged on the host, with the residual

    def merge(self, mine: Payload, theirs: Payload, out: Payload, state: State) -> int:
        """Write the k largest of the sum of two payloads to ``out``, which is neither of them. Returns its words.

        The rest is added to the state's residual, if there is one. Over all ranks, the last payload and the residuals
        then sum up to the inputs, unless the sum is not finite. Raises PayloadError, without any changes, for invalid
        payloads, and UsageError for payloads on a device.
        """
        if on_device(mine):
            raise UsageError("gtopk merges payloads on the host: copy them there")
        from ..kernels.sparse import NOT_FINITE, keep_largest, magnitudes, merge, put_others, rank_largest, write_pairs

        elements = state.spec.elements
        k = share(self.ratio, elements)
        left, right = read_pairs(mine, elements, k, k), read_pairs(theirs, elements, k, k)
        indices, values = np.empty(2 * k, np.uint32), np.empty(2 * k, np.float32)
        pairs = merge(*left, *right, indices, values)
        if pairs > k:
            sizes = np.empty(pairs, np.int32)
            magnitudes(values[:pairs], no_residual(), no_residual(), 0.0, 1.0, sizes)
            least, larger = rank_largest(sizes, k)
            if state.residual is not None and sizes.max() < NOT_FINITE:
                put_others(indices[:pairs], values[:pairs], least, k - larger, state.residual)
            pairs = keep_largest(indices, values, pairs, least, k - larger)
        return int(write_pairs(indices[:pairs], values[:pairs], elements, out))


@register("codecs", "randomk", examples=("randomk(ratio=0.01)", "randomk(ratio=0.3)"))
@dataclass(frozen=True)
class RandomK:
    """A random share of the elements, the same on all ranks: only values are sent, and the residual decays."""

    ratio: float
    decay: float = _DECAY
    combine: ClassVar[Combine] = "sum"
    block: ClassVar[int] = 0
    contraction: ClassVar[bool] = True
    biased: ClassVar[bool] = True
    number: ClassVar[str] = "float32"
    takes_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 0 < self.decay <= 1:
            raise UsageError(
                f"decay={self.decay}: choose the share of the residual that a step keeps, such as 0.8, or 1 for the"
                " whole residual; feedback=off keeps nothing"
            )

    @property
    def needs_feedback(self) -> bool:
        """Only a residual can decay."""
        return self.decay != _DECAY

    def ratio_at(self, step: int) -> float:  # noqa: ARG002
        return self.ratio

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        nbytes = 4 * share(self.ratio, spec.elements)
        return nbytes, nbytes

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        return fresh_state(spec, rank, feedback)

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:  # noqa: ARG002
        """The values at this step's elements, one from each of k strata. All are NaN if the input is not finite."""
        residual = no_residual() if state.residual is None else state.residual
        k = share(self.ratio, len(x))
        finite = kernels_for("sparse", x).take_strata(x, residual, self.decay, state.seed(shared=True), out[:k])
        return Encoded(k, finite)

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:  # noqa: ARG002
        """The values at this step's elements, and zeros elsewhere. ``state`` must be at the step of the encoding."""
        check_words(payload, share(self.ratio, len(out)))
        if not add:
            out[:] = 0
        kernels_for("sparse", payload).put_strata(floats(payload), state.seed(shared=True), out)
