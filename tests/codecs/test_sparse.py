"""Sparse codecs: what is chosen is what they say, and what is not chosen is not lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs import Floats, Payload, PayloadError, State
from syncline.codecs._sparse import Source, choose_largest, pair_words, read_pairs
from syncline.codecs.sparse import GTopK, RandomK, TopK, share
from syncline.errors import UsageError
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy

laws = settings(deadline=None, max_examples=40)
NONE = np.empty(0, np.float32)


def encoded(codec: Any, x: Floats, state: State) -> Payload:
    out = np.empty(codec.wire_bytes(state.spec)[1] // 4, np.uint32)
    return out[: codec.encode(x, out, state).words]


def decoded(codec: Any, payload: Payload, state: State) -> Floats:
    out = np.full(state.spec.elements, np.nan, np.float32)
    codec.decode(payload, out, state)
    return out


def largest(values: Floats, k: int) -> set[int]:
    """By a stable sort: of equal magnitudes those with the lowest index."""
    return set(np.argsort(-np.abs(values).astype(np.float64), kind="stable")[:k].tolist())


@st.composite
def tensors(draw: Any, sizes: tuple[int, ...] = (1, 2, 31, 1000, 65535, 65536, 65537, 200_000)) -> Floats:
    """Numbers in and out of order: normal ones, few distinct ones, mostly zeros, sorted ones."""
    size, random = draw(st.sampled_from(sizes)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    normal = random.standard_normal(size)
    made = {
        "normal": lambda: normal,
        "ties": lambda: np.round(normal),
        "constant": lambda: np.full(size, -1.5),
        "zeros": lambda: normal * (random.random(size) < 0.001),
        "sorted": lambda: np.sort(normal),
        "one block": lambda: np.where(np.arange(size) < size // 100, 1e6, 1e-6) * normal,
        "denormal": lambda: normal * 1e-42,
    }
    array: Floats = made[draw(st.sampled_from(sorted(made)))]().astype(np.float32)
    return array


@pytest.mark.parametrize("codec", [TopK, GTopK])
@laws
@given(tensors(), st.sampled_from([1e-9, 0.001, 0.01, 0.3, 1.0]), st.booleans())
def test_the_largest_are_chosen_exactly(codec: Any, x: Floats, ratio: float, feedback: bool) -> None:
    made = codec(ratio=ratio)
    state = made.init(Spec("w", (x.size,)), 0, feedback)
    if state.residual is not None:
        state.residual[...] = np.round(np.random.default_rng(x.size).standard_normal(x.size))
    values = x if state.residual is None else x + state.residual
    k = share(ratio, x.size)
    indices, sent = read_pairs(encoded(made, x, state), x.size, k, k)
    assert set(indices.tolist()) == largest(values, k)
    np.testing.assert_array_equal(sent, values[indices])
    if state.residual is not None:
        rest = values.copy()
        rest[indices] = 0
        np.testing.assert_array_equal(state.residual, rest)


def test_zeros_are_sent_without_their_sign() -> None:
    """Whichever way they were found, so that a payload does not depend on it."""
    from syncline.kernels.sparse import select_exactly

    x = np.array([-0.0, 5, -0.0, 0], np.float32)
    wanted = np.array([0, 5, 0], np.float32)
    chosen = choose_largest(Source(x, NONE, NONE), 3, 0)
    indices, values = np.empty(4, np.uint32), np.empty(4, np.float32)
    assert select_exactly(x, NONE, NONE, 0.0, 1.0, 0, 2, indices, values) == 3
    for found in (chosen.values, values[:3]):
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@laws
@given(tensors(), st.integers(0, 2**32 - 1), st.data())
def test_the_choice_does_not_depend_on_the_sample(x: Floats, seed: int, data: Any) -> None:
    k = data.draw(st.integers(1, x.size))
    one, other = (choose_largest(Source(x, NONE, NONE), k, any_seed) for any_seed in (seed, seed ^ 1))
    np.testing.assert_array_equal(one.indices, other.indices)
    assert one.indices.size == k


@laws
@given(st.data(), st.integers(0, 3), st.integers(0, 70_000))
def test_pairs_have_sizes_and_order_as_declared(data: Any, stretches: int, rest: int) -> None:
    """6 bytes a pair; any set of indices can be said, at the ends of stretches too."""
    from syncline.kernels.sparse import write_pairs

    elements = (stretches << 16) + rest
    edges = [edge for edge in (0, 65535, 65536, 131071, 131072, elements - 1) if 0 <= edge < elements]
    some = st.sets(st.sampled_from(edges) | st.integers(0, elements - 1), max_size=50) if edges else st.just(set())
    indices = np.array(sorted(data.draw(some)), np.uint32)
    values = np.arange(indices.size, dtype=np.float32)
    out = np.empty(pair_words(elements, indices.size), np.uint32)
    assert write_pairs(indices, values, elements, out) == out.size
    assert 4 * out.size <= 6 * indices.size + 2 + 4 * (elements // 65536 + 1)
    back, said = read_pairs(out, elements, 0, elements)
    np.testing.assert_array_equal(back, indices)
    np.testing.assert_array_equal(said, values)


@pytest.mark.parametrize(
    ("altered", "says"),
    [
        (lambda words: words[:0], "length"),
        (lambda words: words[:-1], "length"),
        (lambda words: np.append(words, words[:1]), "length"),
        (lambda words: _with(words, 0, 0xFFFFFFFF), "more pairs than there are elements"),
        (lambda words: _with(words, 0, 5), "length"),
        (lambda words: _with(words, 1, 200 << 16 | 3), "element beyond the tensor's 100"),
        (lambda words: _with(words, 1, 3 << 16 | 4), "out of order"),
        (lambda words: _with(words, 1, 4 << 16 | 4), "out of order"),
        (lambda words: _with(words[[0, 1, 3, 4]], 0, 2), "a payload of 2 pairs, expected 4"),
    ],
)
def test_an_altered_payload_is_refused_before_anything_is_written(altered: Any, says: str) -> None:
    codec = TopK(ratio=0.04)
    state = codec.init(Spec("w", (100,)), 0)
    payload = encoded(codec, np.arange(100, dtype=np.float32), state)
    out = np.full(100, 7, np.float32)
    for add in (False, True):
        with pytest.raises(PayloadError, match=says):
            codec.decode(altered(payload), out, state, add=add)
        assert (out == 7).all()


def _with(words: Payload, place: int, word: int) -> Payload:
    changed = words.copy()
    changed[place] = word
    return changed


@laws
@given(tensors(), st.sampled_from([1e-9, 0.01, 0.37, 1.0]), st.integers(0, 5))
def test_random_elements_are_the_same_on_all_ranks(x: Floats, ratio: float, step: int) -> None:
    """Payloads may be added as numbers; with ``decay=1`` nothing is lost; every stratum gives one element."""
    codec, spec = RandomK(ratio=ratio, decay=1), Spec("w", (x.size,))
    states = [codec.init(spec, rank, feedback=True) for rank in range(3)]
    inputs = [x, np.flip(x).copy(), np.ones_like(x)]
    payloads = []
    for mine, state in zip(inputs, states, strict=True):
        state.step = step
        payloads.append(encoded(codec, mine, state).view(np.float32).astype(np.float64))
    total = np.zeros(x.size, np.float32)
    codec.decode(np.sum(payloads, axis=0).astype(np.float32).view(np.uint32), total, states[1])
    chosen = np.flatnonzero(states[2].residual == 0)
    k = share(ratio, x.size)
    assert chosen.size == k
    strata = [j * x.size // k for j in range(k + 1)]
    assert all(first <= index < stop for index, (first, stop) in zip(chosen, pairwise(strata), strict=True))
    kept = np.sum([state.residual for state in states], axis=0)
    np.testing.assert_allclose(total + kept, np.sum(inputs, axis=0), rtol=1e-6, atol=1e-6)


def test_random_elements_are_other_ones_at_every_step_and_in_every_tensor() -> None:
    """All come in their turn: after 2000 steps of 10 % each has been sent about 200 times."""
    codec = RandomK(ratio=0.1)
    x = np.ones(1000, np.float32)
    counts = np.zeros(1000)
    state, other = codec.init(Spec("a", (1000,)), 0), codec.init(Spec("b", (1000,)), 0)
    for step in range(2000):
        state.step = other.step = step
        sent = decoded(codec, encoded(codec, x, state), state)
        assert not np.array_equal(sent, decoded(codec, encoded(codec, x, other), other))
        counts += sent
    assert counts.sum() == 200_000
    assert np.abs(counts - 200).max() < 6 * np.sqrt(2000 * 0.1 * 0.9)


@laws
@given(tensors(), st.integers(2, 6), st.sampled_from([0.001, 0.1, 0.5]), st.integers(0, 2**32 - 1))
def test_merging_loses_nothing(x: Floats, world: int, ratio: float, seed: int) -> None:
    """Whatever the order of merging, the last payload and all residuals sum up to the inputs, in k elements."""
    codec, random = GTopK(ratio=ratio), np.random.default_rng(seed)
    inputs = [random.permutation(x) for _ in range(world)]
    states = [codec.init(Spec("w", (x.size,)), rank, feedback=True) for rank in range(world)]
    waiting = [(rank, encoded(codec, inputs[rank], states[rank])) for rank in range(world)]
    while len(waiting) > 1:
        (mine, left), (_, right) = (waiting.pop(random.integers(len(waiting))) for _ in range(2))
        out = np.empty(codec.wire_bytes(states[0].spec)[1] // 4, np.uint32)
        waiting.append((mine, out[: codec.merge(left, right, out, states[mine])]))
    total = decoded(codec, waiting[0][1], states[0])
    assert np.count_nonzero(total) <= share(ratio, x.size)
    kept = np.sum([state.residual for state in states], axis=0, dtype=np.float64)
    wanted = np.sum(inputs, axis=0, dtype=np.float64)
    np.testing.assert_allclose(total + kept, wanted, rtol=1e-5, atol=1e-5 * np.abs(x).max())


def test_merging_keeps_the_largest_sums_and_the_lowest_of_equal_ones() -> None:
    codec = GTopK(ratio=0.2)
    state = codec.init(Spec("w", (10,)), 0, feedback=True)
    left = encoded(codec, np.array([0, 3, 0, 0, 0, 0, -2, 0, 0, 0], np.float32), codec.init(state.spec, 0))
    right = encoded(codec, np.array([0, -3, 0, 2, 0, 0, 0, 0, 0, 0], np.float32), codec.init(state.spec, 1))
    out = np.empty(left.size, np.uint32)
    assert codec.merge(left, right, out, state) == out.size
    np.testing.assert_array_equal(decoded(codec, out, state), [0, 0, 0, 2, 0, 0, -2, 0, 0, 0])
    assert state.residual is not None
    assert not state.residual.any()
    again = np.empty_like(out)
    other = encoded(codec, np.array([0, 0, 0, 0, 2, 2, 0, 0, 0, 0], np.float32), codec.init(state.spec, 2))
    codec.merge(out, other, again, state)
    np.testing.assert_array_equal(decoded(codec, again, state), [0, 0, 0, 2, 2, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(state.residual, [0, 0, 0, 0, 0, 2, -2, 0, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sum_that_is_not_finite_stays_so_and_touches_no_residual(bad: float) -> None:
    codec = GTopK(ratio=0.01)
    spec = Spec("w", (1000,))
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    wrong = x.copy()
    wrong[500] = bad
    states = [codec.init(spec, rank, feedback=True) for rank in range(2)]
    left, right = encoded(codec, x, states[0]), encoded(codec, wrong, states[1])
    assert states[0].residual is not None
    before = states[0].residual.copy()
    out = np.empty_like(left)
    codec.merge(left, right, out, states[0])
    assert not np.isfinite(decoded(codec, out, states[0])[500])
    np.testing.assert_array_equal(states[0].residual, before)


def test_a_wrong_payload_is_not_merged() -> None:
    codec = GTopK(ratio=0.1)
    state = codec.init(Spec("w", (100,)), 0, feedback=True)
    good = encoded(codec, np.ones(100, np.float32), state)
    for wrong in (good[:-1], _with(good, 0, 3), _with(good, 1, 0xFFFF)):
        for pair in ((good, wrong), (wrong, good)):
            with pytest.raises(PayloadError):
                codec.merge(*pair, np.empty_like(good), state)


@pytest.mark.parametrize("name", ["topk", "gtopk", "randomk", "threshold"])
@pytest.mark.parametrize("ratio", ["0", "-0.1", "1.01", "1e9"])
def test_a_ratio_is_a_share(name: str, ratio: str) -> None:
    with pytest.raises(UsageError, match="choose a share of the elements"):
        Strategy.parse(f"codec={name}(ratio={ratio})")


def test_a_residual_that_decays_stays_below_some_gradients() -> None:
    """What random elements leave is bounded; all of it is kept with ``decay=1``."""
    x = np.ones(1000, np.float32)
    for decay, most in ((0.8, 4.0), (0.5, 1.0), (1.0, 60.0)):
        codec = RandomK(ratio=0.01, decay=decay)
        state = codec.init(Spec("w", (1000,)), 0, feedback=True)
        assert state.residual is not None
        for state.step in range(60):
            encoded(codec, x, state)
        assert most * 0.999 <= state.residual.max() <= most * 1.001


@pytest.mark.parametrize("decay", ["0", "-0.5", "1.01"])
def test_a_decay_is_a_share(decay: str) -> None:
    with pytest.raises(UsageError, match="choose the share of the residual"):
        Strategy.parse(f"codec=randomk(ratio=0.01, decay={decay})")


def test_a_decay_needs_a_residual() -> None:
    assert str(Strategy.parse("codec=randomk(ratio=0.01)")) == "codec=feedback(randomk(ratio=0.01))"
    assert str(Strategy.parse("codec=randomk(ratio=0.01, decay=1)")) == "codec=feedback(randomk(ratio=0.01, decay=1.0))"
    with pytest.raises(UsageError, match="so feedback=off is impossible"):
        Strategy.parse("codec=randomk(ratio=0.01, decay=1) feedback=off")
