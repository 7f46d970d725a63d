"""Does compression pay? Seconds of an allreduce with and without a codec, and the link speed where they are equal.

Owns the model and nothing else: what a codec costs is measured elsewhere and handed in as numbers, and what travels and
is computed is what the way says of itself in which payloads become one (``compression.reducers``).

Theory. N ranks exchange n elements over links of R bit/s, one full-duplex port per rank. Latencies are left out, since
they are nearly the same on both sides. Encoding and decoding stand before and after the sending; what a schedule
overlaps makes compression better than it looks here. Messages that travel at the same time take as long as the busiest
port carries them, and what is summed, gradients or payloads, 2(N-1)/N of the array, below which no allreduce gets
(Patarasuk, Yuan, JPDC 2009). Adding takes as long as ``np.add``, per byte. For the busiest rank that makes

    way       payloads sent   encodes    decodes (and adds)   adds of payloads
    summed    2(N-1)/N        1          1                    (N-1)/N
    owners    2(N-1)/N        1 + 1/N    2: N payloads of the own part, and the N parts of the result
    gathered  N-1             1          N
    merged    2 lg N          1          lg N + 1: a merge counts as a decode
    rounds    2(N-1)/N        1          1                    (N-1)/N, as summed

and some heads of messages. A link of R bit/s moves an array of b bits in b/R seconds, so compression pays while

    (dense bits - codec's bits) / R  >  codec's computing - dense computing

and the right R is the quotient of the two differences. Agarwal et al., "On the utility of gradient compression in
distributed training systems", MLSys 2022, ask the same question and find that it often does not pay.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..codecs import Combine
from ..codecs.dense import Dense
from ..compression.reducers import Flows, Operand, Way
from ..compression.reducers.ways import WAYS
from ..compression.traffic import without_data
from ..nouns import Spec

ANY_LINK_BIT_PER_S = 1e12
"""Stands for any link: with a codec that computes less than the dense allreduce adds, no speed is too much."""

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class CodedAllreduce:
    """An allreduce of ``elements`` float32 whose gradients travel as payloads of ``nbytes``.

    ``encode_s`` and ``decode_s`` (decode and add) are of all elements on one core, ``add_s`` is that of adding two
    dense arrays of them. ``way`` is how payloads become one.
    """

    way: Way
    elements: int
    nbytes: float
    encode_s: float
    decode_s: float
    add_s: float

    @property
    def part(self) -> Operand:
        """All of the gradients, as reducers see them."""
        spec = Spec("gradient", (self.elements,))
        codec = _Measured(self.combine, self.nbytes / self.elements)
        return without_data(spec.name, codec, spec, 0, self.elements)

    @property
    def combine(self) -> Combine:
        """What a codec of this way declares."""
        return next(combine for combine, way in WAYS.items() if way is self.way)

    def sent_bits(self, workers: int) -> float:
        """Bits that the busiest ports carry, in one direction, one step after the other."""
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
        """The link speed below which this is faster than the dense allreduce; None when it is nowhere.

        Never more than ``ANY_LINK_BIT_PER_S``.
        """
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
    """Stands for a codec of which the size and the way of payloads are known and nothing else; to be cut anywhere."""

    combine: Combine = "owner"  # type: ignore[misc]  # of one codec here, of the class there
    bytes_per_element: float = _FLOAT_BYTES

    def wire_bytes(self, spec: Spec) -> tuple[int, int]:
        nbytes = round(self.bytes_per_element * spec.elements)
        return nbytes, nbytes
