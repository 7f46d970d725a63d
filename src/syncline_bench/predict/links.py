"""Links: how long a message occupies a port, by its size, and how much later it has arrived.

Owns what numbers say of one link. Does not know who sends, what is shared (``topology``) or where the numbers come from
(``cluster``).

Theory. A message of n bytes occupies the sender's and the receiver's port for a + n b seconds (Hockney, "The
communication challenge for MPP", Parallel Computing 1994), with constants of their own for each range of sizes, since
libraries change protocols. It is there ``flight_s`` after that, during which both ports serve others.

LogGP (Alexandrov, Ionescu, Schauser, Scheiman, SPAA 1995) is the same with other words: sender and receiver spend o
each, a port begins a message max(o, g) + (n-1) G after the one before it, and a message of n bytes alone takes
o + (n-1) G + L + o. So a port is busy for max(o, g) + (n-1) G, and the flight is what is left: L + 2 o - max(o, g).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """What messages of ``from_bytes`` and more take: ``busy_s``, and ``per_byte_s`` times the bytes."""

    from_bytes: float
    busy_s: float
    per_byte_s: float


@dataclass(frozen=True)
class Link:
    """A full-duplex link between two ports; ``pieces`` ascend by size and begin at 0.

    Raises UsageError for pieces that do not, and for numbers that are negative or not finite.
    """

    pieces: tuple[Piece, ...]
    flight_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.flight_s, *(number for piece in self.pieces for number in (piece.busy_s, piece.per_byte_s))]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise UsageError(f"the seconds of a link are finite and not negative, got {self}")
        starts = [piece.from_bytes for piece in self.pieces]
        if not starts or starts[0] != 0 or any(low >= high for low, high in pairwise(starts)):
            raise UsageError(f"the pieces of a link begin at 0 bytes and ascend, got {starts}: sort them")

    @classmethod
    def linear(cls, alpha_s: float, beta_s_per_byte: float, flight_s: float = 0.0) -> Link:
        """Alpha seconds for each message and beta for each byte, of every size."""
        return cls((Piece(0, alpha_s, beta_s_per_byte),), flight_s)

    @overload
    def busy_s(self, nbytes: float) -> float: ...
    @overload
    def busy_s(self, nbytes: Floats) -> Floats: ...
    def busy_s(self, nbytes: float | Floats) -> float | Floats:
        """Seconds that a message of so many bytes occupies a port; of an array, those of each."""
        if isinstance(nbytes, np.ndarray):
            fixed_s, per_byte_s = self.constants(nbytes)
            return fixed_s + nbytes * per_byte_s
        found_piece = self.piece(nbytes)
        return found_piece.busy_s + nbytes * found_piece.per_byte_s

    @overload
    def bytes_s(self, nbytes: float) -> float: ...
    @overload
    def bytes_s(self, nbytes: Floats) -> Floats: ...
    def bytes_s(self, nbytes: float | Floats) -> float | Floats:
        """The part of ``busy_s`` that is the bytes', which gets longer where a link is shared."""
        if isinstance(nbytes, np.ndarray):
            return nbytes * self.constants(nbytes)[1]
        return nbytes * self.piece(nbytes).per_byte_s

    def constants(self, nbytes: Floats) -> tuple[Floats, Floats]:
        """Of messages of these sizes the seconds of each, and those of a byte of each."""
        starts, fixed_s, per_byte_s = self._columns
        piece = np.searchsorted(starts, nbytes, side="right") - 1
        return fixed_s[piece], per_byte_s[piece]

    def piece(self, nbytes: float) -> Piece:
        """The piece that messages of a size belong to."""
        return next(piece for piece in reversed(self.pieces) if piece.from_bytes <= nbytes)

    @cached_property
    def _columns(self) -> tuple[Floats, Floats, Floats]:
        rows = np.array([(piece.from_bytes, piece.busy_s, piece.per_byte_s) for piece in self.pieces], np.float64)
        return rows[:, 0], rows[:, 1], rows[:, 2]


def loggp(latency_s: float, overhead_s: float, gap_s: float, gap_s_per_byte: float) -> Link:
    """The link of LogGP's L, o, g and G.

    Raises UsageError where a byte takes longer than a message's overhead, or a gap longer than a message's flight.
    """
    busy_s = max(overhead_s, gap_s) - gap_s_per_byte
    flight_s = latency_s + 2 * overhead_s - max(overhead_s, gap_s)
    if busy_s < 0 or flight_s < 0:
        raise UsageError(
            f"LogGP with L={latency_s:g}, o={overhead_s:g}, g={gap_s:g}, G={gap_s_per_byte:g} needs G <= max(o, g) and"
            " max(o, g) <= L + 2o"
        )
    return Link.linear(busy_s, gap_s_per_byte, flight_s)


def piecewise(rows: Sequence[tuple[float, float, float]], flight_s: float = 0.0) -> Link:
    """A link from rows (from bytes, seconds per message, seconds per byte), in any order."""
    return Link(tuple(Piece(*row) for row in sorted(rows)), flight_s)
