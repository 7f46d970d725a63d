"""Places of gradients: what lies there is what NumPy makes of the gradient and the share, whoever multiplies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from syncline.errors import GradientError
from syncline.frameworks._flat import GradientPlace
from syncline.frameworks.torch.passes import Produced
from syncline.frameworks.torch.storage import Storage, layers_of
from syncline.schedules.fixed import Fixed


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
    ids=["transposed", "strided", "wider", "for integers", "other byte order", "not aligned"],
)
def test_gradients_may_lie_in_any_way(gradient: Any) -> None:
    found = np.full((3, 4), np.nan, np.float32)
    GradientPlace(found).put(gradient, 0.5)
    assert np.array_equal(found, np.multiply(gradient, 0.5, dtype=np.float32, casting="same_kind"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3, 0.1])
@pytest.mark.parametrize("shape", [(), (0,), (7, 3), (300, 400)])
def test_gradients_of_pytorch_are_multiplied_as_by_a_number(
    dtype: torch.dtype, share: float, shape: tuple[int, ...]
) -> None:
    """Moved into their places, and again where they lie there."""
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    named = [("weight", parameter)]
    buckets = Fixed().buckets(layers_of(named))
    storage = Storage(named, buckets, lambda nbytes, dtype: np.zeros(nbytes // dtype.itemsize, dtype))
    produced = Produced(named, storage, GradientError)
    produced.share = share
    wanted = parameter.grad = torch.randn(shape, dtype=torch.float64).mul(50).to(dtype)
    for _ in range(2):
        wanted = wanted * share
        assert parameter.grad is not None
        produced.place(0, parameter, parameter.grad, None)
        assert torch.equal(parameter.grad, wanted)
        assert parameter.grad.data_ptr() == storage.places[0]
