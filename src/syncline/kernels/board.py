"""The words by which ranks see each other in shared memory: where what is on a board.

Every rank has a *board* in shared memory: a word that says whether it sleeps, and slots, one for each run under way. A
slot tells where the rank's array of that run lies, and how many operations of its script it has done; it
is kept until all ranks that look at it have said that they need it no more.

All words have 8 bytes; offsets are bytes.
"""

from __future__ import annotations

from typing import Final

# The first word: what has to ring this rank.
AWAKE: Final = 0
ASLEEP: Final = 1
"""What it waits for."""
SHORT: Final = 2
"""That, and whoever needs one of its slots no more."""

BOARD_HEAD: Final = 128

SLOTS: Final = 64
SLOT_BYTES: Final = 128
BOARD_BYTES: Final = BOARD_HEAD + SLOTS * SLOT_BYTES

# In a slot. The progress has a cache line of its own: others watch it.
SLOT_ID: Final = 0
SLOT_SEGMENT: Final = 8
SLOT_OFFSET: Final = 16
SLOT_STRIDE: Final = 24
SLOT_NBYTES: Final = 32
SLOT_PROGRESS: Final = 64
SLOT_DONE_WITH: Final = 72
