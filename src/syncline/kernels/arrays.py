"""Where NumPy's arrays lie, read out of the array objects, compiled.

Python asks an array for its address in a microsecond or two, longer than a small kernel runs. It stands in the object:
the fields of ``PyArrayObject`` (numpy/ndarraytypes.h) have been the same in all versions, since extensions are compiled
against them. Nothing is followed before the fields in front of it have been found to be what they are said to be.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .marks import machine_code
from .native import load, view

DATA: Final = 16
NDIM: Final = 24
SHAPE: Final = 32
DTYPE: Final = 56
FLAGS: Final = 64

USABLE: Final = 0x501
"""The flags C-contiguous, aligned, and writable."""

COLUMNS: Final = 3
"""Of the table of arrays: which word of the block, how many dimensions, and the address of the type's object."""


@machine_code("(int64, int64, int64) -> bool")
def spread(block, table, count):
    """Replace the addresses of array objects in a block by where their elements lie and their shapes, as in a call.

    False when one of them is not as the table says.
    """
    words = view(block, np.int64(0), 1 << 16)
    for i in range(count):
        row = table + 8 * COLUMNS * i
        place, dims = load(row), load(row + 8)
        array = words[place]
        numbers = view(array, np.int32(0), 32)
        usable = np.int64(numbers[FLAGS // 4]) & USABLE
        if np.int64(numbers[NDIM // 4]) != dims or load(array + DTYPE) != load(row + 16) or usable != USABLE:
            return False
        shape = view(load(array + SHAPE), np.int64(0), dims)
        for axis in range(dims):
            words[place + 1 + axis] = shape[axis]
        words[place] = load(array + DATA)
    return True
