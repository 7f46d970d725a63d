"""Random numbers as a hash of a seed and a number, such as an element's index in its tensor.

They are counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Without a state to
carry along, any part of a tensor can be encoded alone, in any order and on any processor, with the same numbers. The
hash is C. Wellons' ``lowbias32`` (https://nullprogram.com/blog/2018/07/31/) with a key before each multiplication. It
takes the index modulo 2**32, so elements 2**32 apart share their number.
"""

from __future__ import annotations

import numpy as np

from .aot.compiled import inlined, inner

_FIRST = np.uint32(0x7FEB352D)
_SECOND = np.uint32(0x846CA68B)
_UNIT = np.float32(2.0**-24)


@inlined
def draw(index, key, other):
    """32 random bits for an element. All arguments are uint32; ``other`` is ``other_key(key)``."""
    bits = np.uint32(index ^ key)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(16))) * _FIRST)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(15))) + other)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(13))) * _SECOND)
    return np.uint32(bits ^ np.uint32(bits >> np.uint32(16)))


@inner
def other_key(key):
    """The second key of a seed. Without it two seeds would give the same numbers in another order."""
    return draw(np.uint32(0x9E3779B9), key, np.uint32(0))


@inlined
def chance(bits):
    """A float32 in [0, 1) made of the upper 24 of 32 random bits."""
    return np.float32(np.int32(np.uint32(bits >> np.uint32(8)))) * _UNIT


@inlined
def below(bits, limit):
    """A whole number in [0, ``limit``) made of 32 random bits."""
    return np.int64(np.uint64(np.uint64(bits) * np.uint64(limit)) >> np.uint64(32))
