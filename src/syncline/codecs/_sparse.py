"""Selects the k largest elements of a tensor in one pass over it, and writes, reads and validates pairs.

**Selecting.** A random sample gives an estimated lower bound for the k-th largest. The pass collects all elements that
reach the bound, and the k largest of these are selected exactly. Of s samples, e = s*k/n should be among the k largest.
The bound is the (e + 4 sqrt(e) + 4)-th largest sample: four standard deviations low, so that it rarely fails. If it
does, as for a tensor of nearly equal elements, the digits of all elements are counted instead. Selecting again among
the elements above a sampled threshold is the "hierarchical" selection of Lin et al., "Deep gradient compression", ICLR
2018.

On a GPU an exact selection always counts digits: memory is fast there, and testing an estimate would mean waiting for
the device. The selection is the same.

**Pairs** of index and value have the layout of ``kernels/sparse.py``: 6 bytes per pair, and 4 bytes per 65536 elements
of the tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import Encoded, Floats, Payload, PayloadError, no_residual
from ._device import floats, kernels_for, on_device, room_for

_EXPECTED = 225
"""The wanted number of the k largest elements in the sample, unless that exceeds ``_DRAWN``."""

_DRAWN = 1 << 15
"""The largest sample: each element is a cache miss."""


class Source(NamedTuple):
    """The values to select from: ``scale * x + momentum * velocity + residual``. Absent terms are empty arrays."""

    x: Floats
    residual: Floats
    velocity: Floats
    momentum: float = 0.0
    scale: float = 1.0


class Chosen(NamedTuple):
    """The selected indices in increasing order, their values, and whether all values of the tensor are finite.

    On a device these are tensors, ``finite`` with one element.
    """

    indices: Indices
    values: Floats
    finite: bool


def encode_largest(source: Source, k: int, out: Payload, seed: int, exact: bool = True) -> Encoded:
    """Write the selection of ``choose_largest`` to ``out`` as pairs, and the rest to the residual, if there is one."""
    chosen = choose_largest(source, k, seed, exact)
    words = kernels_for("sparse", source.x).write_pairs(chosen.indices, chosen.values, len(source.x), out)
    if len(source.residual):
        kernels_for("sparse", source.x).settle(*source, chosen.indices, chosen.finite)
    return Encoded(words, chosen.finite)


def choose_largest(source: Source, k: int, seed: int, exact: bool = True) -> Chosen:
    """The ``k`` largest in magnitude; among equal ones those with the lowest index. NaN counts as the largest.

    Unless ``exact``, the tensor is not read again after a failed estimate. There may then be fewer than ``k`` elements,
    or, among very many equal ones, those at the tensor's start; and zeros are not selected. Non-finite values are
    always represented.
    """
    if on_device(source.x):
        return _chosen_on_device(source, k, seed, exact)
    from ..kernels.sparse import BLOCK, NOT_FINITE, keep_largest, magnitudes, rank_largest, select

    bound, room = _guess(source, k, seed)
    indices, values = np.empty(room + BLOCK, np.uint32), np.empty(room + BLOCK, np.float32)
    found, largest = select(*source, bound, indices, values)
    finite = largest < NOT_FINITE
    missed = found < k and bound > 1
    if (exact and (missed or found > room)) or (not finite and found > room):
        return _counted(source, k, finite)
    if found > k:
        sizes = np.empty(found, np.int32)
        magnitudes(values[:found], no_residual(), no_residual(), 0.0, 1.0, sizes)
        least, larger = rank_largest(sizes, k)
        found = keep_largest(indices, values, found, least, k - larger)
    elif exact and found < k:
        return _with_zeros(indices[:found], values[:found], k, finite)
    return Chosen(indices[:found], values[:found], finite)


def _chosen_on_device(source: Source, k: int, seed: int, exact: bool) -> Chosen:
    kernels = kernels_for("sparse", source.x)
    if exact:
        return Chosen(*kernels.choose_exactly(*source, k))
    return Chosen(*kernels.choose_reaching(*source, k, *_sampling(len(source.x), k), seed))


def _sampling(elements: int, k: int) -> tuple[int, int, int]:
    """The sample size, the rank of the bound in the sample, and the most elements that may reach the bound.

    The sample size is 0 if it would be nearly the whole tensor. Everything above zero is then collected.
    """
    drawn = min(-(-_EXPECTED * elements // max(k, 1)), _DRAWN)
    expected = drawn * k / max(elements, 1)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= drawn or 4 * drawn >= elements:
        return 0, 0, elements
    return drawn, rank, min(elements, math.ceil((rank + 6 * math.sqrt(rank)) * elements / drawn))


def _guess(source: Source, k: int, seed: int) -> tuple[int, int]:
    """A magnitude above zero that slightly more than ``k`` elements should reach, and the most that may reach it."""
    from ..kernels.sparse import rank_largest, sample

    drawn, rank, room = _sampling(source.x.size, k)
    if not drawn:
        return 1, room
    sizes = np.empty(drawn, np.int32)
    sample(*source, seed, sizes)
    bound, _ = rank_largest(sizes, rank)
    return max(bound, 1), room


def _with_zeros(indices: Indices, values: Floats, k: int, finite: bool) -> Chosen:
    """All non-zero elements, filled up with zeros."""
    from ..kernels.sparse import add_zeros

    all_indices, all_values = np.empty(k, np.uint32), np.empty(k, np.float32)
    add_zeros(indices, values, all_indices, all_values)
    return Chosen(all_indices, all_values, finite)


def _counted(source: Source, k: int, finite: bool) -> Chosen:
    """The ``k`` largest, found by counting the digits of all magnitudes."""
    from ..kernels.sparse import magnitudes, rank_largest, select_exactly

    sizes = np.empty(source.x.size, np.int32)
    magnitudes(*source, sizes)
    least, larger = rank_largest(sizes, k)
    indices, values = np.empty(k + 1, np.uint32), np.empty(k + 1, np.float32)
    select_exactly(*source, least, k - larger, indices, values)
    return Chosen(indices[:k], values[:k], finite)


Indices = NDArray[np.uint32]

STRETCH = 1 << 16
"""Elements per head word: indices within them take 16 bits."""


def pair_words(elements: int, pairs: int) -> int:
    """The number of words of a payload with ``pairs`` pairs, for a tensor of ``elements`` elements."""
    return -(-elements // STRETCH) + (pairs + 1) // 2 + pairs


def read_pairs(payload: Payload, elements: int, fewest: int, most: int) -> tuple[Indices, Floats]:
    """The indices, strictly increasing and in range, and the values (a view) of a payload.

    Raises PayloadError for a payload that cannot be one of that tensor with ``fewest`` to ``most`` pairs.
    """
    kernels = kernels_for("sparse", payload)
    pairs = _checked(kernels.count_pairs(payload, elements), payload, elements)
    if not fewest <= pairs <= most:
        expected = str(most) if fewest == most else f"{fewest} to {most}"
        raise PayloadError(f"got a payload of {pairs} pairs, expected {expected}")
    indices = room_for(pairs, payload)
    _checked(kernels.read_indices(payload, elements, indices), payload, elements)
    return indices, floats(payload[len(payload) - pairs :])


def _checked(found: int, payload: Payload, elements: int) -> int:
    """The number that a kernel returned; PayloadError if it is a fault code."""
    from ..kernels.sparse import LENGTH, ORDER, RANGE, TOO_MANY

    if found == LENGTH:
        raise PayloadError(f"a payload of {4 * len(payload)} bytes has the wrong length for its counts of pairs")
    if found == TOO_MANY:
        raise PayloadError("a payload counts more pairs than there are elements")
    if found == RANGE:
        raise PayloadError(f"a payload names an element beyond the tensor's {elements}")
    if found == ORDER:
        raise PayloadError("a payload names its elements out of order")
    return found


def decode_pairs(payload: Payload, out: Floats, fewest: int, most: int, add: bool) -> None:
    """Add the values of a payload to ``out``, or decode it into ``out``. Raises PayloadError before it writes."""
    indices, values = read_pairs(payload, len(out), fewest, most)
    if not add:
        out[:] = 0
    kernels_for("sparse", payload).put(indices, values, out)
