"""The words by which ranks see each other in shared memory: where what is on a board.

Every rank has a *board* in shared memory: a word that says whether it sleeps, and slots, one for each run under way. A
slot tells where the rank's array of that run lies, and how many operations of its script it has done; it
is kept until all ranks that look at it have said that they need it no more.

There are always enough slots. Those on the board are the first table; the rank adds tables, each twice as large as the
one before, in other segments, whose numbers the board names. A run may lie in ``WAYS`` slots of each table, which
follow from its identity: whoever looks for a run that is not there looks at a few words only, however many there are.

All words have 8 bytes; offsets are bytes.
"""

from __future__ import annotations

from typing import Final

# The first word: whether this rank has to be rung.
AWAKE: Final = 0
ASLEEP: Final = 1

CORE: Final = 8
"""The core on which this rank last began a run or waited, counted from 1; 0 while it has done neither."""

TABLES: Final = 64
"""The segment number of each further table, 0 while there is none (the board itself has that number)."""
MORE_TABLES: Final = 24
"""With all of them there are more slots than keys of runs."""
BOARD_HEAD: Final = TABLES + 8 * MORE_TABLES

SLOTS: Final = 64
"""Slots on the board; table k has SLOTS << k."""
SLOT_BYTES: Final = 128
BOARD_BYTES: Final = BOARD_HEAD + SLOTS * SLOT_BYTES
WAYS: Final = 8
SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 by the golden ratio: the highest bits of its products scatter numbers that follow each other (Knuth 6.4)."""

# In a slot. The progress has a cache line of its own: others watch it.
SLOT_ID: Final = 0
SLOT_SEGMENT: Final = 8
SLOT_OFFSET: Final = 16
SLOT_STRIDE: Final = 24
SLOT_NBYTES: Final = 32
SLOT_PROGRESS: Final = 64
SLOT_DONE_WITH: Final = 72
SLOT_SIGN: Final = 80
SIGN_WORDS: Final = 4
"""What a run is for, in words: the first two are those of all ranks, unless a rank's first one is 0; the rest tells."""

MOST_SEGMENTS: Final = 1 << 16
"""The number of each is smaller. A process may map about as many areas (vm.max_map_count); with as many its peers would
have no room left."""
