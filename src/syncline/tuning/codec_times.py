"""The cost of a codec on this machine, measured beside ``np.add``, and the link speed below which it pays.

**Measuring.** Every contestant runs once per repetition, in a rotating order, on one thread. Gradients are normally
distributed and differ between repetitions. If one were repeated, all elements of the residual would end just below a
sparse codec's threshold, as in no real training.

**Does compression pay?** ``CodedAllreduce`` models it: N ranks exchange n elements over links of R bit/s, with one
full-duplex port per rank. Latencies are left out, since they are nearly equal on both sides. Encoding and decoding do
not overlap with sending; a schedule that overlaps them makes compression better than it looks here. Simultaneous
messages take as long as the busiest port. An array that a plan sums sends 2(N-1)/N of its bytes, the lower
bound of an allreduce (Patarasuk, Yuan, JPDC 2009). Adding takes the time of ``np.add`` per byte. For the busiest rank
this gives

    way       payloads sent   encodes    decodes (and adds)   adds of payloads
    summed    2(N-1)/N        1          1                    (N-1)/N
    owners    2(N-1)/N        1 + 1/N    2: N payloads of the own part, and the N parts of the result
    gathered  N-1             1          N
    merged    2 lg N          1          lg N + 1: a merge counts as a decode
    rounds    2(N-1)/N        1          1                    (N-1)/N, as summed

and a few message headers. A link of R bit/s moves an array of b bits in b/R seconds, so compression pays while

    (dense bits - codec's bits) / R  >  codec's computing - dense computing

and the break-even R is the quotient of the two differences. Agarwal et al., "On the utility of gradient compression in
distributed training systems", MLSys 2022, ask the same question and find that compression often does not pay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from .. import registry
from ..codecs import Chooses, Codec, Combine, Floats, NeedsFeedback, Rounds, Wraps, codec_of, warmup_of
from ..codecs.dense import Dense
from ..compression.reducers import Flows, Operand, Way
from ..compression.reducers.ways import WAYS, without_data
from ..nouns import Spec
from ..strategy.grammar import Part, read_part
from ..strategy.words import bind, build, write

ANY_LINK_BIT_PER_S = 1e12
"""Means any link: a codec that computes less than the dense allreduce adds pays at every speed."""

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class CodedAllreduce:
    """An allreduce of ``elements`` float32 whose gradients travel as payloads of ``nbytes``.

    ``encode_s`` and ``decode_s`` (decode and add) are for all elements on one core; ``add_s`` is for adding two dense
    arrays of them. ``way`` is how payloads are combined.
    """

    way: Way
    elements: int
    nbytes: float
    encode_s: float
    decode_s: float
    add_s: float

    @property
    def part(self) -> Operand:
        """All of the gradients, in the form of reducers."""
        spec = Spec("gradient", (self.elements,))
        codec = _Measured(self.combine, self.nbytes / self.elements)
        return without_data(spec.name, codec, spec, 0, self.elements)

    @property
    def combine(self) -> Combine:
        """The ``combine`` that codecs of this way declare."""
        return next(combine for combine, way in WAYS.items() if way is self.way)

    def sent_bits(self, workers: int) -> float:
        """Bits that the busiest port sends, summed over the steps."""
        if self.way.carrier is None:
            return 8 * self.nbytes * 2 * (workers - 1) / workers
        steps = (step for one in self.way.traffic([self.part], workers, range(workers)) for step in one)
        return 8.0 * sum(step.busiest_bytes() for step in steps if isinstance(step, Flows))

    def computing_s(self, workers: int) -> float:
        """Seconds of encoding, decoding and adding on one rank."""
        encodes, decodes, adds = self.way.computing(workers)
        share = self.nbytes / (_FLOAT_BYTES * self.elements)
        return encodes * self.encode_s + decodes * self.decode_s + adds * share * self.add_s

    def pays_below_bit_per_s(self, workers: int) -> float | None:
        """The link speed below which this beats the dense allreduce, at most ``ANY_LINK_BIT_PER_S``; None if never."""
        without = dense(self.elements, self.add_s)
        saved_bits = without.sent_bits(workers) - self.sent_bits(workers)
        extra_s = self.computing_s(workers) - without.computing_s(workers)
        if saved_bits <= 0:
            return None
        if extra_s * ANY_LINK_BIT_PER_S <= saved_bits:
            return ANY_LINK_BIT_PER_S
        return saved_bits / extra_s


def dense(elements: int, add_s: float) -> CodedAllreduce:
    """The allreduce without compression."""
    return CodedAllreduce(WAYS["sum"], elements, _FLOAT_BYTES * elements, 0.0, 0.0, add_s)


@dataclass(frozen=True)
class _Measured(Dense):
    """A stand-in for a codec with a known payload size and way; its payloads can be split anywhere."""

    combine: Combine = "owner"  # type: ignore[misc]  # of one codec here, of the class there
    bytes_per_element: float = _FLOAT_BYTES

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        nbytes = round(self.bytes_per_element * spec.elements)
        return nbytes, nbytes


Timed = Callable[[Floats], tuple[float, ...]]
"""Does its work once on a gradient and returns the seconds of its parts."""

Progress = Callable[[int, int], None]
"""Called with the repetition (from 0; the warm-up is -1) and the contestant that begins."""

REPETITIONS = 5

_SHIFT = 1024
"""The gradients of consecutive repetitions are offset by this many elements in the same random numbers."""

_SCALE = np.float32(0.01)
_LEAST_ELEMENTS = 1 << 20
"""Arrays below this size are processed several times per measurement, to about this many elements."""

_MOST_CALLS = 64

_TRIED_ELEMENTS = 1 << 20
"""A codec counts as compressing if it makes a matrix of this many elements smaller."""


@dataclass(frozen=True)
class CodecTimes:
    """The median times of one codec, with or without error feedback, for arrays of ``elements`` float32.

    ``decode_s`` includes adding to an array. For a codec of several rounds, ``encode_s`` is all computing before the
    last sum over the ranks, and ``decode_s`` the rest. ``nbytes`` is the payload's size, the median if it varies.
    ``np_add_s`` is ``np.add(a, b, out=c)`` in the same run.
    """

    codec: str
    feedback: bool
    combine: Combine
    elements: int
    nbytes: int
    encode_s: float
    decode_s: float
    np_add_s: float

    @property
    def allreduce(self) -> CodedAllreduce:
        """The allreduce with this codec in the model."""
        return CodedAllreduce(
            WAYS[self.combine], self.elements, self.nbytes, self.encode_s, self.decode_s, self.np_add_s
        )


def told(text: str) -> tuple[str, bool]:
    """Split a codec's text into the codec and whether error feedback surrounds it; raises UsageError.

    Error feedback with a warm-up stays in the text.
    """
    part = bind("codecs", read_part(text))
    codec: Codec = build("codecs", part)
    if isinstance(codec, Chooses) or not isinstance(codec, Wraps):
        return write("codecs", part), False
    if warmup_of(codec):
        return write("codecs", part), True
    inner: Part = part[registry.get("codecs", part.name).capabilities["wraps"]]
    return write("codecs", inner), True


def variants(text: str, elements: int) -> tuple[tuple[str, bool], ...]:
    """The uses of a codec that are worth measuring: without error feedback, and with it if it converges then.

    A text that already decides this, like ``feedback(...)``, has one use. Raises UsageError.
    """
    found = ways(text)
    codec: Codec = build("codecs", read_part(found[0][0]))
    return found if _compresses(codec, _matrix(elements)) else found[:1]


def ways(text: str) -> tuple[tuple[str, bool], ...]:
    """The uses of a codec that converge, as in ``variants``, but without the test whether it compresses."""
    name, feedback = told(text)
    codec: Codec = build("codecs", read_part(name))
    if feedback or isinstance(codec, Chooses) or not codec.contraction:
        return ((name, feedback),)
    if isinstance(codec, NeedsFeedback) and codec.needs_feedback:
        return ((name, True),)
    return (name, False), (name, True)


def every_codec(*, choosing: bool = False) -> tuple[str, ...]:
    """The texts of all codecs that compress by themselves, from the examples in their entries.

    With ``choosing`` also the codecs that choose one of the others for every tensor.
    """
    found = []
    for entry in registry.entries("codecs"):
        for text in entry.capabilities.get("examples", (entry.name,)):
            codec = build("codecs", read_part(text))
            leaves_it = not choosing if isinstance(codec, Chooses) else isinstance(codec, Wraps)
            if not leaves_it and _compresses(codec, _matrix(_TRIED_ELEMENTS)):
                found.append(write("codecs", bind("codecs", read_part(text))))
    return tuple(dict.fromkeys(found))


def in_turn(
    contestants: Sequence[Timed], elements: int, repetitions: int, progress: Progress | None = None
) -> list[tuple[float, ...]]:
    """The median seconds of each contestant's parts, by ``rounds_in_turn``."""
    rounds = rounds_in_turn(contestants, elements, repetitions, progress)
    return [tuple(median(part) for part in zip(*found, strict=True)) for found in rounds]


