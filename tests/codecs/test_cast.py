"""``fp16``, ``bf16`` and ``fp8``: the bits are those of numpy and ml_dtypes; out of range is not infinite."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.cast import Bf16, Fp8, Fp16
from syncline.nouns import Spec, numpy_dtype


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
