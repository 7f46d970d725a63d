"""Codecs: array <-> payload, one file per family.

A codec turns the gradient of one tensor into a payload and back. It declares how payloads combine, what it must not be
cut across and whether error feedback may stand around it. It knows nothing of buckets, plans, ranks in flight or
transports: ``compression.reducers`` moves payloads. Everything a codec remembers between steps is in a ``State`` that
its caller keeps per parameter name.

Gradients are one-dimensional contiguous float32 arrays; payloads are one-dimensional contiguous arrays of uint32 words,
which keeps every part of them aligned.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019) is the ``residual`` of a state: where
there is one, ``encode`` sends ``x + residual`` and leaves in ``residual`` what the payload does not say, in the same
pass over memory. After it ``decode(payload) + residual == x + residual before``, up to the rounding of one subtraction.

What is not finite is never compressed: a tensor (or block) with a NaN or infinity gets a payload that decodes to
something that is not finite, its residual stays as it was, and ``Encoded.finite`` is False.
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
"""How the payloads of the ranks become one:

    sum     payloads are arrays of numbers of one type that may be added: any allreduce plan carries them
    owner   the owner of a part decodes and adds all ranks' payloads, and encodes the sum again
    gather  every rank gets all payloads and adds them up
    merge   two payloads can be merged into one of the same size: they meet on a tree
    rounds  the codec itself alternates between computing and sums over the ranks (``Rounds``)
"""


class PayloadError(SynclineError):
    """A payload that cannot be what the codec made: altered on the wire, or made by another codec."""


class Encoded(NamedTuple):
    """What ``encode`` has made: words of the payload, and whether the input was finite."""

    words: int
    finite: bool


@dataclass
class State:
    """What a codec remembers of one tensor on one rank; all of it belongs in a checkpoint.

    ``residual`` (elements, float32) is None without error feedback. ``memory`` holds further arrays of the codec's own,
    by name. ``step`` counts the exchanges and is the same on all ranks. ``world`` is the number of ranks.
    """

    spec: Spec
    rank: int
    residual: Floats | None = None
    step: int = 0
    memory: dict[str, Floats] = field(default_factory=dict)
    world: int = 1

    def seed(self, shared: bool = False) -> int:
        """32 random bits of this tensor and step; other ones on every rank unless ``shared``."""
        text = f"{self.spec.name} {self.step} {'all' if shared else self.rank}"
        return zlib.crc32(text.encode(errors="surrogatepass"))


class Codec(Protocol):
    """One way to compress. Implementations are frozen dataclasses whose fields are the arguments of the text.

    A payload's length and content depend on the tensor and the state alone. Where ``block`` is positive, a tensor may
    be encoded in parts that begin at multiples of it, and the payloads are those of the whole, one behind the other.
    """

    @property
    def combine(self) -> Combine:
        """How the payloads of the ranks become one."""
        ...

    @property
    def block(self) -> int:
        """Elements that belong together, counted from the tensor's first one; 0: the whole tensor."""
        ...

    @property
    def contraction(self) -> bool:
        """True when decode(encode(x)) is nearer to x than 0 is (in the mean): what error feedback needs to converge."""
        ...

    @property
    def biased(self) -> bool:
        """True when the mean of decode(encode(x)) is not x.

        A biased contraction gets error feedback unless the strategy says otherwise.
        """
        ...

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        """The expected and the greatest number of payload bytes of a tensor, without encoding it.

        They are equal for codecs of fixed size.
        """
        ...

    def init(self, spec: Spec, rank: int, feedback: bool = False) -> State:
        """The state of a tensor before its first step; with a residual of zeros when there is error ``feedback``."""
        ...

    def encode(self, x: Floats, out: Payload, state: State, start: int = 0) -> Encoded:
        """Compress elements ``start`` on of a tensor into ``out``, which has room for the greatest payload.

        One pass over memory; ``x`` is left alone, the state's residual is updated in place.
        """
        ...

    def decode(self, payload: Payload, out: Floats, state: State, *, add: bool = False, start: int = 0) -> None:
        """Write to ``out`` what a payload says of elements ``start`` on, or add it to what is there.

        Raises PayloadError for a payload that ``encode`` cannot have made; nothing outside ``out`` is ever written.
        """
        ...


@runtime_checkable
class Sums(Protocol):
    """A codec whose payloads may be added (``combine`` is sum): as arrays of that type of number."""

    @property
    def number(self) -> str:
        """The numpy (or ml_dtypes) name of the type."""
        ...


@runtime_checkable
class Merges(Protocol):
    """A codec whose payloads become one of the same size: ``combine`` is "merge"."""

    def merge(self, mine: Payload, theirs: Payload, out: Payload, state: State) -> int:
        """Write the sum of two payloads, as far as one can say it, to ``out``; returns its words.

        What it cannot say goes into the state's residual, if there is one. Raises PayloadError for a payload that
        ``encode`` and ``merge`` cannot have made; then nothing has been changed.
        """
        ...


