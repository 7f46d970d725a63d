"""The k largest elements of a tensor, found in one reading of it.

A bound below the k-th largest is guessed from a random sample; what reaches the bound is collected while the tensor is
read, and the k largest are chosen exactly among the few that were. With s elements drawn, of which e = s*k/n should be
among the k largest, the bound is the (e + 4 sqrt(e) + 4)-th largest of the sample: four standard deviations low, so
that the guess hardly ever fails. Where it does, as with a tensor whose elements are nearly all the same, the digits of
all elements are counted instead. Selecting again among what a sampled threshold let through is the "hierarchical"
selection of Lin et al., "Deep gradient compression", ICLR 2018.

On a GPU the digits are always counted where the choice has to be exact: memory is fast there, and the outcome of a
guess would have to be waited for. The choice is the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import Encoded, Floats, Payload, no_residual
from ._device import kernels_for, on_device
from ._pairs import Indices

_EXPECTED = 225
"""How many of the k largest should be in the sample, unless it would become larger than ``_DRAWN``."""

_DRAWN = 1 << 15
"""Elements in a sample at most: each is a cache miss."""


class Source(NamedTuple):
    """The values that are chosen from: ``scale * x + momentum * velocity + residual``, empty arrays for what is not."""

    x: Floats
    residual: Floats
    velocity: Floats
    momentum: float = 0.0
    scale: float = 1.0


class Chosen(NamedTuple):
    """Indices in increasing order, the values there, and whether all values of the tensor are finite.

    On a device, tensors; the last one of one element.
    """

    indices: Indices
    values: Floats
    finite: bool


def encode_largest(source: Source, k: int, out: Payload, seed: int, exact: bool = True) -> Encoded:
    """Write what ``choose_largest`` chooses to ``out`` as pairs, and keep the rest in the residual if there is one."""
    chosen = choose_largest(source, k, seed, exact)
    words = kernels_for("pairs", source.x).write_pairs(chosen.indices, chosen.values, len(source.x), out)
    if len(source.residual):
        kernels_for("selection", source.x).settle(*source, chosen.indices, chosen.finite)
    return Encoded(words, chosen.finite)


def choose_largest(source: Source, k: int, seed: int, exact: bool = True) -> Chosen:
    """The ``k`` largest in magnitude, of equal ones those with the lowest index; a NaN is the largest of all.

    Unless ``exact``, no second reading of the tensor mends a guess that was wrong: then there may be fewer than ``k``,
    or, where very many are equal, those at the tensor's start. Zeros are not chosen then. Of what is not finite
    something always is.
    """
    if on_device(source.x):
        return _chosen_on_device(source, k, seed, exact)
    from ..kernels.selection import BLOCK, NOT_FINITE, keep_largest, magnitudes, rank_largest, select

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
    kernels = kernels_for("selection", source.x)
    if exact:
        return Chosen(*kernels.choose_exactly(*source, k))
    return Chosen(*kernels.choose_reaching(*source, k, *_sampling(len(source.x), k), seed))


def _sampling(elements: int, k: int) -> tuple[int, int, int]:
    """How many elements to draw, the rank among them of the bound, and how many of all may reach it at most.

    0 drawn, where the sample would be nearly the tensor: everything above zero may be collected then.
    """
    drawn = min(-(-_EXPECTED * elements // max(k, 1)), _DRAWN)
    expected = drawn * k / max(elements, 1)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank >= drawn or 4 * drawn >= elements:
        return 0, 0, elements
    return drawn, rank, min(elements, math.ceil((rank + 6 * math.sqrt(rank)) * elements / drawn))


def _guess(source: Source, k: int, seed: int) -> tuple[int, int]:
    """A magnitude above zero that a little more than ``k`` elements should reach, and how many may at most."""
    from ..kernels.selection import rank_largest, sample

    drawn, rank, room = _sampling(source.x.size, k)
    if not drawn:
        return 1, room
    sizes = np.empty(drawn, np.int32)
    sample(*source, seed, sizes)
    bound, _ = rank_largest(sizes, rank)
    return max(bound, 1), room


def _with_zeros(indices: Indices, values: Floats, k: int, finite: bool) -> Chosen:
    """All that are not zero, and as many zeros as are missing."""
    from ..kernels.selection import add_zeros

    all_indices, all_values = np.empty(k, np.uint32), np.empty(k, np.float32)
    add_zeros(indices, values, all_indices, all_values)
    return Chosen(all_indices, all_values, finite)


def _counted(source: Source, k: int, finite: bool) -> Chosen:
    """The ``k`` largest by counting the digits of all magnitudes."""
    from ..kernels.selection import magnitudes, rank_largest, select_exactly

    sizes = np.empty(source.x.size, np.int32)
    magnitudes(*source, sizes)
    least, larger = rank_largest(sizes, k)
    indices, values = np.empty(k + 1, np.uint32), np.empty(k + 1, np.float32)
    select_exactly(*source, least, k - larger, indices, values)
    return Chosen(indices[:k], values[:k], finite)
