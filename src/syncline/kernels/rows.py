"""What a socket's row of words holds, for ``streams`` and for the links whose rows they are."""

from __future__ import annotations

from typing import Final

FD: Final = 0
"""The socket."""
INTO: Final = 1
"""Where the next bytes of a body go, or are added: an address."""
LEFT: Final = 2
"""Bytes of the body that have not come; nothing is read while there are none."""
RECEIVED: Final = 3
"""Bytes read, in all."""
CODE: Final = 4
"""The type of the elements that are added (``passes.CODES``), or ``AS_IS``."""
ITEM: Final = 5
"""Bytes of an element."""
SCRATCH: Final = 6
"""Memory for what is to be added, ``PIECE_BYTES`` of it: an address."""
CARRY: Final = 7
"""Bytes of an element that wait at the beginning of the scratch memory for its rest."""
OUT: Final = 8
"""What is written next: an address."""
OUT_LEFT: Final = 9
"""How many bytes of it are left."""
WORDS: Final = 10

AS_IS: Final = -1

PIECE_BYTES: Final = 256 * 1024
"""What is received at a time where it is added: it has to stay in the second-level cache until it is."""

COMPLETE: Final = 1
OPEN: Final = 0
NOTHING: Final = -1
"""What moving bytes came to: all of a body is there, more is to come, not a byte moved."""