@runtime_checkable
class Rounds(Protocol):
    """A codec that computes between sums over the ranks: ``combine`` is "rounds"; it is never asked to encode."""

    def average(self, x: Floats, state: State, world: int) -> Generator[Floats, None, bool]:
        """Replace ``x``, this rank's share of the mean of a tensor's gradients, by the sum over all ranks.

        Each array that is yielded is to be replaced, in place, by its sum over the ranks, the same bits on all of them;
        how many there are and their sizes follow from the tensor alone (``rounds``). ``x`` is the room of the work, and
        has the result at the end, the same bits on all ranks. Returns whether this rank's own input was finite.
        """
        ...

    def rounds(self, spec: Spec) -> Sequence[int]:
        """The elements of each array that ``average`` yields for a tensor, in order."""
        ...


@runtime_checkable
class NeedsFeedback(Protocol):
    """A codec that may not do without error feedback."""

    @property
    def needs_feedback(self) -> bool:
        """True when its arguments make it so."""
        ...


@runtime_checkable
class Sparse(Protocol):
    """A codec that sends some of a tensor's elements in each step."""

    def ratio_at(self, step: int) -> float:
        """The share that is sent at a step, counted from 0."""
        ...


@runtime_checkable
class LeavesOut(Protocol):
    """A codec, not ``Sparse``, that may say nothing of most of a tensor in one exchange."""

    @property
    def leaves_out(self) -> bool:
        """True when its arguments make it so: what error feedback keeps can be larger than what comes."""
        ...


@runtime_checkable
class Decays(Protocol):
    """A codec whose residual keeps only a part, ``decay``, of what was not sent; all of it where that is 1."""

    @property
    def decay(self) -> float:
        """Above 0 and up to 1."""
        ...


@runtime_checkable
class Chooses(Protocol):
    """A codec that leaves every tensor to another one."""

    def choose(self, spec: Spec) -> Codec:
        """The codec of a tensor."""
        ...


@runtime_checkable
class Wraps(Protocol):
    """A codec that stands around another one: error feedback."""

    codec: Codec


def warmup_of(codec: Codec) -> int:
    """For how many steps at most a codec leaves tensors uncompressed: the ``warmup`` of the error feedback in it."""
    if not isinstance(codec, Wraps):
        return 0
    return max(getattr(codec, "warmup", 0), warmup_of(codec.codec))


@runtime_checkable
class Relays(Protocol):
    """A codec that does more to a rank's gradients than compress them: owners, who pass on sums, use another one."""

    @property
    def relay(self) -> Codec:
        """The same without that."""
        ...


def relay_of(codec: Codec) -> Codec:
    """The codec in which an owner passes on what it has summed or updated."""
    return codec.relay if isinstance(codec, Relays) else codec


@runtime_checkable
class Stochastic(Protocol):
    """A codec that can round at random."""

    @property
    def stochastic(self) -> bool:
        """True when it does, so that the mean of decode(encode(x)) over the seeds is x."""
        ...


class Applied(NamedTuple):
    """The codec that a tensor really gets, whether with error feedback, and for how many steps not yet."""

    codec: Codec
    feedback: bool
    warmup: int


def codec_of(codec: Codec, spec: Spec) -> Applied:
    """What ``codec`` means for a tensor."""
    found = Applied(codec, False, 0)
    while True:
        codec = found.codec
        if isinstance(codec, Chooses):  # first: what it chooses from may be called ``codec`` too
            found = Applied(codec.choose(spec), False, 0)
        elif isinstance(codec, Wraps):
            found = Applied(codec.codec, True, getattr(codec, "warmup", 0))
        else:
            return found


def fresh_state(spec: Spec, rank: int, feedback: bool, **memory: Any) -> State:
    """A state with a residual of zeros, if any, and further arrays."""
    residual = np.zeros(spec.elements, np.float32) if feedback else None
    return State(spec, rank, residual, memory=memory)


def check_words(payload: Payload, expected: int) -> None:
    """Raise PayloadError unless a payload has exactly as many words as its codec makes for that many elements."""
    if len(payload) != expected:
        raise PayloadError(f"a payload of {4 * len(payload)} bytes came where {4 * expected} were expected")


def check_block(block: int, codes: int) -> None:
    """Raise UsageError unless a block has a whole number of words, and so few elements that they stay in the cache."""
    if not codes <= block <= 1 << 20 or block % codes:
        raise UsageError(f"block={block}: choose a multiple of {codes} from {codes} to {1 << 20}")


@lru_cache(maxsize=1)
def no_residual() -> Floats:
    """How kernels are told that there is no error feedback: an empty array."""
    return np.empty(0, np.float32)


def words_of(elements: int, block: int, codes: int, heads: int = 1) -> int:
    """The words of a payload whose blocks have ``heads`` words of scales and then ``codes`` codes to the word."""
    full, rest = divmod(elements, block)
    return full * (heads + -(-block // codes)) + (heads + -(-rest // codes) if rest else 0)


def residual_of(state: State, start: int, elements: int) -> Floats:
    """The residual of ``elements`` elements from ``start`` on; empty when there is no error feedback."""
    return no_residual() if state.residual is None else state.residual[start : start + elements]
