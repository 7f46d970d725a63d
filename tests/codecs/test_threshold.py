"""Deep gradient compression: how many elements a sampled threshold chooses, momentum, clipping and warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs import Floats, State
from syncline.codecs._sparse import pair_words
from syncline.codecs.sparse import share
from syncline.codecs.threshold import Threshold
from syncline.errors import UsageError
from syncline.nouns import Spec

SOME = Spec("w", (400,))


def sent(codec: Threshold, x: Floats, state: State) -> Floats:
    """What one step says."""
    payload = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
    words = codec.encode(x, payload, state).words
    out = np.empty(x.size, np.float32)
    codec.decode(payload[:words], out, state)
    state.step += 1
    return out


def normal(size: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("shape", ["normal", "heavy", "rows"])
def test_of_large_tensors_nearly_as_many_are_chosen_as_asked_for(ratio: float, shape: str) -> None:
    """Within 10 %, over steps, and those chosen are the largest."""
    x = normal(1_000_000)
    if shape == "heavy":
        x = x**3
    elif shape == "rows":  # neighbours are alike
        x *= np.repeat(np.exp2(8 * normal(1000, 1)), 1000)
    codec = Threshold(ratio=ratio)
    state = codec.init(Spec("w", (x.size,)), 0, feedback=True)
    assert state.residual is not None
    for _ in range(4):
        values = state.residual + x
        said = sent(codec, x, state)
        chosen = said != 0
        assert abs(np.count_nonzero(chosen) - ratio * x.size) <= 0.1 * ratio * x.size
        assert np.abs(values[chosen]).min() >= np.abs(values[~chosen]).max()
        np.testing.assert_array_equal(said + state.residual, values)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3000), st.sampled_from([0.001, 0.1, 1.0]), st.integers(0, 2**32 - 1))
def test_of_small_tensors_exactly_the_largest_are_chosen(size: int, ratio: float, seed: int) -> None:
    x = normal(size, seed)
    codec = Threshold(ratio=ratio)
    said = sent(codec, x, codec.init(Spec("w", (size,)), 0))
    assert np.count_nonzero(said) == share(ratio, size)
    rest = np.abs(x[said == 0])
    assert np.abs(said[said != 0]).min() >= (rest.max() if rest.size else 0)


@pytest.mark.parametrize("size", [5000, 1_000_000])
def test_equal_elements_are_sent_as_far_as_asked_for_and_zeros_never(size: int) -> None:
    codec = Threshold(ratio=0.01)
    ones = sent(codec, np.ones(size, np.float32), codec.init(Spec("w", (size,)), 0))
    assert np.count_nonzero(ones) == share(0.01, size)
    zeros = np.zeros(size, np.float32)
    zeros[17] = 1
    payload = np.empty(codec.wire_bytes(Spec("w", (size,)))[1] // 4, np.uint32)
    assert codec.encode(zeros, payload, codec.init(Spec("w", (size,)), 0)).words == pair_words(size, 1)


def test_momentum_is_as_if_everything_had_been_sent_at_once() -> None:
    """An element that is never sent has gathered what SGD with momentum would have moved it by; see section 3.2."""
    momentum = 0.5
    codec = Threshold(ratio=0.01, momentum=momentum)
    state = codec.init(SOME, 0, feedback=True)
    assert state.residual is not None
    velocity, gathered = np.zeros(400, np.float32), np.zeros(400, np.float32)
    for step in range(20):
        x = normal(400, step)
        velocity = velocity * np.float32(momentum) + x
        gathered += velocity
        said = sent(codec, x, state)
        chosen = np.argsort(-np.abs(gathered), kind="stable")[:4]
        assert set(np.flatnonzero(said)) == set(chosen.tolist())
        np.testing.assert_array_equal(said[chosen], gathered[chosen])
        gathered[chosen] = velocity[chosen] = 0
        np.testing.assert_array_equal(state.residual, gathered)
        np.testing.assert_array_equal(state.memory["velocity"], velocity)


def test_momentum_keeps_its_memories_from_what_is_not_finite() -> None:
    codec = Threshold(ratio=0.01, momentum=0.9)
    state = codec.init(SOME, 0, feedback=True)
    sent(codec, normal(400), state)
    assert state.residual is not None
    before = state.residual.copy(), state.memory["velocity"].copy()
    for bad in (np.nan, np.inf, np.float32(3.4e38)):  # the last one overflows in the second step
        x = np.full(400, bad, np.float32)
        if np.isfinite(bad):
            before = before[0], np.full(400, bad)
            state.memory["velocity"][...] = bad
        assert not np.isfinite(sent(codec, x, state)).all()
        np.testing.assert_array_equal(state.residual, before[0])
        np.testing.assert_array_equal(state.memory["velocity"], np.float32(before[1]))


@pytest.mark.parametrize("world", [1, 4])
def test_a_gradient_is_clipped_to_its_ranks_part_of_the_norm(world: int) -> None:
    codec = Threshold(ratio=1.0, clip=3.0)
    state = codec.init(SOME, 0)
    state.world = world
    x = normal(400)
    said = sent(codec, x, state)
    np.testing.assert_allclose(np.linalg.norm(said), 3.0 / np.sqrt(world), rtol=1e-5)
    np.testing.assert_allclose(said * (np.linalg.norm(x) / np.linalg.norm(said)), x, rtol=1e-5)
    short = x / np.float32(1000)
    np.testing.assert_array_equal(sent(codec, short, state), short)
    assert np.isnan(sent(codec, np.where(np.arange(400) == 3, np.nan, x).astype(np.float32), state)).any()


def test_warm_up_falls_exponentially_from_a_quarter() -> None:
    codec = Threshold(ratio=0.01, warmup=4)
    ratios = [codec.ratio_at(step) for step in range(6)]
    np.testing.assert_allclose(ratios, [0.25 * 0.04 ** (step / 4) for step in range(4)] + [0.01, 0.01])
    spec = Spec("w", (1000,))
    state = codec.init(spec, 0)
    for ratio in ratios:
        assert np.count_nonzero(sent(codec, normal(1000), state)) == round(1000 * ratio)
    assert codec.wire_bytes(spec) == (4 * pair_words(1000, 10), 4 * pair_words(1000, 250))
    assert Threshold(ratio=0.5, warmup=9).ratio_at(0) == 0.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"momentum": 1.0}, "momentum=1.0: choose"),
        ({"momentum": -0.1}, "momentum=-0.1: choose"),
        ({"clip": -1.0}, "clip=-1.0: choose"),
        ({"warmup": -1}, "warmup=-1: choose"),
    ],
)
def test_arguments_out_of_range_say_what_to_choose(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Threshold(ratio=0.01, **arguments)


def test_momentum_correction_without_feedback_is_refused() -> None:
    with pytest.raises(UsageError, match="leave out feedback=off or momentum="):
        Threshold(ratio=0.01, momentum=0.9).init(SOME, 0)
