"""The adaptive codec: which tensor gets what, in words and in bytes."""

from __future__ import annotations

import numpy as np
import pytest

from syncline import registry
from syncline.codecs import codec_of
from syncline.codecs.adaptive import Adaptive
from syncline.codecs.dense import Dense
from syncline.codecs.linear import Int8
from syncline.codecs.sparse import TopK
from syncline.codecs.threshold import Threshold
from syncline.errors import UsageError
from syncline.nouns import Size, Spec
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import bind, build, part_of, signature


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((1 << 20,), (Dense(), False, 0)),  # a bias, however long
        ((), (Dense(), False, 0)),
        ((32, 63), (Dense(), False, 0)),
        ((32, 64), (Threshold(ratio=0.01), True, 0)),
        ((64, 64, 3, 3), (Int8(), True, 0)),
        ((512, 512, 3, 3), (Threshold(ratio=0.01), True, 0)),
        ((4096, 4096), (Threshold(ratio=0.01), True, 0)),
    ],
)
def test_kind_and_size_decide(shape: tuple[int, ...], wanted: tuple[object, bool, int]) -> None:
    assert codec_of(Adaptive(), Spec("w", shape)) == wanted


def test_the_limit_and_the_codec_can_be_given() -> None:
    codec = Adaptive(codec=TopK(ratio=0.5), small=Size(64))
    assert codec_of(codec, Spec("w", (4, 4))) == (TopK(ratio=0.5), True, 0)
    assert codec_of(codec, Spec("w", (5, 3))) == (Dense(), False, 0)
    assert codec_of(Adaptive(codec=Dense()), Spec("w", (4096, 4096))) == (Dense(), False, 0)


@pytest.mark.parametrize("shape", [(100,), (100, 100), (64, 64, 3, 3)])
def test_asked_itself_it_does_as_the_chosen_one(shape: tuple[int, ...]) -> None:
    spec = Spec("w", shape)
    codec, (chosen, feedback, _) = Adaptive(), codec_of(Adaptive(), spec)
    assert codec.wire_bytes(spec) == chosen.wire_bytes(spec)
    x = np.random.default_rng(0).standard_normal(spec.elements, dtype=np.float32)
    mine, other = codec.init(spec, 0), chosen.init(spec, 0, feedback)
    payloads = [np.zeros(chosen.wire_bytes(spec)[1] // 4, np.uint32) for _ in range(2)]
    assert codec.encode(x, payloads[0], mine) == chosen.encode(x, payloads[1], other)
    np.testing.assert_array_equal(*payloads)
    if feedback:
        assert mine.residual is not None
        assert other.residual is not None
        np.testing.assert_array_equal(mine.residual, other.residual)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("adaptive", "adaptive"),
        ("adaptive(threshold(ratio=0.01))", "adaptive"),
        ("adaptive(codec=threshold(ratio=0.02))", "adaptive(threshold(ratio=0.02))"),
        ("adaptive(small=8192)", "adaptive"),
        ("adaptive(small=1MiB, topk(ratio=0.1))", "adaptive(topk(ratio=0.1), small=1MiB)"),
        ("adaptive(int8)", "adaptive(int8)"),
    ],
)
def test_a_wrapped_codec_may_be_left_out(text: str, canonical: str) -> None:
    strategy = Strategy.parse(f"codec={text}")
    assert str(strategy) == f"codec={canonical}"
    assert Strategy.parse(str(strategy)) == strategy
    assert part_of("codecs", strategy.codec_object()) == strategy.codec
    assert bind("codecs", part_of("codecs", build("codecs", strategy.codec))) == strategy.codec


def test_listings_show_the_wrapped_codec_that_is_meant() -> None:
    assert signature(registry.get("codecs", "adaptive")) == "adaptive(CODEC=threshold(ratio=0.01), small=8KiB)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("codec=adaptive(adaptive)", "would choose twice"),
        ("codec=feedback(adaptive)", r"write adaptive\(...\)"),
        ("codec=adaptive feedback=off", "has its own error feedback; leave one of them out"),
        ("codec=feedback(int8) feedback=off", "has its own error feedback; leave one of them out"),
        ("codec=adaptive(topk)", "topk needs ratio"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Strategy.parse(text)
