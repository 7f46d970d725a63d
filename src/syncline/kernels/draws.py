"""Random numbers, compiled: a hash of the seed and of a number, such as an element's index in its tensor.

Counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: there is no state to carry
along, so that any part of a tensor is encoded alone, in any order and on any processor, with the numbers of the whole.
The hash is C. Wellons' ``lowbias32`` (https://nullprogram.com/blog/2018/07/31/), keyed before each multiplication. It
takes the index modulo 2**32: elements so far apart share their number.
"""

from __future__ import annotations

import numpy as np

from .compiled import inlined, inner

_FIRST = np.uint32(0x7FEB352D)
_SECOND = np.uint32(0x846CA68B)
_UNIT = np.float32(2.0**-24)


@inlined
def draw(index, key, other):
    """32 random bits of an element, all three uint32; ``other`` is ``other_key(key)``."""
    bits = np.uint32(index ^ key)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(16))) * _FIRST)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(15))) + other)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(13))) * _SECOND)
    return np.uint32(bits ^ np.uint32(bits >> np.uint32(16)))


@inner
def other_key(key):
    """The second key that belongs to a seed: without it two seeds would give the same numbers in another order."""
    return draw(np.uint32(0x9E3779B9), key, np.uint32(0))


@inlined
def chance(bits):
    """A float32 in [0, 1), of the upper 24 of 32 random bits."""
    return np.float32(np.int32(np.uint32(bits >> np.uint32(8)))) * _UNIT


@inlined
def below(bits, limit):
    """A whole number from 0 up to, not including, ``limit``, of 32 random bits."""
    return np.int64(np.uint64(np.uint64(bits) * np.uint64(limit)) >> np.uint64(32))
