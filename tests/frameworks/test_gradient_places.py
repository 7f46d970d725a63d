"""Places of gradients: what lies there is what NumPy makes of the gradient and the share, whoever multiplies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.frameworks._gradient_places import GradientPlace


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("shape", [(), (0,), (7, 3), (1000,), (300, 400)])
def test_gradients_are_multiplied_as_numpy_does(dtype: str, share: float, shape: tuple[int, ...]) -> None:
    gradient = np.asarray(np.random.default_rng(0).standard_normal(shape) * 50, dtype)
    gradient.flags.writeable = False
    found = np.empty(shape, dtype)
    place = GradientPlace(found)
    for _ in range(2):
        place.put(gradient, share)
        assert np.array_equal(found, np.multiply(gradient, share))


@pytest.mark.parametrize(
    "gradient",
    [
        np.arange(12, dtype=np.float32).reshape(4, 3).T,
        np.arange(24, dtype=np.float32).reshape(3, 8)[:, ::2],
        np.arange(12, dtype=np.float64).reshape(3, 4),
        np.arange(12, dtype=np.int8).reshape(3, 4),
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.frombuffer(bytes(range(49)), np.uint8)[1:].view(np.float32).reshape(3, 4),
    ],
    ids=["transposed", "strided", "wider", "whole numbers", "other byte order", "not aligned"],
)
def test_gradients_may_lie_in_any_way(gradient: Any) -> None:
    found = np.full((3, 4), np.nan, np.float32)
    GradientPlace(found).put(gradient, 0.5)
    assert np.array_equal(found, np.multiply(gradient, 0.5, dtype=np.float32, casting="same_kind"))
