"""PowerSGD between simulated ranks, beyond the laws of rounds: low rank recovered, overflow, factors."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.codecs import Floats, Rounds, State
from syncline.codecs.low_rank import PowerSGD
from syncline.errors import UsageError
from syncline.kernels.low_rank import orthonormalise
from syncline.nouns import Spec
from syncline.strategy.strategy import Strategy
from syncline.testing import check_codec
from syncline.testing.rounds import averaged

laws = settings(deadline=None, max_examples=40)


def start(codec: PowerSGD, shape: tuple[int, ...], world: int, feedback: bool = True) -> list[State]:
    return [codec.init(Spec("layer.weight", shape), rank, feedback) for rank in range(world)]


def normal(shape: tuple[int, ...], seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(int(np.prod(shape)), dtype=np.float32)


def same(arrays: list[Floats]) -> None:
    for array in arrays[1:]:
        np.testing.assert_array_equal(array.view(np.uint32), arrays[0].view(np.uint32))


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_every_rank_keeps_all_laws(rank: int) -> None:
    check_codec(f"powersgd(rank={rank})", seed=rank, examples=15)


@pytest.mark.parametrize("shape", [(64, 32, 3, 3), (129, 257), (40, 30)])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_sum_of_that_rank_is_recovered(shape: tuple[int, ...], rank: int) -> None:
    codec = PowerSGD(rank=rank)
    rows = shape[0]
    random = np.random.default_rng(rank)
    left, right = random.standard_normal((rows, rank)), random.standard_normal((rank, int(np.prod(shape)) // rows))
    inputs = [(part * (left @ right)).astype(np.float32).ravel() for part in (0.5, -2.0, 3.0)]
    results, _, _ = averaged(codec, inputs, start(codec, shape, 3))
    wanted = 1.5 * (left @ right).ravel()
    np.testing.assert_allclose(results[0], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_the_best_approximation_is_found_in_a_few_steps() -> None:
    """Power iteration: with the same gradient again and again the error becomes that of the truncated SVD."""
    codec, shape = PowerSGD(rank=3), (60, 80)
    x = normal(shape, 3)
    states = start(codec, shape, 1, feedback=False)
    for _ in range(40):
        results, _, _ = averaged(codec, [x], states)
    singular = np.linalg.svd(x.reshape(shape), compute_uv=False)
    best = np.sqrt(np.sum(singular[3:] ** 2))
    assert np.linalg.norm(results[0] - x) < 1.01 * best


@pytest.mark.parametrize(("shape", "rank"), [((50,), 1), ((), 1), ((0,), 2), ((0, 3), 1), ((8, 6), 4), ((1, 50), 1)])
def test_where_factors_are_no_smaller_the_sum_is_exact(shape: tuple[int, ...], rank: int) -> None:
    codec = PowerSGD(rank=rank)
    states = start(codec, shape, 2)
    inputs = [normal(shape, 0), normal(shape, 1)]
    results, _, sizes = averaged(codec, inputs, states)
    same(results)
    np.testing.assert_array_equal(results[0], inputs[0] + inputs[1])
    assert sizes == [inputs[0].size]
    assert not any(state.residual.any() for state in states if state.residual is not None)


@pytest.mark.parametrize("shape", [(30, 20), (50,)])
def test_what_overflows_as_a_sum_only_reaches_all_ranks_and_no_memory(shape: tuple[int, ...]) -> None:
    """Nobody's input is at fault; residuals stay; the next step is an ordinary one."""
    codec = PowerSGD(rank=2)
    states = start(codec, shape, 3)
    averaged(codec, [normal(shape, rank) for rank in range(3)], states)
    before = deepcopy(states)
    inputs = [normal(shape, rank) for rank in range(3)]
    inputs[1][7] = inputs[2][7] = 3e38
    results, finite, _ = averaged(codec, inputs, states)
    assert not any(np.isfinite(result).all() for result in results)
    assert finite[0]
    for state, old in zip(states, before, strict=True):
        np.testing.assert_array_equal(state.residual, old.residual)
        assert all(np.isfinite(array).all() for array in state.memory.values())
    same([state.memory.get("q", normal((1,), 0)) for state in states])
    results, finite, _ = averaged(codec, [normal(shape, rank) for rank in range(3)], states)
    assert all(np.isfinite(result).all() for result in results)
    assert finite == [True] * 3
    same(results)


def test_a_step_of_zeros_loses_no_direction() -> None:
    codec, shape = PowerSGD(rank=2), (30, 20)
    states = start(codec, shape, 2)
    results, _, _ = averaged(codec, [np.zeros(600, np.float32)] * 2, states)
    assert not results[0].any()
    x = np.outer(normal((30,), 0), normal((20,), 1)).ravel()
    results, _, _ = averaged(codec, [x, x], states)
    np.testing.assert_allclose(results[0], 2 * x, atol=1e-5 * np.abs(x).max())


@laws
@given(st.data(), st.integers(1, 8), st.integers(1, 400), st.integers(-40, 30))
def test_vectors_become_orthonormal_whatever_they_are(data: Any, rank: int, n: int, exponent: int) -> None:
    """Zeros, copies and sums of others too; where there are no more dimensions, zero."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    vectors = random.standard_normal((rank, n)) * 10.0**exponent
    for r in range(rank):
        kind = data.draw(st.sampled_from(["own", "zero", "copy", "nearly a copy", "sum"]))
        if kind == "zero":
            vectors[r] = 0
        elif r and kind == "copy":
            vectors[r] = vectors[r - 1]
        elif r and kind == "nearly a copy":
            vectors[r] = vectors[0] * (1 + 1e-3 * random.standard_normal(n))
        elif r and kind == "sum":
            vectors[r] = vectors[:r].sum(axis=0)
    made = vectors.astype(np.float32).ravel()
    orthonormalise(made, rank, 5)
    q = made.reshape(rank, n).astype(np.float64)
    np.testing.assert_allclose(q @ q.T, np.diag(np.arange(rank) < n).astype(float), atol=1e-5)


def test_each_tensor_begins_with_factors_of_its_own() -> None:
    codec, shape = PowerSGD(rank=3), (129, 257)
    one, other = (codec.init(Spec(name, shape), 0).memory["q"] for name in ("layer.weight", "other.weight"))
    assert not np.array_equal(one, other)


def test_it_is_no_codec_of_payloads_and_says_so() -> None:
    codec = PowerSGD(rank=1)
    assert isinstance(codec, Rounds)
    state = codec.init(Spec("w", (9, 9)), 0)
    for call in (codec.encode, codec.decode):
        with pytest.raises(UsageError, match="sums its factors over the ranks"):
            call(np.zeros(81, np.float32), np.zeros(81, np.uint32), state)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, -1, 1025])
def test_a_rank_out_of_range_says_what_to_choose(rank: int) -> None:
    with pytest.raises(UsageError, match="choose from 1 to 1024"):
        Strategy.parse(f"codec=powersgd(rank={rank})")
