"""The layout of the boards by which ranks see each other in shared memory.

Every rank has a *board* in shared memory: a word that says whether it sleeps, and slots, one for each run in progress.
A slot says where the rank's array of that run is and how many operations of its script the rank has finished. It is
kept until all ranks that read it have said that they no longer need it.

A rank never runs out of slots. Those on the board are the first table; the rank adds further tables, each twice as
large as the one before, in other segments whose numbers the board lists. The identity of a run selects ``WAYS`` slots
of each table where it may be, so a search reads few words however many slots there are.

All words have 8 bytes; offsets are in bytes. This file has no kernels, so importing it opens no machine code.
"""

from __future__ import annotations

from typing import Final

# The first word: whether others have to wake this rank.
AWAKE: Final = 0
ASLEEP: Final = 1

CORE: Final = 8
"""The core on which this rank last began a run or waited, counted from 1; 0 before either."""

TABLES: Final = 64
"""The segment number of each further table, 0 while there is none. (Segment 0 is the board itself.)"""
MORE_TABLES: Final = 24
"""Further tables that the board can list. With all of them there are more slots than keys of runs."""
BOARD_HEAD: Final = TABLES + 8 * MORE_TABLES

SLOTS: Final = 64
"""Slots on the board; table k has ``SLOTS << k``."""
SLOT_BYTES: Final = 128
BOARD_BYTES: Final = BOARD_HEAD + SLOTS * SLOT_BYTES
WAYS: Final = 8
SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the highest bits of its products scatter consecutive numbers (Knuth 6.4)."""

# In a slot. The progress has a cache line of its own, because other ranks poll it.
SLOT_ID: Final = 0
SLOT_SEGMENT: Final = 8
SLOT_OFFSET: Final = 16
SLOT_STRIDE: Final = 24
SLOT_NBYTES: Final = 32
SLOT_PROGRESS: Final = 64
SLOT_DONE_WITH: Final = 72
SLOT_SIGN: Final = 80
SIGN_WORDS: Final = 4
"""Words that identify a run. The first two must be equal on all ranks, unless one's first word is 0."""

MOST_SEGMENTS: Final = 1 << 16
"""Exclusive limit of segment numbers, near the usual vm.max_map_count: peers map one area per segment."""
