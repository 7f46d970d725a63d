"""``int8`` and ``int4``: the error bound, the layout of a payload, and what arguments are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.codecs.linear import Int4, Int8
from syncline.errors import UsageError
from syncline.nouns import Spec

BOTH: list[Any] = [Int8(), Int4(), Int8(block=64), Int4(block=8)]


def sent(codec: Any, x: NDArray[np.float32], feedback: bool = False) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    spec = Spec("layer.weight", (x.size,))
    state = codec.init(spec, 0, feedback)
    out, back = np.empty(codec.wire_bytes(spec)[1] // 4, np.uint32), np.empty_like(x)
    codec.encode(x, out, state)
    codec.decode(out, back, state)
    return out, back


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("size", [1, 5, 1000, 5000])
def test_the_error_is_at_most_half_a_step(codec: Any, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    levels = 127 if codec.codes == 4 else 7
    _, back = sent(codec, x)
    for start in range(0, size, codec.block):
        block = slice(start, start + codec.block)
        half = np.abs(x[block]).max() / (2 * levels)
        assert np.abs(back[block] - x[block]).max() <= half * (1 + 1e-4)


@pytest.mark.parametrize("codec", BOTH)
@pytest.mark.parametrize("size", [1, 77, 2048, 3001])
def test_element_k_w_plus_j_is_field_k_of_word_j(codec: Any, size: int) -> None:
    x = np.random.default_rng(size).standard_normal(size, np.float32)
    payload, back = sent(codec, x)
    fields, bits, at = codec.codes, 32 // codec.codes, 0
    for start in range(0, size, codec.block):
        n = min(codec.block, size - start)
        words = -(-n // fields)
        step = payload[at : at + 1].view(np.float32)[0]
        codes = payload[at + 1 : at + 1 + words].astype(np.int64)
        rows = (codes[None, :] >> (bits * np.arange(fields))[:, None]) & ((1 << bits) - 1)
        numbers = (rows - ((rows >> (bits - 1)) << bits)).reshape(-1)[:n]
        np.testing.assert_array_equal(numbers.astype(np.float32) * step, back[start : start + n])
        at += 1 + words
    assert at == payload.size


def test_the_largest_float32_stays_finite() -> None:
    x = np.full(10, np.finfo(np.float32).max, np.float32)
    for codec in BOTH:
        np.testing.assert_allclose(sent(codec, x)[1], x, rtol=1e-6)


@pytest.mark.parametrize("make", [lambda: Int8(block=6), lambda: Int4(block=4), lambda: Int8(block=0)])
def test_a_block_that_is_no_whole_number_of_words_is_refused(make: Any) -> None:
    with pytest.raises(UsageError, match="choose a multiple of"):
        make()
