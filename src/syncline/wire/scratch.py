"""Buffers for data that have no place of their own yet, used again and again."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SynclineError


class Scratch:
    """A shelf of buffers by power-of-two size; ``allocated_bytes`` is what was ever made."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """A buffer of at least that size; raises SynclineError where there is no memory for it."""
        size = 1 << max(nbytes - 1, 4095).bit_length()
        with suppress(IndexError):  # not asked beforehand: several threads may take
            return self._free.setdefault(size, []).pop()
        try:
            buffer = np.empty(size, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than any address
            raise SynclineError(f"no memory for {nbytes} bytes on their way: use smaller buckets ({error})") from error
        self.allocated_bytes += size
        return buffer

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Back to the shelf."""
        self._free[buffer.nbytes].append(buffer)


def address_of(array: NDArray[Any]) -> int:
    """Where an array begins in memory."""
    address: int = array.__array_interface__["data"][0]
    return address
