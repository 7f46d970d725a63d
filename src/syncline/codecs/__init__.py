"""Codecs convert gradients to payloads and back; there is one file per family.

A codec encodes the gradient of one tensor. It declares how payloads combine, where a tensor must not be cut, and
whether error feedback may be added. It knows no buckets, plans, other ranks or transports: ``compression.reducers``
moves the payloads. All state between steps is in a ``State``, which the caller keeps per parameter name.

Gradients are one-dimensional contiguous float32 arrays. Payloads are one-dimensional contiguous arrays of uint32 words,
which keeps all their parts aligned.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019) is the ``residual`` of a state. With a
residual, ``encode`` sends ``x + residual`` and stores the encoding error in ``residual``, in the same pass over memory.
Afterwards ``decode(payload) + residual == x + previous residual``, up to the rounding of one subtraction.

Values that are not finite are never compressed. A tensor (or block) with a NaN or infinity gets a payload that decodes
to non-finite values, its residual is unchanged, and ``Encoded.finite`` is False.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import SynclineError, UsageError
from ..nouns import Spec

Floats = NDArray[np.float32]
Payload = NDArray[np.uint32]

Combine = Literal["sum", "owner", "gather", "merge", "rounds"]
"""How the payloads of the ranks combine:

    sum     payloads are arrays of numbers of one type that may be added: any allreduce plan carries them
    owner   the owner of a part decodes and adds all ranks' payloads, and encodes the sum again
    gather  every rank gets all payloads and adds them up
    merge   two payloads can be merged into one of the same size: they meet on a tree
    rounds  the codec itself alternates between computing and sums over the ranks (``Rounds``)
"""


class PayloadError(SynclineError):
    """A payload that the codec cannot have made: corrupted, or made by another codec."""


class Encoded(NamedTuple):
    """The result of ``encode``: the number of payload words, and whether the input was finite."""

    words: int
    finite: bool


@dataclass
class State:
    """A codec's state of one tensor on one rank, all of which belongs in a checkpoint.

    ``residual`` (elements, float32) is None without error feedback. ``memory`` holds the codec's further arrays by
    name. ``step`` counts the exchanges and is the same on all ranks. ``world`` is the number of ranks.
    """

    spec: Spec
    rank: int
    residual: Floats | None = None
    step: int = 0
    memory: dict[str, Floats] = field(default_factory=dict)
    world: int = 1

    def seed(self, shared: bool = False) -> int:
        """32 random bits for this tensor and step, different on every rank unless ``shared``."""
        text = f"{self.spec.name} {self.step} {'all' if shared else self.rank}"
        return zlib.crc32(text.encode(errors="surrogatepass"))


class Codec(Protocol):
    """A compression method. Implementations are frozen dataclasses whose fields are the arguments in a strategy text.

    A payload's length and content depend only on the tensor and the state. If ``block`` is positive, a tensor may be
    encoded in parts that start at multiples of it, and the concatenated payloads equal the payload of the whole tensor.
    """

    @property
    def combine(self) -> Combine:
        """How the payloads of the ranks combine."""
        ...

    @property
    def block(self) -> int:
        """The size of a block in elements, counted from the tensor's start; 0 if the whole tensor is one block."""
        ...

    @property
    def contraction(self) -> bool:
        """Whether E|x - decode(encode(x))|^2 < |x|^2, which error feedback needs to converge."""
        ...

    @property
    def biased(self) -> bool:
        """Whether the mean of decode(encode(x)) differs from x.

        A biased contraction gets error feedback unless the strategy turns it off.
        """
        ...

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """The expected and the maximum payload size of a tensor in bytes, without encoding it.

        They are equal for codecs of fixed size.
        """
        ...

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """The state of a tensor before its first step. With ``feedback`` it has a residual of zeros."""
        ...

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Compress elements of a tensor, from ``start`` on, into ``out``, which has room for the largest payload.

        Makes one pass over memory. ``x`` is unchanged; the state's residual is updated in place.
        """
        ...

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:
        """Decode a payload of elements from ``start`` on into ``out``, or add it there.

        Raises PayloadError for a payload that ``encode`` cannot have made. Never writes outside ``out``.
        """
        ...


@runtime_checkable
class Sums(Protocol):
    """A codec whose payloads are arrays of numbers that can be added: ``combine`` is "sum"."""

    @property
    def number(self) -> str:
        """The numpy (or ml_dtypes) name of the number type."""
        ...


@runtime_checkable
class Merges(Protocol):
    """A codec whose payloads can be merged into one of the same size: ``combine`` is "merge"."""

    def merge(self, mine: Payload, theirs: Payload, out: Payload, state: State) -> int:
        """Write the sum of two payloads to ``out``, as far as it fits. Returns the number of words.

        The remainder is added to the state's residual, if there is one. Raises PayloadError, without any changes, for a
        payload that ``encode`` and ``merge`` cannot have made.
        """
        ...


@runtime_checkable
class Rounds(Protocol):
    """A codec that computes between sums over the ranks: ``combine`` is "rounds". Its ``encode`` is never called."""

    def average(self, x: Floats, state: State, world: int) -> Generator[Floats, None, bool]:
        """Replace ``x``, this rank's share of a tensor's mean gradient, by the sum over all ranks.

        The caller replaces each yielded array in place by its sum over the ranks, with the same bits on all of them.
        The number and sizes of these arrays depend only on the tensor (``rounds``). ``x`` is also working memory; its
        final bits are the same on all ranks. Returns whether this rank's own input was finite.
        """
        ...

    def rounds(self, spec: Spec) -> Sequence[int]:
        """The number of elements of each array that ``average`` yields for a tensor, in order."""
        ...


@runtime_checkable
class NeedsFeedback(Protocol):
    """A codec that may require error feedback."""

    @property
    def needs_feedback(self) -> bool:
        """Whether it does with its arguments."""
        ...


@runtime_checkable
class Sparse(Protocol):
    """A codec that sends only some of a tensor's elements in each step."""

    def ratio_at(self, step: int) -> float:
        """The share of elements that it sends in a step, counted from 0."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A codec, not ``Sparse``, that may omit most of a tensor in one exchange."""

    @property
    def leaves_out(self) -> bool:
        """Whether it may omit that much with its arguments. The residual can then be larger than the gradient."""
        ...


