"""Does compression pay? Seconds of an allreduce with and without a codec, and the link speed where they are equal.

Owns the model and nothing else: what a codec costs is measured elsewhere and handed in as numbers.

Theory. N ranks exchange n elements over links of R bit/s, one full-duplex port per rank. Latencies are left out, since
they are nearly the same on both sides. Encoding and decoding stand before and after the sending; what a schedule
overlaps makes compression better than it looks here. Dense, every rank sends 2(N-1)/N arrays of 32 bits per element and
adds (N-1)/N of one. With a codec, by how its payloads combine:

    combine   payloads sent   encodes    decodes (and adds)   adds of payloads
    sum       2(N-1)/N        1          1                    (N-1)/N, at the cost of ``np.add`` per byte
    owner     2(N-1)/N        1 + 1/N    2: N payloads of the own part, and the N parts of the result
    gather    N-1             1          N
    merge     2 lg N          1          lg N + 1: a merge counts as a decode
    rounds    2(N-1)/N        1          1                    (N-1)/N, as sum

A link of R bit/s moves an array of b bits in b/R seconds, so compression pays while

    (dense bits - codec's bits) / R  >  codec's computing - dense computing

and the right R is the quotient of the two differences. Agarwal et al., "On the utility of gradient compression in
distributed training systems", MLSys 2022, ask the same question and find that it often does not pay.
"""

from __future__ import annotations

from dataclasses import dataclass

ANY_LINK_BIT_PER_S = 1e12
"""Stands for any link: with a codec that computes less than the dense allreduce adds, no speed is too much."""

_FLOAT_BITS = 32


@dataclass(frozen=True)
class Exchange:
    """An allreduce of ``elements`` float32 whose gradients travel as payloads of ``nbytes``.

    ``encode_s`` and ``decode_s`` (decode and add) are of all elements on one core, ``add_s`` is that of adding two
    dense arrays of them. ``combine`` is how payloads become one.
    """

    combine: str
    elements: int
    nbytes: float
    encode_s: float
    decode_s: float
    add_s: float

    def sent_bits(self, workers: int) -> float:
        """Bits that the busiest rank sends."""
        sends = {"gather": workers - 1.0, "merge": 2.0 * _levels(workers)}
        return 8 * self.nbytes * sends.get(self.combine, 2 * _others(workers))

    def computing_s(self, workers: int) -> float:
        """Seconds of encoding, decoding and adding on one rank."""
        if self.combine == "owner":
            return self.encode_s * (1 + 1 / workers) + 2 * self.decode_s
        if self.combine == "gather":
            return self.encode_s + workers * self.decode_s
        if self.combine == "merge":
            return self.encode_s + (_levels(workers) + 1) * self.decode_s
        share = 8 * self.nbytes / (_FLOAT_BITS * self.elements)
        return self.encode_s + self.decode_s + _others(workers) * share * self.add_s

    def allreduce_s(self, workers: int, bit_per_s: float) -> float:
        """Seconds of the whole allreduce over links of that speed."""
        return self.sent_bits(workers) / bit_per_s + self.computing_s(workers)

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


def dense(elements: int, add_s: float) -> Exchange:
    """The allreduce without compression."""
    return Exchange("sum", elements, 4 * elements, 0.0, 0.0, add_s)


def _others(workers: int) -> float:
    """The share of an array that belongs to the other ranks."""
    return (workers - 1) / workers


def _levels(workers: int) -> int:
    """The levels of a binomial tree over the workers."""
    return (workers - 1).bit_length()
