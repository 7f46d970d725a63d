"""``onebit`` and ``sign``: the means, the bits, and the majority vote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.onebit import Onebit, Sign
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy

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
    draw, codec = np.random.default_rng(0), Sign(vote="on", scale=1)
    ranks = [draw.standard_normal(20_000, np.float32) for _ in range(4)]
    total = np.zeros(20_000, np.float32)
    for x in ranks:
        decoded(codec, encoded(codec, x), x.size, onto=total)
    signs = np.sum([np.sign(x) for x in ranks], axis=0)
    assert (signs == 0).any()
    voted = decoded(codec, encoded(codec, total), total.size)
    np.testing.assert_array_equal(voted, np.where(signs >= 0, 1, -1))


@pytest.mark.parametrize("scale", [0.001, 3.0])
def test_every_vote_is_as_large_as_its_scale(scale: float) -> None:
    codec = Sign(vote="on", scale=scale)
    x = np.random.default_rng(0).standard_normal(20_000, np.float32) * np.float32(1e3)
    for gradient in (x, x * np.float32(1e-30), np.zeros(5, np.float32)):
        voted = decoded(codec, encoded(codec, gradient), gradient.size)
        np.testing.assert_array_equal(voted, np.where(gradient < 0, -np.float32(scale), np.float32(scale)))


@pytest.mark.parametrize("size", SIZES)
def test_a_vote_with_momentum_is_that_of_the_gradients_so_far(size: int) -> None:
    """And an owner, who encodes a sum of votes, has none."""
    codec = Sign(vote="on", momentum=0.5)
    state = codec.init(Spec("layer.weight", (size,)), 0)
    out, back = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.empty(size, np.float32)
    momentum = np.zeros(size, np.float32)
    for step in range(5):
        x = np.random.default_rng(step).standard_normal(size, np.float32)
        momentum = x + np.float32(0.5) * momentum
        assert codec.encode(x, out, state).finite
        codec.decode(out, back, state)
        np.testing.assert_array_equal(back, np.where(momentum < 0, -np.float32(0.001), np.float32(0.001)))
    assert codec.relay == Sign(vote="on")
    assert not codec.relay.init(state.spec, -1).memory


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("vote=on, scale=0", "scale=0.0: choose"),
        ("vote=on, scale=-1", "scale=-1.0: choose"),
        ("vote=on, scale=1e-31", "scale=1e-31: choose"),
        ("vote=on, scale=1e31", "scale=1e\\+31: choose"),
        ("vote=on, momentum=1", "momentum=1.0: choose"),
        ("vote=on, momentum=-0.1", "momentum=-0.1: choose"),
        ("scale=1", "write vote=on"),
        ("momentum=0.9", "write vote=on"),
    ],
)
def test_arguments_that_make_no_sense_say_what_does(arguments: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy.parse(f"codec=sign({arguments})")


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_scale_at_its_limits_is_said_and_added(scale: float) -> None:
    codec = Sign(vote="on", scale=scale)
    x = np.array([1, -1], np.float32)
    total = np.zeros(2, np.float32)
    for _ in range(4):
        decoded(codec, encoded(codec, x), 2, onto=total)
    np.testing.assert_allclose(total, [4 * scale, -4 * scale], rtol=1e-6)


def test_a_vote_has_no_feedback() -> None:
    assert str(Strategy.parse("codec=sign")) == "codec=feedback(sign)"
    assert str(Strategy.parse("codec=onebit")) == "codec=feedback(onebit)"
    assert str(Strategy.parse("codec=sign(vote=on)")) == "codec=sign(vote=on)"
    published = "codec=sign(vote=on, scale=1.0, momentum=0.9)"
    assert str(Strategy.parse("codec=sign(vote=on, scale=1, momentum=0.9)")) == published
    with pytest.raises(UsageError, match="error feedback around sign diverges"):
        Strategy.parse("codec=feedback(sign(vote=on))")
