"""Products with a few vectors and their orthogonalisation, compiled, with the same bits on every machine.

A matrix M is given by rows. Its factors are given as ``rank`` vectors one behind the other: those of P have an element
for every row of M, those of Q one for every column. No BLAS: the order of its sums depends on the processor, and
replicas on different hosts must agree to the bit. Here a sum has fixed lanes that are folded in halves, or goes from
the first row to the last.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import float32, int64, njit, uint32, void

from .compiled import compiled
from .draws import draw, other_key

_LANES: Final = 256

_LOST: Final = 1e-5
"""A vector of which less than this part is left after projections is rounding, and no direction of its own."""


@njit(nogil=True)
def _add_products(a, b, lanes):
    for j in range(a.size):
        lanes[j] += a[j] * b[j]


@njit(nogil=True)
def _add_upper_half(lower, upper):
    for j in range(lower.size):
        lower[j] += upper[j]


@njit(nogil=True)
def _dot(a, b, lanes):
    lanes[:] = 0
    for start in range(0, a.size, lanes.size):
        _add_products(a[start : start + lanes.size], b[start : start + lanes.size], lanes)
    half = lanes.size // 2
    while half:
        _add_upper_half(lanes[:half], lanes[half : 2 * half])
        half //= 2
    return lanes[0]


@njit(nogil=True)
def _add_scaled(factor, a, out):
    for j in range(out.size):
        out[j] += factor * a[j]


@compiled(void(float32[::1], float32[::1], float32[::1], int64))
def times(matrix, q, p, rank):
    """P = M Q."""
    rows, columns = p.size // rank, q.size // rank
    lanes = np.empty(_LANES, np.float32)
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for r in range(rank):
            p[r * rows + i] = _dot(row, q[r * columns : (r + 1) * columns], lanes)


@compiled(void(float32[::1], float32[::1], float32[::1], int64))
def transposed_times(matrix, p, q, rank):
    """Q = M^T P."""
    rows, columns = p.size // rank, q.size // rank
    q[:] = np.float32(0)
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for r in range(rank):
            _add_scaled(p[r * rows + i], row, q[r * columns : (r + 1) * columns])


@compiled(void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], int64))
def expand(matrix, residual, p, mine, summed, rank):
    """``residual`` (unless empty) = M - P mine^T, then M = P summed^T."""
    rows, columns = p.size // rank, mine.size // rank
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        if residual.size:
            kept = residual[i * columns : (i + 1) * columns]
            kept[:] = row
            for r in range(rank):
                _add_scaled(-p[r * rows + i], mine[r * columns : (r + 1) * columns], kept)
        row[:] = np.float32(0)
        for r in range(rank):
            _add_scaled(p[r * rows + i], summed[r * columns : (r + 1) * columns], row)


@njit(nogil=True)
def _randomise(vector, seed, first):
    other = other_key(seed)
    for i in range(vector.size):
        vector[i] = np.float32(np.int32(draw(np.uint32(first + i), seed, other))) * np.float32(2.0**-31)


@njit(nogil=True)
def _length(vector, lanes):
    lanes[:] = 0
    for start in range(0, vector.size, lanes.size):
        part = vector[start : start + lanes.size]
        for j in range(part.size):
            lanes[j] += np.float64(part[j]) * np.float64(part[j])
    half = lanes.size // 2
    while half:
        _add_upper_half(lanes[:half], lanes[half : 2 * half])
        half //= 2
    return np.sqrt(lanes[0])


@njit(nogil=True)
def _scale(vector, length):
    for i in range(vector.size):
        vector[i] = np.float32(np.float64(vector[i]) / length)


@njit(nogil=True)
def _made_orthogonal(vectors, r, n, lanes, wide):
    """Make vector r a unit vector orthogonal to those before it; False when nothing of it is left."""
    vector = vectors[r * n : (r + 1) * n]
    for _ in range(2):  # the second time removes what rounding left of the first
        length = _length(vector, wide)
        if length == 0.0:
            return False
        _scale(vector, length)
        for s in range(r):
            other = vectors[s * n : (s + 1) * n]
            _add_scaled(-_dot(vector, other, lanes), other, vector)
        length = _length(vector, wide)
        if length < _LOST:
            return False
    _scale(vector, length)
    return True


@compiled(void(float32[::1], int64, uint32))
def orthonormalise(vectors, rank, seed):
    """Modified Gram-Schmidt in place, each vector twice.

    A vector that is zero, or depends on those before it, becomes a random direction of ``seed`` instead, so that a
    subspace never loses dimensions; it is zero where there are no further dimensions.
    """
    n = vectors.size // rank
    lanes, wide = np.empty(_LANES, np.float32), np.empty(_LANES, np.float64)
    for r in range(rank):
        vector = vectors[r * n : (r + 1) * n]
        if _made_orthogonal(vectors, r, n, lanes, wide):
            continue
        _randomise(vector, seed, r * n)
        if r >= n or not _made_orthogonal(vectors, r, n, lanes, wide):
            vector[:] = np.float32(0)
