"""``qsgd`` and ``natural``: what is sent, how far from it, and where error feedback is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.stochastic import Natural, Qsgd
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy


def sent(codec: Any, x: NDArray[np.float32], step: int = 0, rank: int = 0) -> NDArray[np.float32]:
    state = codec.init(Spec("layer.weight", (x.size,)), rank)
    state.step = step
    out, back = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.empty_like(x)
    assert codec.encode(x, out, state).finite
    codec.decode(out, back, state)
    return back


@pytest.mark.parametrize("codec", [Qsgd(), Qsgd(levels=7), Qsgd(levels=1), Qsgd(levels=100, block=64)])
@pytest.mark.parametrize("size", [1, 300, 3001])
def test_qsgd_sends_one_of_the_two_steps_around_an_element(codec: Qsgd, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    back = sent(codec, x)
    for start in range(0, size, codec.block):
        mine = x[start : start + codec.block].astype(np.float64)
        step = np.sqrt(np.sum(mine**2)) / codec.levels
        assert (np.abs(back[start : start + codec.block] - mine) < step * (1 + 1e-5)).all()
        levels = back[start : start + codec.block] / step
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)


@pytest.mark.parametrize("codec", [Qsgd(), Qsgd(levels=7), Qsgd(levels=7, block=32), Qsgd(levels=2, block=512)])
def test_the_variance_of_qsgd_is_below_its_bound(codec: Qsgd) -> None:
    n = codec.block
    x = np.random.default_rng(3).standard_normal(n, np.float32)
    bound = min(n / codec.levels**2, np.sqrt(n) / codec.levels)
    variance = np.mean([np.sum((sent(codec, x, step).astype(np.float64) - x) ** 2) for step in range(100)])
    assert variance <= bound * np.sum(x.astype(np.float64) ** 2)
    assert codec.contraction == (bound < 1)


def test_natural_sends_one_of_the_two_powers_of_two_around_an_element() -> None:
    draw = np.random.default_rng(0)
    x = (draw.standard_normal(3000) * 10.0 ** draw.integers(-30, 30, 3000)).astype(np.float32)
    # What lies 126 powers of two below the largest of its block is sent as 0 or as that.
    largest = np.concatenate([np.full(1024, np.abs(x[start : start + 1024]).max()) for start in (0, 1024, 2048)])[:3000]
    ordinary = np.abs(x) > largest * 2.0**-120
    mine, back = x[ordinary], sent(Natural(), x)[ordinary]
    below = 2.0 ** np.floor(np.log2(np.abs(mine.astype(np.float64))))
    np.testing.assert_array_equal(np.sign(back), np.sign(mine))
    assert np.isin(np.abs(back) / below, [1.0, 2.0]).all()
    assert ordinary.sum() > 1000


def test_the_variance_of_natural_is_at_most_an_eighth() -> None:
    x = np.full(1024, 4 / 3, np.float32)  # the worst: (2 - x) (x - 1) / x^2 is greatest there
    variance = np.mean([np.mean((sent(Natural(), x, step) - x) ** 2) for step in range(100)])
    assert variance == pytest.approx(np.mean(x**2) / 8, rel=0.02)


@pytest.mark.parametrize("codec", [Natural(), Qsgd()])
def test_ranks_and_steps_draw_other_numbers(codec: Any) -> None:
    """The errors of two ranks, and of two steps, have nothing to do with each other."""
    x = np.random.default_rng(3).standard_normal(20_000, np.float32)
    first = sent(codec, x) - x
    for other in (sent(codec, x, rank=1) - x, sent(codec, x, step=1) - x, np.roll(first, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05


def test_feedback_around_a_high_variance_is_refused() -> None:
    with pytest.raises(UsageError, match="error feedback around qsgd diverges"):
        Strategy.parse("codec=feedback(qsgd(levels=7))")
    assert str(Strategy.parse("codec=feedback(qsgd)")) == "codec=feedback(qsgd)"
    assert str(Strategy.parse("codec=qsgd")) == "codec=qsgd"


@pytest.mark.parametrize("text", ["codec=qsgd(levels=0)", "codec=qsgd(levels=128)", "codec=qsgd(block=10)"])
def test_arguments_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="choose"):
        Strategy.parse(text)
