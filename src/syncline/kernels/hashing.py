"""Random numbers by counting: number i of a seed is a hash of both, so that any part can be drawn without the others.

The hash is C. Wellons' ``lowbias32`` (https://github.com/skeeto/hash-prospector) of the counter, keyed by the seed
before and after: integers only, so every machine draws the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True)
def _mixed(bits):
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(bits ^ np.uint32(bits >> np.uint32(16)))


@njit(nogil=True)
def random_bits(seed, i):
    """32 random bits: number ``i`` (uint32) of ``seed`` (uint32)."""
    return _mixed(np.uint32(_mixed(np.uint32(i ^ seed)) + np.uint32(seed * np.uint32(0x9E3779B9))))


@njit(nogil=True)
def random_below(seed, i, limit):
    """A random whole number from 0 up to, not including, ``limit`` (below 2**32): number ``i`` of ``seed``."""
    return np.int64((np.uint64(random_bits(seed, np.uint32(i))) * np.uint64(limit)) >> np.uint64(32))
