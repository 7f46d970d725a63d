"""A 64-bit checksum of bytes in memory, at the speed of reading them, in parts of any size.

The words of 32 bits of a block are multiplied with fixed odd random numbers of 64 bits and summed modulo 2^64
(multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). So any change within one
word changes the sum for certain, and other changes fail to do so with a probability of at most 2^-32. One-to-one steps
chain the sums of the blocks. This finds faults of machines, not attackers: the numbers are no secret.

The sum of a block is linear in its bytes. A part may therefore end anywhere, in a word too.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .aot.compiled import inner
from .aot.native import memcpy, view

TOTAL: Final = 0
"""The checksum of all complete blocks."""
_BLOCK: Final = 1
_SIZE: Final = 2
_NUMBERS_AT: Final = 3
_ROOM_AT: Final = 4
_ROOM: Final = 5
_WORDS: Final = 1024
"""Words of a block. Their numbers take 8 KiB, and stay in the first-level cache."""
_BLOCK_BYTES: Final = 4 * _WORDS
STATE_WORDS: Final = _ROOM + _BLOCK_BYTES // 8
_ODD: Final = -7046029254386353131  # 2^64 / golden ratio

_NUMBERS: Final = np.random.Generator(np.random.PCG64(0)).integers(-(2**63), 2**63, _WORDS, np.int64) | 1


def new_state() -> NDArray[np.int64]:
    """A checksum that may be computed at a time."""
    state = np.zeros(STATE_WORDS, np.int64)
    state[_NUMBERS_AT], at = _NUMBERS.ctypes.data, state.ctypes.data
    state[_ROOM_AT] = at + 8 * _ROOM
    return state


@inner
def _chain(total, number):
    """One of the two determines the result for any given other one."""
    mixed = (total ^ number) * np.int64(_ODD)
    return mixed ^ ((mixed >> np.int64(32)) & np.int64(0xFFFFFFFF))


@inner
def start(state, first):
    """Begin a checksum; for another ``first`` it is another one."""
    state[TOTAL] = first
    state[_BLOCK] = 0
    state[_SIZE] = 0


@inner
def more(state, address, nbytes):
    """Go on with ``nbytes`` at ``address``."""
    numbers = view(state[_NUMBERS_AT], np.int64(0), _WORDS)
    while nbytes > 0:
        at = state[_SIZE] % _BLOCK_BYTES
        size, total = np.int64(0), np.int64(0)
        if at % 4 == 0 and nbytes >= 4:
            size = min(nbytes, _BLOCK_BYTES - at) // 4 * 4
            found = address
            if address % 4 != 0:
                found = state[_ROOM_AT]
                memcpy(found, address, size)
            words = view(found, np.uint32(0), size // 4)
            own = numbers[at // 4 : at // 4 + size // 4]
            for i in range(words.size):
                total += own[i] * np.int64(words[i])
        else:
            size = min(nbytes, 4 - at % 4)
            single = view(address, np.uint8(0), size)
            for i in range(size):
                total += numbers[at // 4] * (np.int64(single[i]) << (8 * (at % 4 + i)))
        state[_BLOCK] += total
        state[_SIZE] += size
        address += size
        nbytes -= size
        if state[_SIZE] % _BLOCK_BYTES == 0:
            state[TOTAL] = _chain(state[TOTAL], state[_BLOCK])
            state[_BLOCK] = 0


@inner
def finish(state):
    """The checksum of all bytes since ``start``."""
    return _chain(_chain(state[TOTAL], state[_BLOCK]), state[_SIZE])
