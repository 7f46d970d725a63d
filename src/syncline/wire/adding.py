"""A message that is added to an array while it comes in, piece by piece.

Pieces may end within an element: what is left of it waits at the beginning of the scratch memory for its rest.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import rows
from .scratch import Scratch, address_of


class Adding:
    """Bytes to come, to be added to ``into`` (one-dimensional, contiguous, at least as long).

    How far it has come is in the ``row`` of the link that it comes over (``kernels.rows``). Element types are those of
    ``kernels.passes.CODES``.
    """

    __slots__ = ("_into", "_keep", "_row", "_scratch", "_streams")

    def __init__(self, into: NDArray[Any], keep: Scratch) -> None:
        from ..kernels import streams  # compiled code: loaded where it is used

        self._streams, self._into, self._keep = streams, into, keep
        self._scratch = keep.take(rows.PIECE_BYTES)

    def begin(self, row: NDArray[np.int64], size: int, come_at: int, nbytes: int) -> None:
        """``size`` bytes come, of which so many lie at an address already."""
        self._row = row
        code, item = _code_of(self._into.dtype)
        into_at, scratch_at = address_of(self._into), address_of(self._scratch)
        self._streams.begin(row, code, item, into_at, size, scratch_at, come_at, nbytes)

    def room(self) -> memoryview:
        """Where the next bytes may be read to."""
        carried = int(self._row[rows.CARRY])
        return memoryview(self._scratch)[carried : min(carried + int(self._row[rows.LEFT]), rows.PIECE_BYTES)]

    def took(self, nbytes: int) -> None:
        """So many bytes were read into ``room``."""
        self._streams.took(self._row, nbytes)

    def close(self) -> None:
        """Give the scratch memory back; nothing more is coming."""
        self._keep.give(self._scratch)


@cache
def _code_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    from ..kernels.passes import CODES

    return CODES[dtype.name], dtype.itemsize


def can_add(dtype: np.dtype[Any]) -> bool:
    """Whether elements of that type can be added while they come in."""
    from ..kernels.passes import CODES

    return dtype.isnative and dtype.name in CODES
