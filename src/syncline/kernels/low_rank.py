"""Products of a matrix with few vectors, and their orthogonalisation, with the same bits on every machine.

A matrix M is stored by rows. A factor is stored as ``rank`` vectors, one after the other: vectors of P have an element
for every row of M, vectors of Q one for every column. A BLAS is not used, because the order of its sums depends on the
processor and replicas on different hosts must agree bit for bit. Sums here have fixed lanes that are folded in halves,
or go from the first row to the last.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import free, malloc, view
from .blocks import draw, other_key

_LANES: Final = 256

_LOST: Final = 1e-5
"""A vector that projections shrink below this share of its length is rounding noise, not a new direction."""


@inner
def _add_products(a, b, lanes):
    for j in range(a.size):
        lanes[j] += a[j] * b[j]


@inner
def _add_upper_half(lower, upper):
    for j in range(lower.size):
        lower[j] += upper[j]


@inner
def _dot(a, b, lanes):
    lanes[:] = 0
    for start in range(0, a.size, _LANES):
        _add_products(a[start : start + _LANES], b[start : start + _LANES], lanes)
    half = lanes.size // 2
    while half:
        _add_upper_half(lanes[:half], lanes[half : 2 * half])
        half //= 2
    return lanes[0]


@inner
def _copy(a, out):
    for j in range(out.size):
        out[j] = a[j]


@inner
def _add_scaled(factor, a, out):
    for j in range(out.size):
        out[j] += factor * a[j]


@compiled("(float32[], float32[], float32[], int64)")
def times(matrix, q, p, rank):
    """P = M Q."""
    rows, columns = p.size // rank, q.size // rank
    memory = malloc(4 * _LANES)
    lanes = view(memory, np.float32(0), _LANES)
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for r in range(rank):
            p[r * rows + i] = _dot(row, q[r * columns : (r + 1) * columns], lanes)
    free(memory)


@compiled("(float32[], float32[], float32[], int64)")
def transposed_times(matrix, p, q, rank):
    """Q = M^T P."""
    rows, columns = p.size // rank, q.size // rank
    q[:] = np.float32(0)
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        for r in range(rank):
            _add_scaled(p[r * rows + i], row, q[r * columns : (r + 1) * columns])


@compiled("(float32[], float32[], float32[], float32[], float32[], int64)")
def expand(matrix, residual, p, mine, summed, rank):
    """Set ``residual`` (unless empty) to M - P mine^T, then M to P summed^T."""
    rows, columns = p.size // rank, mine.size // rank
    for i in range(rows):
        row = matrix[i * columns : (i + 1) * columns]
        if residual.size:
            kept = residual[i * columns : (i + 1) * columns]
            _copy(row, kept)
            for r in range(rank):
                _add_scaled(-p[r * rows + i], mine[r * columns : (r + 1) * columns], kept)
        row[:] = np.float32(0)
        for r in range(rank):
            _add_scaled(p[r * rows + i], summed[r * columns : (r + 1) * columns], row)


@inner
def _randomise(vector, seed, first):
    other = other_key(seed)
    for i in range(vector.size):
        vector[i] = np.float32(np.int32(draw(np.uint32(first + i), seed, other))) * np.float32(2.0**-31)


@inner
def _length(vector, lanes):
    lanes[:] = 0
    for start in range(0, vector.size, _LANES):
        part = vector[start : start + _LANES]
        for j in range(part.size):
            lanes[j] += np.float64(part[j]) * np.float64(part[j])
    half = lanes.size // 2
    while half:
        _add_upper_half(lanes[:half], lanes[half : 2 * half])
        half //= 2
    return np.sqrt(lanes[0])


@inner
def _scale(vector, length):
    for i in range(vector.size):
        vector[i] = np.float32(np.float64(vector[i]) / length)


@inner
def _made_orthogonal(vectors, r, n, lanes, wide):
    """Make vector ``r`` a unit vector orthogonal to those before it; return False if nothing of it is left."""
    vector = vectors[r * n : (r + 1) * n]
    for _ in range(2):  # the second pass removes the rounding errors of the first
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


@compiled("(float32[], int64, uint32)")
def orthonormalise(vectors, rank, seed):
    """Modified Gram-Schmidt in place, with two passes over each vector.

    A vector that is zero or depends on earlier ones is replaced by a random direction drawn with ``seed``, so that the
    subspace keeps its dimension. It becomes zero where no dimension is left.
    """
    n = vectors.size // rank
    memory = malloc(12 * _LANES)
    wide, lanes = view(memory, np.float64(0), _LANES), view(memory + 8 * _LANES, np.float32(0), _LANES)
    for r in range(rank):
        vector = vectors[r * n : (r + 1) * n]
        if _made_orthogonal(vectors, r, n, lanes, wide):
            continue
        _randomise(vector, seed, r * n)
        if r >= n or not _made_orthogonal(vectors, r, n, lanes, wide):
            vector[:] = np.float32(0)
    free(memory)
