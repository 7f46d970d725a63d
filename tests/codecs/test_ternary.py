"""``ternary``: -1, 0 or 1 times the maximum, twenty to a word."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.ternary import Ternary
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy

BOTH = [Ternary(), Ternary(clip=0), Ternary(rounding="nearest")]


def sent(codec: Ternary, x: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    state = codec.init(Spec("layer.weight", (x.size,)), 0)
    out, back = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.empty_like(x)
    codec.encode(x, out, state)
    codec.decode(out, back, state)
    return out, back


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("size", [1, 19, 41, 10240, 25000])
def test_element_k_w_plus_j_is_digit_k_of_word_j(codec: Ternary, size: int) -> None:
    payload, back = sent(codec, np.random.default_rng(size).standard_normal(size, np.float32))
    at = 0
    for start in range(0, size, codec.block):
        n = min(codec.block, size - start)
        words = -(-n // 20)
        maximum = payload[at : at + 1].view(np.float32)[0]
        codes = payload[at + 1 : at + 1 + words].astype(np.int64)
        trits = (codes[None, :] // 3 ** np.arange(20)[:, None] % 3 - 1).reshape(-1)[:n]
        np.testing.assert_array_equal(trits.astype(np.float32) * maximum, back[start : start + n])
        assert (codes < 3**20).all()
        at += 1 + words
    assert at == payload.size


def test_nearest_errs_by_half_the_maximum_and_never_more_than_the_element() -> None:
    x = np.random.default_rng(1).standard_normal(9000, np.float32)
    error = np.abs(sent(Ternary(rounding="nearest"), x)[1] - x)
    assert (error <= np.abs(x)).all()
    assert error.max() <= np.abs(x).max() / 2


@pytest.mark.parametrize("size", [1, 6, 20, 1000, 10240, 25000])
@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny", "huge"])
def test_clipping_sends_large_elements_as_some_standard_deviations(size: int, kind: str) -> None:
    """Of a block, about zero, whatever its magnitudes; those are what the maximum is, and always sent."""
    x = np.random.default_rng(size).standard_normal(size)
    x = {"normal": x, "heavy": x**5, "tiny": x * 1e-40, "huge": x / np.abs(x).max() * 3.4e38}[kind].astype(np.float32)
    codec = Ternary(clip=1.5)
    back = sent(codec, x)[1]
    assert np.isfinite(back).all()
    for start in range(0, size, codec.block):
        mine = x[start : start + codec.block].astype(np.float64)
        limit = min(1.5 * np.sqrt(np.mean(mine**2)), np.abs(mine).max())
        clipped = np.abs(mine) > limit * (1 + 1e-5)
        said = back[start : start + codec.block]
        np.testing.assert_allclose(np.abs(said[said != 0]), limit, rtol=1e-5, atol=2.0**-149)
        np.testing.assert_array_equal(np.sign(said[clipped]), np.sign(mine[clipped]))


def test_the_mean_is_the_clipped_gradient() -> None:
    codec, steps = Ternary(), 400
    x = (np.random.default_rng(3).standard_normal(900) ** 3).astype(np.float32)
    state = codec.init(Spec("layer.weight", (x.size,)), 0)
    out, total = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32), np.zeros(x.size, np.float32)
    for state.step in range(steps):
        codec.encode(x, out, state)
        codec.decode(out, total, state, add=True)
    limit = 2.5 * np.sqrt(np.mean(x.astype(np.float64) ** 2))
    assert (np.abs(x) > limit).any()
    error = total / steps - np.clip(x, -limit, limit)
    assert np.abs(error).max() <= 6 * limit / 2 / np.sqrt(steps)
    assert abs(error.mean()) <= 6 * limit / 2 / np.sqrt(steps * x.size)


@pytest.mark.parametrize("value", [0.0, 1.0, -3e38, 1e-36])
def test_elements_that_are_all_alike_are_not_clipped(value: float) -> None:
    x = np.full(10241, value, np.float32)
    np.testing.assert_array_equal(sent(Ternary(), x)[1], x)


def test_one_large_element_is_clipped_and_only_on_its_way_to_the_owner() -> None:
    x = np.zeros(10240, np.float32)
    x[5] = 100
    said = sent(Ternary(), x)[1]
    np.testing.assert_allclose(said[5], 2.5 * 100 / np.sqrt(10240), rtol=1e-5)
    np.testing.assert_array_equal(sent(Ternary().relay, x)[1], x)
    assert Ternary().relay == Ternary(clip=0)
    assert Ternary(rounding="nearest").relay == Ternary(rounding="nearest")


@pytest.mark.parametrize("clip", ["0.5", "-1", "101", "1e300"])
def test_a_clip_out_of_range_says_what_to_choose(clip: str) -> None:
    with pytest.raises(UsageError, match="choose 1 to 100 standard deviations"):
        Strategy.parse(f"codec=ternary(clip={clip})")


def test_clipping_is_for_rounding_at_random() -> None:
    with pytest.raises(UsageError, match="leave clip= out"):
        Strategy.parse("codec=ternary(rounding=nearest, clip=3)")
    for text in ("ternary(clip=0.0)", "ternary(clip=1.0)", "ternary(clip=100.0)"):
        assert str(Strategy.parse(f"ps(servers=2) codec={text}")) == f"ps(servers=2) codec={text}"


def test_every_digit_of_every_word_is_read() -> None:
    """Words at random, the largest and smallest, and such as no encoder makes: digits beyond the twentieth are not."""
    codec = Ternary()
    codes = np.random.default_rng(0).integers(0, 3**20, 512, np.uint32)
    codes[:4] = [0, 3**20 - 1, 3**19, 3**10]
    payload = np.concatenate([np.ones(1, np.float32).view(np.uint32), codes])
    back = np.empty(codec.block, np.float32)
    codec.decode(payload, back, codec.init(Spec("layer.weight", (codec.block,)), 0))
    wanted = codes.astype(np.int64)[None, :] // 3 ** np.arange(20)[:, None] % 3 - 1
    np.testing.assert_array_equal(back.reshape(20, 512), wanted)
    payload[1:] = 0xFFFFFFFF
    codec.decode(payload, back, codec.init(Spec("layer.weight", (codec.block,)), 0))
    assert np.isin(back, [-1, 0, 1]).all()


def test_only_rounding_to_nearest_gets_feedback() -> None:
    assert str(Strategy.parse("codec=ternary")) == "codec=ternary"
    assert str(Strategy.parse("codec=ternary(rounding=nearest)")) == "codec=feedback(ternary(rounding=nearest))"
    with pytest.raises(UsageError, match="error feedback around ternary diverges"):
        Strategy.parse("codec=feedback(ternary)")
    with pytest.raises(UsageError, match="rounding of ternary"):
        Strategy.parse("codec=ternary(rounding=up)")
