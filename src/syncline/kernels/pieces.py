"""Adds the pieces of a message while they are still in the cache, compiled.

Pieces may end within an element: the rest of it is carried over at the beginning of the scratch memory.
"""

from __future__ import annotations

from typing import Final

from .compiled import compiled
from .native import memcpy
from .passes import add_block

PIECE_BYTES: Final = 256 * 1024
"""What is received at a time where it is added: it has to stay in the second-level cache until it is."""


@compiled("(int64, int64, int64, int64, int64) -> int64")
def absorb(code, item, into, scratch, have):
    """Add the whole elements among ``have`` bytes of scratch, keep the rest at its beginning; the bytes added."""
    whole = have // item * item
    add_block(code, into, scratch, whole // item)
    if whole < have:
        memcpy(scratch, scratch + whole, have - whole)
    return whole
