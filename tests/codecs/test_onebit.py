"""``onebit`` and ``sign``: the means, the bits, and the majority vote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.onebit import Onebit, Sign
from syncline.errors import UsageError
from syncline.strategy import Strategy
from syncline.types import Spec

SIZES = [1, 33, 16384, 40_001]


def encoded(codec: Any, x: NDArray[np.float32]) -> NDArray[np.uint32]:
    state = codec.init(Spec("layer.weight", (x.size,)), 0)
    out = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
    codec.encode(x, out, state)
    return out


def decoded(codec: Any, payload: NDArray[np.uint32], size: int, onto: Any = None) -> NDArray[np.float32]:
    back = np.empty(size, np.float32) if onto is None else onto
    codec.decode(payload, back, codec.init(Spec("layer.weight", (size,)), 0), add=onto is not None)
    return back


@pytest.mark.parametrize("size", SIZES)
def test_onebit_sends_the_means_of_both_signs(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32) + np.float32(0.3)
    back = decoded(Onebit(), encoded(Onebit(), x), size)
    for start in range(0, size, 16384):
        mine, theirs = x[start : start + 16384].astype(np.float64), back[start : start + 16384]
        for chosen in (mine < 0, mine >= 0):
            if chosen.any():
                np.testing.assert_allclose(theirs[chosen], mine[chosen].mean(), rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_sign_sends_the_mean_magnitude(size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    back = decoded(Sign(), encoded(Sign(), x), size)
    for start in range(0, size, 16384):
        mine = x[start : start + 16384].astype(np.float64)
        np.testing.assert_allclose(back[start : start + 16384], np.sign(mine) * np.abs(mine).mean(), rtol=1e-5)


@pytest.mark.parametrize(("codec", "scales"), [(Onebit(), 2), (Sign(), 1), (Sign(vote="on"), 1)])
@pytest.mark.parametrize("size", SIZES)
def test_element_k_w_plus_j_is_bit_k_of_word_j(codec: Any, scales: int, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    payload, at = encoded(codec, x), 0
    for start in range(0, size, 16384):
        n = min(16384, size - start)
        words = -(-n // 32)
        codes = payload[at + scales : at + scales + words]
        bits = ((codes[None, :] >> np.arange(32, dtype=np.uint32)[:, None]) & 1).reshape(-1)
        np.testing.assert_array_equal(bits[:n], x[start : start + n] < 0)
        assert not bits[n:].any()
        at += scales + words
    assert at == payload.size


def test_the_vote_is_the_majority_and_a_tie_is_one() -> None:
    draw, codec = np.random.default_rng(0), Sign(vote="on")
    ranks = [draw.standard_normal(20_000, np.float32) for _ in range(4)]
    total = np.zeros(20_000, np.float32)
    for x in ranks:
        decoded(codec, encoded(codec, x), x.size, onto=total)
    signs = np.sum([np.sign(x) for x in ranks], axis=0)
    assert (signs == 0).any()
    voted = decoded(codec, encoded(codec, total), total.size)
    np.testing.assert_array_equal(voted, np.where(signs >= 0, 1, -1))


def test_a_vote_has_no_feedback() -> None:
    assert str(Strategy.parse("codec=sign")) == "codec=feedback(sign)"
    assert str(Strategy.parse("codec=onebit")) == "codec=feedback(onebit)"
    assert str(Strategy.parse("codec=sign(vote=on)")) == "codec=sign(vote=on)"
    with pytest.raises(UsageError, match="error feedback around sign diverges"):
        Strategy.parse("codec=feedback(sign(vote=on))")
