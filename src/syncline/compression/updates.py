"""The weights that this process owns, and how a codec carries their updates to the workers.

Owns where every weight has its owner and the owner's own weights, beside the known ones, which all workers have and in
which their models live. What travels is ``reducers.pulled``'s affair, and what the codec remembers ``compression``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from .compression import Compression, Divided
from .reducers import Held, Operand, Reducer, pulled
from .reducers.owners import share_out

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Owned:
    """Elements ``start`` to ``stop`` of a tensor, and the owner's weights there."""

    tensor: int
    start: int
    stop: int
    weights: Array


class Updates:
    """The updates of one model's weights. ``known`` are the buckets' weights as all workers have them.

    ``owned`` are the ranges of this process, which begins with the known weights; whoever updates them writes into
    their arrays, at no time between ``pieces`` and the end of what these do.
    """

    def __init__(self, compression: Compression, known: Sequence[Array]) -> None:
        self._compression, self._known = compression, known
        self._held: list[list[Held]] = []
        self._pieces: dict[int, Divided] = {}  # made with the first update
        owned: list[Owned] = []
        number_of = {name: number for number, name in enumerate(compression.names)}
        for number in range(compression.buckets):
            mine = self._shares(number)[compression.participant.owner] if compression.participant.owner >= 0 else []
            found = [
                Owned(number_of[part.name], part.start, part.start + part.array.size, part.array.copy())
                for part in mine
            ]
            self._held.append([Held(one.weights, compression.keeps_rest(one.tensor)) for one in found])
            owned += found
        self.owned = tuple(owned)

    @property
    def keeps(self) -> bool:
        """True where an owner's weights may say more than the known ones; the same on all processes."""
        return any(self._compression.keeps_rest(tensor) for tensor in range(len(self._compression.names)))

    def pieces(self, number: int) -> Sequence[Callable[[], Reducer]]:
        """The reducers of a bucket, whose owned weights have been updated."""
        step = self._compression.answered(number)
        warming, made = self._compression.warming(step), self._pieces.get(number)
        if made is None or made.warming != warming:
            made = self._pieces[number] = self._divided(number, step, warming)
        self._compression.tell_step(number, made.parts)
        return made.reducers

    def _divided(self, number: int, step: int, warming: int) -> Divided:
        shares, me = self._shares(number, step), self._compression.participant
        if me.owner >= 0:
            shares[me.owner] = [
                replace(part, held=held) for part, held in zip(shares[me.owner], self._held[number], strict=True)
            ]
        return Divided([part for share in shares for part in share], pulled.pieces(shares, me), warming)

    def _shares(self, number: int, step: int | None = None) -> list[list[Operand]]:
        parts = self._compression.parts(number, self._known[number], step)
        return share_out(parts, len(self._compression.participant.owners))
