"""A message that is added to an array while it comes in, piece by piece.

Pieces may end within an element: what is left of it waits at the beginning of the scratch memory for its rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .scratch import Scratch


class Adding:
    """``size`` bytes to come, to be added to ``into`` (one-dimensional, contiguous, at least as long).

    ``at`` is the address of the next element, ``left`` the bytes that have not come, ``carry`` those that wait in
    ``scratch``. Element types are those of ``kernels.passes.CODES``.
    """

    __slots__ = ("_into", "_keep", "_kernel", "at", "carry", "code", "item", "left", "scratch", "scratch_at")

    def __init__(self, into: NDArray[Any], size: int, keep: Scratch) -> None:
        from ..kernels import passes, pieces  # compiled code: loaded where it is used

        self._kernel, self._into, self._keep = pieces, into, keep
        self.code, self.item = passes.CODES[into.dtype.name], into.itemsize
        self.at: int = into.__array_interface__["data"][0]
        self.left, self.carry = size, 0
        self.scratch = keep.take(pieces.PIECE_BYTES)
        self.scratch_at: int = self.scratch.__array_interface__["data"][0]

    def room(self) -> memoryview:
        """Where the next bytes may be read to."""
        return memoryview(self.scratch)[self.carry : min(self.carry + self.left, self._kernel.PIECE_BYTES)]

    def took(self, nbytes: int) -> None:
        """So many bytes were read into ``room``."""
        have = self.carry + nbytes
        added = self._kernel.absorb(self.code, self.item, self.at, self.scratch_at, have)
        self.at += added
        self.left -= nbytes
        self.carry = have - added

    def feed(self, data: memoryview) -> None:
        """Add bytes that lie elsewhere."""
        while data.nbytes:
            room = self.room()
            size = min(room.nbytes, data.nbytes)
            room[:size] = data[:size]
            self.took(size)
            data = data[size:]

    def close(self) -> None:
        """Give the scratch memory back; nothing more is coming."""
        self._keep.give(self.scratch)


def can_add(dtype: np.dtype[Any]) -> bool:
    """Whether elements of that type can be added while they come in."""
    from ..kernels.passes import CODES

    return dtype.name in CODES