def rounds_in_turn(
    contestants: Sequence[Timed], elements: int, repetitions: int, progress: Progress | None = None
) -> list[list[tuple[float, ...]]]:
    """The seconds of each contestant's parts in every repetition, after an untimed one."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal(elements + _SHIFT * (repetitions + 1), np.float32) * _SCALE
    calls = min(_MOST_CALLS, math.ceil(_LEAST_ELEMENTS / elements))
    times_s: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    for repetition in range(-1, repetitions):
        start = (repetition + 1) * _SHIFT
        x = numbers[start : start + elements]
        for turn in range(len(contestants)):
            place = (max(0, repetition) + turn) % len(contestants)
            if progress is not None:
                progress(repetition, place)
            found = [contestants[place](x) for _ in range(calls if repetition >= 0 else 1)]
            if repetition >= 0:
                times_s[place].append(tuple(fmean(part) for part in zip(*found, strict=True)))
    return times_s


class Addition:
    """``np.add(a, b, out=c)``: the computation of the dense allreduce, and a reference for the speed of memory."""

    def __init__(self, elements: int) -> None:
        self._other = np.ones(elements, np.float32)
        self._out = np.zeros(elements, np.float32)

    def __call__(self, x: Floats) -> tuple[float]:
        """Seconds of one addition."""
        begun = time.perf_counter()
        np.add(x, self._other, out=self._out)
        return (time.perf_counter() - begun,)


class Trial:
    """One codec, with or without error feedback, ready to be timed repeatedly."""

    def __init__(self, text: str, feedback: bool, elements: int) -> None:
        self.text = text
        self._codec, chosen_feedback, _ = codec_of(build("codecs", read_part(text)), _matrix(elements))
        self.feedback = feedback or chosen_feedback
        in_rounds = isinstance(self._codec, Rounds)
        self._spec = _matrix(elements) if in_rounds else Spec("gradient", (elements,))
        self._state = self._codec.init(self._spec, 0, self.feedback)
        self._out = np.zeros(self._spec.elements, np.float32)
        greatest = 0 if in_rounds else self._codec.wire_bytes(self._spec)[1]
        self._payload = np.zeros(greatest // 4, np.uint32)
        self._sizes: list[int] = []

    def __call__(self, x: Floats) -> tuple[float, float]:
        """Seconds of encoding and of decoding one gradient."""
        codec = self._codec
        times_s = self._average(codec, x) if isinstance(codec, Rounds) else self._encode_and_decode(codec, x)
        self._state.step += 1
        return times_s

    @property
    def elements(self) -> int:
        """The number of elements of a gradient that are processed."""
        return self._spec.elements

    def result(self, times_s: tuple[float, ...], np_add_s: float) -> CodecTimes:
        """The result, given the median times."""
        encode_s, decode_s = times_s
        size, combine = round(median(self._sizes)), self._codec.combine
        return CodecTimes(self.text, self.feedback, combine, self.elements, size, encode_s, decode_s, np_add_s)

    def _encode_and_decode(self, codec: Codec, x: Floats) -> tuple[float, float]:
        begun = time.perf_counter()
        words = codec.encode(x, self._payload, self._state).words
        encoded = time.perf_counter()
        codec.decode(self._payload[:words], self._out, self._state, add=True)
        ended = time.perf_counter()
        self._sizes.append(4 * words)
        return encoded - begun, ended - encoded

    def _average(self, codec: Rounds, x: Floats) -> tuple[float, float]:
        """Run the rounds with a single rank, whose arrays are their own sums."""
        np.copyto(self._out, x[: self._out.size])
        size = 0
        begun = last = time.perf_counter()
        for array in codec.average(self._out, self._state, 1):
            last, size = time.perf_counter(), size + array.nbytes
        ended = time.perf_counter()
        self._sizes.append(size)
        return last - begun, ended - last


def _compresses(codec: Codec, spec: Spec) -> bool:
    return codec.wire_bytes(spec)[0] < spec.nbytes


def _matrix(elements: int) -> Spec:
    """A nearly square tensor, for codecs that depend on the shape; slightly smaller if no exact one exists."""
    rows = math.isqrt(elements)
    return Spec("gradient", (rows, elements // rows))
