"""Calls out of compiled computations: gradients go to their places as NumPy would put them, and the version is told."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from syncline.kernels import calls
from syncline.kernels.passes import CODES

Array = Any


def pointers(*arrays: Array) -> Array:
    return np.array([array.ctypes.data for array in arrays], np.int64)


class Frame:
    """What XLA hands over, word by word; everything it points to is kept."""

    def __init__(self, stage: int, number: int, arguments: list[Array], results: list[Array]) -> None:
        self.words = np.zeros(21, np.int64)
        value = np.array([number], np.int64)
        scalar = np.array([0, value.ctypes.data], np.int64)
        attributes = pointers(scalar)
        sides = []
        for arrays in (arguments, results):
            buffers = [np.array([0, 0, 0, array.ctypes.data], np.int64) for array in arrays]
            sides.append((pointers(*buffers), buffers))
        self.words[[4, 9, 14, 20]] = stage, sides[0][0].ctypes.data, sides[1][0].ctypes.data, attributes.ctypes.data
        self.keep = value, scalar, attributes, sides, arguments, results


def table(places: list[Array], bell: int = -1, share: float = 1.0) -> Array:
    """Of one call with these places, which are also what is taken at the end."""
    row = [len(places)]
    for place in places:
        row += [CODES[str(place.dtype)], place.ctypes.data, place.size, place.nbytes]
    made = np.zeros(calls.ROWS + 1 + len(row), np.int64)
    made[calls.BELL], made[calls.ONE] = bell, 1
    made[calls.ASLEEP] = bell >= 0
    made[calls.SHARE : calls.SHARE + 1].view(np.float64)[0] = share
    made[calls.TAKES] = made[calls.ROWS] = calls.ROWS + 1
    made[calls.ROWS + 1 :] = row
    return made


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
def test_gradients_are_multiplied_as_numpy_does(dtype: str, share: float) -> None:
    draw = np.random.default_rng(0)
    gradients = [(draw.standard_normal(size) * 50).astype(dtype) for size in (1, 37, 0, 1000)]
    places = [np.empty_like(gradient) for gradient in gradients]
    bell = os.eventfd(0)
    made, handed = table(places, bell, share), np.zeros(2, np.int64)
    token = np.array([7, made.ctypes.data], np.int64)
    frame = Frame(3, 0, [token, *gradients], [handed])
    assert calls.put.code(frame.words.ctypes.data) == 0
    for place, gradient in zip(places, gradients, strict=True):
        assert np.array_equal(place, np.multiply(gradient, share))
    assert handed.tolist() == token.tolist()
    assert (made[calls.DONE], os.eventfd_read(bell)) == (1, 1)
    os.close(bell)
    back = [np.zeros_like(place) for place in places]
    end = Frame(3, 0, [token], [handed, *back])
    assert calls.take.code(end.words.ctypes.data) == 0
    assert all(np.array_equal(one, other) for one, other in zip(back, places, strict=True))


@pytest.mark.parametrize("call", [calls.put, calls.take])
def test_the_version_is_told_and_other_stages_touch_nothing(call: Any) -> None:
    place, gradient, token = np.zeros(3), np.ones(3), np.zeros(2, np.int64)
    made = table([place])
    token[1] = made.ctypes.data
    frame = Frame(0, 0, [token, gradient], [np.zeros(2, np.int64), place])
    assert call.code(frame.words.ctypes.data) == 0
    assert not place.any()
    asked = np.zeros(8, np.int64)  # the description that XLA wants to have filled
    other, extension = np.zeros(4, np.int64), np.zeros(4, np.int64)
    extension[1], extension[3] = 1, asked.ctypes.data
    other[2] = extension.ctypes.data
    frame.words[1] = other.ctypes.data
    asked[3] = -1
    assert call.code(frame.words.ctypes.data) == 0
    assert asked[3:4].view(np.int32).tolist() == [calls.MAJOR, calls.MINOR]
