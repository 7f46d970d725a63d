"""The k largest elements of a tensor, found in one reading of it.

A bound below the k-th largest is guessed from a random sample; what reaches the bound is collected while the tensor is
read, and the k largest are chosen exactly among the few that were. The guess aims four standard deviations low, so that
it hardly ever fails; where it does, as with a tensor whose elements are nearly all the same, digits of all elements are
counted instead. Selecting again among what a sampled threshold let through is the "hierarchical" selection of Lin et
al., "Deep gradient compression", ICLR 2018.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from . import Floats
from .checks import no_residual
from .pairs import Indices

_SAMPLED = 400
"""How many of the k largest should be in the sample; the guess is off by one part in its square root."""

_DEVIATIONS = 4


class Source(NamedTuple):
    """The values that are chosen from: ``scale * x + momentum * velocity + residual``, empty arrays for what is not."""

    x: Floats
    residual: Floats
    velocity: Floats
    momentum: float = 0.0
    scale: float = 1.0


class Chosen(NamedTuple):
    """Indices in increasing order, the values there, and whether all values of the tensor are finite."""

    indices: Indices
    values: Floats
    finite: bool


def choose_largest(source: Source, k: int, seed: int, exact: bool = True) -> Chosen:
    """The ``k`` largest in magnitude, of equal ones those with the lowest index; a NaN is the largest of all.

    Unless ``exact``, no second reading of the tensor mends a guess that was wrong, and zeros are not chosen: then
    there may be fewer than ``k``. Whatever is not finite is chosen in both cases, as far as ``k`` goes.
    """
    from ..kernels.selection import GROUP, NOT_FINITE, keep_largest, magnitudes, rank_largest, select

    bound, room = _guess(source, k, seed)
    if not exact:
        bound = max(bound, 1)
    indices, values = np.empty(room + GROUP, np.uint32), np.empty(room + GROUP, np.float32)
    found, largest = select(*source, bound, indices, values)
    finite = largest < NOT_FINITE
    if (found > room and not (finite and not exact)) or (found < k and exact):
        return _counted(source, k, finite)
    if found > k:
        sizes = np.empty(found, np.int32)
        magnitudes(values[:found], no_residual(), no_residual(), 0.0, 1.0, sizes)
        least, larger = rank_largest(sizes, k)
        found = keep_largest(indices, values, found, least, k - larger)
    return Chosen(indices[:found], values[:found], finite)


def _guess(source: Source, k: int, seed: int) -> tuple[int, int]:
    """A magnitude that a little more than ``k`` elements should reach, and how many may before it is called wrong."""
    from ..kernels.selection import rank_largest, sample

    elements = source.x.size
    drawn = -(-_SAMPLED * elements // k) if k else 0
    rank = _SAMPLED + _DEVIATIONS * math.isqrt(_SAMPLED)
    if rank >= drawn or 4 * drawn >= elements:
        return 0, elements
    sizes = np.empty(drawn, np.int32)
    sample(*source, seed, sizes)
    bound, _ = rank_largest(sizes, rank)
    return bound, min(elements, math.ceil(k * (rank / _SAMPLED + 2 * _DEVIATIONS / math.sqrt(_SAMPLED))))


def _counted(source: Source, k: int, finite: bool) -> Chosen:
    """The ``k`` largest by counting the digits of all magnitudes."""
    from ..kernels.selection import magnitudes, rank_largest, select_exactly

    sizes = np.empty(source.x.size, np.int32)
    magnitudes(*source, sizes)
    least, larger = rank_largest(sizes, k)
    indices, values = np.empty(k + 1, np.uint32), np.empty(k + 1, np.float32)
    select_exactly(*source, least, k - larger, indices, values)
    return Chosen(indices[:k], values[:k], finite)


def settle(source: Source, chosen: Indices) -> None:
    """What was not chosen stays in the residual, and the velocity of what was is gone."""
    from ..kernels.selection import absorb, clear

    absorb(*source)
    clear(chosen, source.residual)
    if source.velocity.size:
        clear(chosen, source.velocity)
