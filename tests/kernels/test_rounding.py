"""Numbers of 16 and 8 bits in compiled code: widened exactly, rounded as numpy and ml_dtypes do."""

from __future__ import annotations

from typing import Any

import elementwise
import ml_dtypes
import numpy as np
import pytest
from bits import same
from numpy.typing import NDArray

from syncline.nouns import numpy_dtype

HALVES = {
    "float16": (elementwise.widen_float16, elementwise.narrow_float16),
    "bfloat16": (elementwise.widen_bfloat16, elementwise.narrow_bfloat16),
}


@pytest.fixture(scope="module", params=HALVES)
def half(request: pytest.FixtureRequest) -> tuple[np.dtype[Any], Any, Any]:
    return (numpy_dtype(request.param), *HALVES[request.param])


def through(convert: Any, numbers: NDArray[Any], kind: Any) -> NDArray[Any]:
    """What becomes of all numbers, as bits."""
    out = np.empty(numbers.size, kind)
    convert(numbers, out)
    return out


def test_all_16_bit_numbers_widen_exactly(half: tuple[np.dtype[Any], Any, Any]) -> None:
    dtype, widen, _ = half
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        wanted = halves.view(dtype).astype(np.float32)
    same(through(widen, halves, np.uint32).view(np.float32), wanted)


def test_narrowing_rounds_to_nearest_even(half: tuple[np.dtype[Any], Any, Any]) -> None:
    """Bit patterns at random, and all 16-bit numbers, the ties between them, and their neighbours."""
    dtype, widen, narrow = half
    exact = through(widen, np.arange(1 << 16, dtype=np.uint16), np.uint32)
    finite = exact[np.isfinite(exact.view(np.float32))].view(np.float32)
    with np.errstate(all="ignore"):
        following = np.nextafter(finite.astype(dtype), dtype.type(np.inf)).astype(np.float32)
        ties = ((finite.astype(np.float64) + following) / 2).astype(np.float32).view(np.uint32)
        floats = np.concatenate(
            [
                np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32),
                *(bits + np.uint32(shift) for bits in (exact, ties) for shift in (-1 & 0xFFFFFFFF, 0, 1)),
            ]
        )
        wanted = floats.view(np.float32).astype(dtype)
    same(through(narrow, floats, np.uint16).view(dtype), wanted)


def test_all_e4m3_numbers_widen_exactly() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint32)
    wanted = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(through(elementwise.widen_e4m3s, codes, np.uint32), wanted.view(np.uint32))


def test_narrowing_to_e4m3_rounds_to_nearest_even() -> None:
    """All numbers of the type, the ties between them, the neighbours of both, and numbers at random."""
    exact = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2])
    draw = np.random.default_rng(0)
    random = draw.standard_normal(100_000).astype(np.float32) * np.float32(2.0) ** draw.integers(-12, 7, 100_000)
    floats = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.float32(448)), random])
    floats = np.concatenate([floats, -floats]).astype(np.float32)
    floats = floats[np.abs(floats) <= 448]
    wanted = floats.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(through(elementwise.narrow_e4m3s, floats.view(np.uint32), np.uint32), wanted)
