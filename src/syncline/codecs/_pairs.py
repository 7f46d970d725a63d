"""Payloads of (index, value) pairs: their size, and how they are written, read and validated.

The layout is that of ``kernels/pairs.py``: 6 bytes per pair, and 4 bytes per 65536 elements of the tensor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import Floats, Payload, PayloadError
from ._device import floats, kernels_for, room_for

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
    kernels = kernels_for("pairs", payload)
    pairs = _checked(kernels.count_pairs(payload, elements), payload, elements)
    if not fewest <= pairs <= most:
        expected = str(most) if fewest == most else f"{fewest} to {most}"
        raise PayloadError(f"a payload of {pairs} pairs came where {expected} were expected")
    indices = room_for(pairs, payload)
    _checked(kernels.read_indices(payload, elements, indices), payload, elements)
    return indices, floats(payload[len(payload) - pairs :])


def _checked(found: int, payload: Payload, elements: int) -> int:
    """The number that a kernel returned; PayloadError if it is a fault code."""
    from ..kernels.pairs import LENGTH, ORDER, RANGE, TOO_MANY

    if found == LENGTH:
        raise PayloadError(f"a payload of {4 * len(payload)} bytes has not the length that its counts of pairs ask for")
    if found == TOO_MANY:
        raise PayloadError("a payload counts more pairs than there are elements")
    if found == RANGE:
        raise PayloadError(f"a payload names an element beyond the tensor's {elements}")
    if found == ORDER:
        raise PayloadError("a payload names its elements out of order")
    return found


def decode_pairs(payload: Payload, out: Floats, fewest: int, most: int, add: bool) -> None:
    """Add the values of a payload to ``out``, or decode it into ``out``. Raises PayloadError before writing
    anything.
    """
    indices, values = read_pairs(payload, len(out), fewest, most)
    if not add:
        out[:] = 0
    kernels_for("selection", payload).put(indices, values, out)
