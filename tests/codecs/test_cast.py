"""``fp16``, ``bf16`` and ``fp8``: the bits are those of numpy and ml_dtypes; out of range is not infinite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit, uint32
from numpy.typing import NDArray

from syncline.codecs.cast import Bf16, Fp8, Fp16
from syncline.kernels.cast import narrow_e4m3, widen_e4m3
from syncline.kernels.native import bits_of_float, float_of_bits
from syncline.types import Spec, numpy_dtype


@njit(uint32[:](uint32[:]))  # type: ignore[untyped-decorator]
def narrowed(floats):  # type: ignore[no-untyped-def]
    out = np.empty(floats.size, np.uint32)
    for i in range(floats.size):
        out[i] = narrow_e4m3(float_of_bits(floats[i]))
    return out


@njit(uint32[:](uint32[:]))  # type: ignore[untyped-decorator]
def widened(codes):  # type: ignore[no-untyped-def]
    out = np.empty(codes.size, np.uint32)
    for i in range(codes.size):
        out[i] = bits_of_float(widen_e4m3(codes[i]))
    return out


def test_all_e4m3_numbers_widen_exactly() -> None:
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint32)
    wanted = codes.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(widened(codes), wanted.view(np.uint32))


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
    np.testing.assert_array_equal(narrowed(floats.view(np.uint32)), wanted)


def sent(codec: Any, x: NDArray[np.float32], state: Any) -> NDArray[np.float32]:
    out, back = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.empty_like(x)
    assert codec.encode(x, out, state).finite
    codec.decode(out, back, state)
    return back


@pytest.mark.parametrize("codec", [Fp16(), Bf16()])
def test_a_finite_number_beyond_the_range_is_the_largest_one_and_the_residual_has_the_rest(codec: Any) -> None:
    largest = float(ml_dtypes.finfo(numpy_dtype(codec.number)).max)
    x = np.array([3.4028235e38, -3.4028235e38, largest, -1.0], np.float32)
    state = codec.init(Spec("layer.weight", (4,)), 0, feedback=True)
    back = sent(codec, x, state)
    np.testing.assert_array_equal(back, np.array([largest, -largest, largest, -1], np.float32))
    np.testing.assert_array_equal(state.residual, x - back)


@pytest.mark.parametrize("codec", [Fp16(), Bf16()])
def test_infinities_and_nans_stay_what_they_are(codec: Any) -> None:
    x = np.array([np.inf, 1.0, -np.inf, np.nan, 2.0], np.float32)
    state = codec.init(Spec("layer.weight", (5,)), 0, feedback=True)
    state.residual[...] = 0.25
    out, back = np.empty(3, np.uint32), np.empty_like(x)
    assert not codec.encode(x, out, state).finite
    codec.decode(out, back, state)
    np.testing.assert_array_equal(back, np.array([np.inf, 1.25, -np.inf, np.nan, 2.25], np.float32))
    np.testing.assert_array_equal(state.residual, np.array([0.25, 0, 0.25, 0.25, 0], np.float32))


def test_fp8_has_a_relative_error_of_a_sixteenth_down_to_its_subnormal_numbers() -> None:
    draw = np.random.default_rng(1)
    x = (draw.standard_normal(5000) * 10.0 ** draw.integers(-6, 3, 5000)).astype(np.float32)
    back = sent(Fp8(), x, Fp8().init(Spec("layer.weight", (5000,)), 0))
    for start in range(0, 5000, 1024):
        mine, theirs = x[start : start + 1024].astype(np.float64), back[start : start + 1024]
        scale = np.abs(mine).max() / 448
        assert (np.abs(mine - theirs) <= np.maximum(np.abs(mine) / 16, scale * 2.0**-10) * (1 + 1e-5)).all()
        assert np.abs(theirs).max() == pytest.approx(np.abs(mine).max(), rel=1e-6)
