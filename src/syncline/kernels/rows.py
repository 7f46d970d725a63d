"""The layout of a socket's row, which ``wire.links`` fills in and ``streams`` works on.

This file has no kernels, so importing it opens no machine code.
"""

from __future__ import annotations

from typing import Final

FD: Final = 0
"""The descriptor of the socket."""
INTO: Final = 1
"""The address where the next bytes of a body are written or added."""
LEFT: Final = 2
"""Bytes of the body that have not arrived; nothing is read while this is 0."""
RECEIVED: Final = 3
"""Bytes read since the row was made."""
CODE: Final = 4
"""The type of the elements to add (``passes.CODES``), or ``AS_IS`` to write bytes unchanged."""
ITEM: Final = 5
"""Bytes of an element."""
SCRATCH: Final = 6
"""The address of ``PIECE_BYTES`` of memory that hold bytes until they are added."""
CARRY: Final = 7
"""Bytes at the beginning of the scratch memory that belong to an incomplete element."""
OUT: Final = 8
"""The address of the next bytes to write."""
OUT_LEFT: Final = 9
"""Bytes left to write."""
SUM_IN: Final = 10
"""The address of the checksum of the body that arrives (``checksums``), 0 for none."""
SUM_OUT: Final = 11
"""The address of the checksum of the bytes that are written, 0 for none."""
WORDS: Final = 12

AS_IS: Final = -1

PIECE_BYTES: Final = 256 * 1024
"""Most bytes received at a time if they are added: they have to stay in the second-level cache until then."""

COMPLETE: Final = 1
OPEN: Final = 0
NOTHING: Final = -1
"""Results of moving bytes: COMPLETE when the body is done, OPEN when more is to come, NOTHING when none moved."""
