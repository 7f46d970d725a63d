"""Handlers of XLA's foreign function interface: compiled JAX computations put gradients into buckets without Python.

A handler reads its call frame word by word, at the offsets of XLA's C interface (``xla/ffi/api/c_api.h``); the address
of a frame serves as the address of a block of parameters (``aot.compiled``). The first array of every call, and of its
results, is a token of two words: the step, and the address of a table with the words below. So a compiled computation
contains no address, and JAX may cache it and run it in other processes. A handler answers the question for its
interface version and serves executions; it ignores all other stages.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import load, memcpy, store, view, write
from .passes import multiply

# Words of a table.
DONE: Final = 0
"""How many calls have put their gradients into buckets."""
BELL: Final = 1
"""An eventfd that is rung after each such call."""
ASLEEP: Final = 2
"""Whether a thread waits for the bell."""
SHARE: Final = 3
"""The factor of gradients, as a float64; products have the gradients' own type."""
ONE: Final = 4
"""The number 1, which a ring writes to the eventfd."""
TAKES: Final = 5
"""The index of the row of arrays that the computation receives at the end."""
ROWS: Final = 6
"""From here on the index of the row of each call. A row has the number of its arrays, then their columns."""

TYPE: Final = 0
PLACE: Final = 1
ELEMENTS: Final = 2
BYTES: Final = 3
COLUMNS: Final = 4
"""Columns of an array: its element type (``passes.CODES``), its address here, its elements and its bytes."""

MAJOR: Final = 0
MINOR: Final = 1
"""The version of XLA's interface that these offsets belong to."""

_METADATA: Final = 1  # the extension by which XLA asks for the version
_EXECUTE: Final = 3
_FRAME: Final = "(" + ", ".join(["int64"] * 21) + ") -> int64"


@inner
def _word(address):
    return view(address, np.int64(0), 1)[0]


@inner
def _data(buffers, number):
    return _word(_word(buffers + 8 * number) + 24)


@inner
def _is_execution(extension, stage):
    """Whether a frame is an execution. Answers a question for the version."""
    while extension != 0:
        half = view(extension + 8, np.int32(0), 1)
        if half[0] == _METADATA:
            version = view(_word(extension + 24) + 24, np.int32(0), 2)
            version[0] = MAJOR
            version[1] = MINOR
            return False
        extension = _word(extension + 16)
    return stage & 0xFFFFFFFF == _EXECUTE


@inner
def _pass_on(arguments, results):
    """Copy the token to the results; return the table's address in it."""
    token, handed = view(_data(arguments, 0), np.int64(0), 2), view(_data(results, 0), np.int64(0), 2)
    handed[0] = token[0]
    handed[1] = token[1]
    return token[1]


@inner
def _table(extension, stage, arguments, results):
    """The address of a call's table, 0 if the frame is not an execution."""
    if not _is_execution(extension, stage):
        return np.int64(0)
    return _pass_on(arguments, results)


@compiled(_FRAME)
def put(
    _size, extension, _api, _context, stage, _5, _6, _7, _8, arguments, _10, _11, _12, _13, results,
    _15, _16, _17, _18, _19, attributes,
):  # fmt: skip
    """Copy gradients, times the share, to their places in buckets; the attribute numbers the call."""
    at = _table(extension, stage, arguments, results)
    if at == 0:
        return 0
    number = _word(_word(_word(attributes) + 8))
    share = view(at + 8 * SHARE, np.float64(0), 1)[0]
    row = at + 8 * _word(at + 8 * (ROWS + number))
    for k in range(_word(row)):
        one = view(row + 8 + 8 * COLUMNS * k, np.int64(0), COLUMNS)
        source = _data(arguments, k + 1)
        if share == 1.0:
            memcpy(one[PLACE], source, one[BYTES])
        else:
            multiply(one[TYPE], one[PLACE], source, one[ELEMENTS], share)
    store(at + 8 * DONE, number + 1)
    if load(at + 8 * ASLEEP) != 0:
        write(np.int32(_word(at + 8 * BELL)), at + 8 * ONE, 8)
    return 0


@compiled(_FRAME)
def take(
    _size, extension, _api, _context, stage, _5, _6, _7, _8, arguments, _10, _11, _12, _13, results,
    _15, _16, _17, _18, _19, _attributes,
):  # fmt: skip
    """Copy the exchanged arrays to the computation's results."""
    at = _table(extension, stage, arguments, results)
    if at == 0:
        return 0
    row = at + 8 * _word(at + 8 * TAKES)
    for k in range(_word(row)):
        one = view(row + 8 + 8 * COLUMNS * k, np.int64(0), COLUMNS)
        memcpy(_data(results, k + 1), one[PLACE], one[BYTES])
    return 0
