"""Calls out of computations that XLA has compiled, compiled too: gradients into their buckets, without the interpreter.

What XLA hands over is read word by word, by the offsets of its C interface (``xla/ffi/api/c_api.h``): a function in
machine code takes the address of its parameters (``compiled``), and a call's frame is such parameters. The first array
of every call, and of what it gives, are two words: the step, and the address of a table whose words are named below.
So a compiled computation has no address in it, and may be kept and used by other processes. Of what is neither an
execution nor a question for the version nothing is done.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .compiled import compiled, inner
from .native import load, memcpy, store, view, write
from .shares import multiply

# The words of a table.
DONE: Final = 0
"""How many calls have put their gradients into buckets."""
BELL: Final = 1
"""An eventfd that is rung behind each of them."""
ASLEEP: Final = 2
"""Whether somebody waits for it to be."""
SHARE: Final = 3
"""What gradients are multiplied by, as a float64, in the type of each."""
ONE: Final = 4
"""1, which is what a ring writes."""
TAKES: Final = 5
"""Where the row begins that says what is given to the computation at the end."""
ROWS: Final = 6
"""From here on where the row of each call begins: how many arrays, and then the columns of each."""

TYPE: Final = 0
PLACE: Final = 1
ELEMENTS: Final = 2
BYTES: Final = 3
COLUMNS: Final = 4
"""Of an array: its element type (``passes.CODES``), its address here, its elements and bytes."""

MAJOR: Final = 0
MINOR: Final = 1
"""The version of XLA's interface that these offsets are of."""

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
    """Whether a frame is one; where it asks for the version that is told."""
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
    """Hand the two words on; the address among them."""
    token, handed = view(_data(arguments, 0), np.int64(0), 2), view(_data(results, 0), np.int64(0), 2)
    handed[0] = token[0]
    handed[1] = token[1]
    return token[1]


@inner
def _table(extension, stage, arguments, results):
    """The address of a call's table; 0 where a frame is no execution."""
    if not _is_execution(extension, stage):
        return np.int64(0)
    return _pass_on(arguments, results)


@compiled(_FRAME)
def put(
    _size, extension, _api, _context, stage, _5, _6, _7, _8, arguments, _10, _11, _12, _13, results,
    _15, _16, _17, _18, _19, attributes,
):  # fmt: skip
    """Put gradients into their places, multiplied by the share; the attribute says which call this is."""
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
    """Give the computation what has come."""
    at = _table(extension, stage, arguments, results)
    if at == 0:
        return 0
    row = at + 8 * _word(at + 8 * TAKES)
    for k in range(_word(row)):
        one = view(row + 8 + 8 * COLUMNS * k, np.int64(0), COLUMNS)
        memcpy(_data(results, k + 1), one[PLACE], one[BYTES])
    return 0