@runtime_checkable
class TakesTensors(Protocol):
    """A codec that may encode and decode tensors on a device (``_device``) as well as arrays."""

    @property
    def takes_tensors(self) -> bool:
        """Whether everything that an exchange of its payloads needs takes tensors, with these arguments."""
        ...


@runtime_checkable
class Decays(Protocol):
    """A codec that multiplies the residual by ``decay`` in every step."""

    @property
    def decay(self) -> float:
        """A factor above 0 and up to 1."""
        ...


@runtime_checkable
class Chooses(Protocol):
    """A codec that selects another codec for every tensor."""

    def choose(self, spec: Spec) -> Codec:
        """The codec of a tensor."""
        ...


@runtime_checkable
class Wraps(Protocol):
    """A codec that wraps another one, such as error feedback."""

    codec: Codec


def warmup_of(codec: Codec) -> int:
    """The number of steps without compression: the largest ``warmup`` of the error feedback in a codec."""
    if not isinstance(codec, Wraps):
        return 0
    return max(getattr(codec, "warmup", 0), warmup_of(codec.codec))


def relay_of(codec: Codec) -> Codec:
    """The codec with which an owner encodes its sums or updates.

    A codec with extra processing of a rank's own gradients has the codec without it as ``relay``.
    """
    relay: Codec = getattr(codec, "relay", codec)
    return relay


@runtime_checkable
class Stochastic(Protocol):
    """A codec that can round stochastically."""

    @property
    def stochastic(self) -> bool:
        """Whether it rounds stochastically, so that decode(encode(x)) is unbiased over the seeds."""
        ...


class Applied(NamedTuple):
    """The codec that a tensor gets, whether it has error feedback, and the number of warm-up steps before it."""

    codec: Codec
    feedback: bool
    warmup: int


def codec_of(codec: Codec, spec: Spec) -> Applied:
    """The codec, error feedback and warm-up that ``codec`` means for a tensor."""
    found = Applied(codec, False, 0)
    while True:
        codec = found.codec
        if isinstance(codec, Chooses):  # first, because the argument may be named ``codec`` too
            found = Applied(codec.choose(spec), False, 0)
        elif isinstance(codec, Wraps):
            found = Applied(codec.codec, True, getattr(codec, "warmup", 0))
        else:
            return found


def fresh_state(spec: Spec, rank: int, feedback: bool, **memory: Any) -> State:
    """A state with further arrays and, with feedback, a residual of zeros."""
    residual = np.zeros(spec.elements, np.float32) if feedback else None
    return State(spec, rank, residual, memory=memory)


def check_words(payload: Payload, expected: int) -> None:
    """Raise PayloadError unless a payload has exactly the words that its codec makes for that many elements."""
    if len(payload) != expected:
        raise PayloadError(f"got a payload of {4 * len(payload)} bytes, expected {4 * expected}")


def check_block(block: int, codes: int) -> None:
    """Raise UsageError unless a block fills whole words and is small enough for the cache."""
    if not codes <= block <= 1 << 20 or block % codes:
        raise UsageError(f"block={block}: choose a multiple of {codes} from {codes} to {1 << 20}")


@lru_cache(maxsize=1)
def no_residual() -> Floats:
    """An empty array, which tells kernels that there is no error feedback."""
    return np.empty(0, np.float32)


def words_of(elements: int, block: int, codes: int, heads: int = 1) -> int:
    """The number of words of a payload whose blocks have ``heads`` words of scales, then ``codes`` codes per word."""
    full, rest = divmod(elements, block)
    return full * (heads + -(-block // codes)) + (heads + -(-rest // codes) if rest else 0)


def residual_of(state: State, start: int, elements: int) -> Floats:
    """The residual of ``elements`` elements from ``start`` on; empty without error feedback."""
    return no_residual() if state.residual is None else state.residual[start : start + elements]
