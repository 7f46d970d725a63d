"""Reusable buffers for data without a place of their own, and the addition of data while they arrive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SynclineError
from ..kernels import rows


def _plain(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


class Scratch:
    """A pool of buffers by power-of-two size, at least a page. ``allocated_bytes`` is the size of all ever made.

    ``make`` allocates a buffer.
    """

    def __init__(self, make: Callable[[int], NDArray[np.uint8]] = _plain) -> None:
        self._make = make
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of at least that size. Raises SynclineError if there is no memory for it."""
        size = 1 << max(nbytes - 1, 4095).bit_length()
        with suppress(IndexError):  # not asked beforehand: several threads may take
            return self._free.setdefault(size, []).pop()
        try:
            buffer = self._make(size)
        except (MemoryError, ValueError) as error:  # ValueError: more than any address
            raise SynclineError(f"no memory for {nbytes} bytes on their way: use smaller buckets ({error})") from error
        self.allocated_bytes += size
        return buffer

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.nbytes].append(buffer)


def address_of(array: NDArray[Any]) -> int:
    """The address of an array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


class Adding:
    """Adds arriving bytes to ``into`` (one-dimensional, contiguous, at least as long), piece by piece.

    A piece may end within an element; its first part is then kept at the start of the scratch memory until the rest
    arrives. The ``row`` of the link (``kernels.rows``) records the progress. Element types are those of
    ``kernels.passes.CODES``.
    """

    __slots__ = ("_into", "_keep", "_row", "_scratch", "_streams")

    def __init__(self, into: NDArray[Any], keep: Scratch) -> None:
        from ..kernels import streams  # compiled code: loaded where it is used

        self._streams, self._into, self._keep = streams, into, keep
        self._scratch = keep.take(rows.PIECE_BYTES)

    def begin(self, row: NDArray[np.int64], size: int, come_at: int, nbytes: int) -> None:
        """Start to receive ``size`` bytes, of which ``nbytes`` lie at the address ``come_at`` already."""
        self._row = row
        code, item = _code_of(self._into.dtype)
        into_at, scratch_at = address_of(self._into), address_of(self._scratch)
        self._streams.begin(row, code, item, into_at, size, scratch_at, come_at, nbytes)

    def room(self) -> memoryview:
        """The memory for the next bytes."""
        carried = int(self._row[rows.CARRY])
        return memoryview(self._scratch)[carried : min(carried + int(self._row[rows.LEFT]), rows.PIECE_BYTES)]

    def took(self, nbytes: int) -> None:
        """Add the bytes that were read into ``room``."""
        self._streams.took(self._row, nbytes)

    def close(self) -> None:
        """Return the scratch memory; no more bytes will arrive."""
        self._keep.give(self._scratch)


@cache
def _code_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    from ..kernels.passes import CODES

    return CODES[dtype.name], dtype.itemsize


def can_add(dtype: np.dtype[Any]) -> bool:
    """Whether elements of that type can be added while they arrive."""
    from ..kernels.passes import CODES

    return dtype.isnative and dtype.name in CODES
