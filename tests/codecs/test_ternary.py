"""``ternary``: -1, 0 or 1 times the maximum, twenty to a word."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.ternary import Ternary
from syncline.errors import UsageError
from syncline.strategy import Strategy
from syncline.types import Spec

BOTH = [Ternary(), Ternary(rounding="nearest")]


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
